"""Simulate a whole step: every action of a schedule, with nothing emptied in between.

A collective that one action issues may end in the next one, so a step is a little shorter than
the sum of its phases. Gradient clipping and the optimizer are not part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from interlace.ir.actions import Action, label_of, strand, strands_of
from interlace.ir.costs import CostTable
from interlace.ir.graph import Operator, OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.schedules.finder import Schedule, find
from interlace.sim.lanes import Rank, RunningTransfer

_Across = dict[tuple[str, str], list[tuple[str, str]]]
"""(graph, operator) -> the operators of other graphs of its micro-batch that it waits for."""


Drawn = Callable[[Operator, int], int]
"""How long an operator takes this time, in ns, given how long it takes on average."""


class _Issued(NamedTuple):
    """One operator of a phase, as every action of that phase issues it."""

    label: str
    """Of its strand, or empty where that is alone."""
    op: Operator | None
    """None for several that compute, of which nobody will ask."""
    ns: int
    waits: Sequence[tuple[str, str]]
    """The collectives that it waits for: (graph, operator)."""
    stop: bool
    """Whether a barrier follows."""


def simulate_step(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    micro_batches: int,
    *,
    schedule: Schedule | None = None,
    label: str = "predicted",
    brief: bool = False,
    drawn: Drawn | None = None,
) -> Timeline:
    """The timeline of one step of `micro_batches` under `plan`; `graphs` are those of the strands,
    and `schedule` is looked up by the plan's name if it is not given. With `brief` it may lack
    operators that compute: its length, its collectives and waits are those of the whole. With
    `drawn` each operator takes what that says, else what it takes on average."""
    schedule = schedule or find(plan.schedule)
    actions = schedule.actions(micro_batches, graphs, head=bool(plan.head))
    phases = {action.phase for action in actions}
    of_phase = {name: phase_graph(name, graphs, plan.head) for name in phases}
    times = {name: costs.of(graph) for name, graph in graphs.items()}
    waits = _waits(graphs, _across(of_phase) | _between_chunks(graphs))
    rank = Rank(costs.issue_ns, costs.contention)
    flying: dict[tuple[str, int, str], RunningTransfer] = {}
    issued: dict[str, list[_Issued]] = {}
    for action in actions:
        if action.phase not in issued:
            own = _issued(plan, action, graphs, times, waits)
            issued[action.phase] = _joined(own) if brief and rank.alone else own
        slots = {slot.strand.label: slot for slot in action.slots} | {"": action.slots[0]}
        runs = {
            word: (slot.strand.graph, slot.strand.shown, slot.micro_batch)
            for word, slot in slots.items()
        }
        for word, op, ns, sources, stop in issued[action.phase]:
            if op is None:
                rank.compute_unseen(ns)
                continue
            graph, shown, index = runs[word]
            if sources:
                keys = [(other, index, source) for other, source in sources]
                rank.wait([flying[key] for key in keys if key in flying])
            took = drawn(op, ns) if drawn else ns
            if op.is_collective:
                flying[graph, index, op.id] = rank.collective(op, took, shown, index)
            else:
                rank.compute(op, took, shown, index)
            if stop:
                rank.wait(rank.in_flight())
    return Timeline(label, 0, rank.finish())


def _waits(graphs: Mapping[str, OpGraph], across: _Across) -> _Across:
    """The collectives that each operator waits for, those of its own graph first."""
    found: _Across = {}
    slow = {name: {op.id for op in graph.collectives} for name, graph in graphs.items()}
    for graph in graphs:
        for op in graphs[graph].operators:
            key = (graph, op.id)
            own = [(graph, name) for name in op.inputs if name in slow[graph]]
            others = [each for each in across.get(key, ()) if each[1] in slow[each[0]]]
            found[key] = own + others
    return found


def _across(of_phase: Mapping[str, OpGraph]) -> _Across:
    """What each operator waits for in another graph that works in the same memory."""
    found: _Across = {}
    for phase, graph in of_phase.items():
        if len(strands_of(phase)) == 1:  # ids have no labels
            continue
        for op in graph.operators:
            label = label_of(op.id)
            for source in op.inputs:
                if label_of(source) == label:
                    continue
                own, other = _graph_of(op.id), _graph_of(source)
                if other != own:
                    key = (own, op.id.rpartition(".")[2])
                    found.setdefault(key, []).append((other, source.rpartition(".")[2]))
    return found


def _graph_of(operator: str) -> str:
    return strand(label_of(operator)).graph


def _between_chunks(graphs: Mapping[str, OpGraph]) -> _Across:
    """What each operator of a chunk waits for in the chunks before it on its walk: what they hand
    over goes by the names of the operators that made it."""
    walks: dict[str, list[str]] = {}
    for name in graphs:
        if strand(name).chunk is not None:
            walks.setdefault(str(strand(name).direction), []).append(name)
    return {
        (name, op.id): [
            (other, read)
            for read in op.reads
            for other in names
            if other != name and read in graphs[other].by_id
        ]
        for names in walks.values()
        for name in names
        for op in graphs[name].operators
    }


def _issued(
    plan: Plan,
    action: Action,
    graphs: Mapping[str, OpGraph],
    times: Mapping[str, Mapping[str, int]],
    waits: _Across,
) -> list[_Issued]:
    """What an action issues, in order."""
    planned = plan.needed(action.phase)
    stops = frozenset(planned.barriers)
    graph_of = {slot.strand.label: slot.strand.graph for slot in action.slots}
    alone = action.slots[0].strand.graph if len(action.slots) == 1 else ""
    found = []
    for name in planned.order:
        label, _, short = name.rpartition(".")
        graph = alone or graph_of[label]
        op, ns = graphs[graph].by_id[short], times[graph][short]
        found.append(_Issued("" if alone else label, op, ns, waits[graph, short], name in stops))
    return found


def _joined(issued: Sequence[_Issued]) -> list[_Issued]:
    """The same with operators in a row that compute and wait for nothing as one."""
    found: list[_Issued] = []
    ns = 0
    for each in issued:
        assert each.op is not None
        if not (each.waits or each.stop or each.op.is_collective):
            ns += each.ns
            continue
        if ns:
            found.append(_Issued("", None, ns, (), False))
            ns = 0
        found.append(each)
    return [*found, _Issued("", None, ns, (), False)]
