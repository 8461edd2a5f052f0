"""Simulate a whole step: every action of a schedule, with nothing emptied in between.

A collective that one action issues may end in the next one, so a step is a little shorter than
the sum of its phases. Gradient clipping and the optimizer are not part of it.
"""

from collections.abc import Iterator, Mapping, Sequence

from interlace.ir.actions import Action, Slot, label_of, strand
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import PhasePlan, Plan
from interlace.ir.timeline import Timeline
from interlace.schedules.finder import Schedule, find
from interlace.sim.lanes import Rank, RunningTransfer

_Across = dict[tuple[str, str], list[tuple[str, str]]]
"""(graph, operator) -> the operators of other graphs of its micro-batch that it waits for."""
_Issued = tuple[str, str, bool]
"""(label of the strand or empty where it is alone, operator, whether a barrier follows)."""


def simulate_step(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    micro_batches: int,
    *,
    schedule: Schedule | None = None,
    label: str = "predicted",
) -> Timeline:
    """The timeline of one step of `micro_batches` under `plan`; `graphs` are those of the strands,
    and `schedule` is looked up by the plan's name if it is not given."""
    schedule = schedule or find(plan.schedule)
    actions = schedule.actions(micro_batches, graphs, head=bool(plan.head))
    phases = {action.phase for action in actions}
    of_phase = {name: phase_graph(name, graphs, plan.head) for name in phases}
    times = {name: costs.of(graph) for name, graph in graphs.items()}
    waits = _waits(graphs, _across(of_phase) | _between_chunks(graphs))
    rank = Rank(costs.issue_ns, costs.contention)
    flying: dict[tuple[str, int, str], RunningTransfer] = {}
    for slot, name, stop in _operators(plan, actions):
        graph, index = slot.strand.graph, slot.micro_batch
        op = graphs[graph].by_id[name]
        sources = [(other, index, source) for other, source in waits[graph, name]]
        rank.wait(flying[source] for source in sources if source in flying)
        ns = times[graph][name]
        if op.is_collective:
            flying[graph, index, name] = rank.collective(op, ns, slot.strand.shown, index)
        else:
            rank.compute(op, ns, slot.strand.shown, index)
        if stop:
            rank.wait(rank.in_flight())
    return Timeline(label, 0, rank.finish())


def _waits(graphs: Mapping[str, OpGraph], across: _Across) -> _Across:
    """The collectives that each operator waits for, those of its own graph first."""
    found: _Across = {}
    for graph in graphs:
        for op in graphs[graph].operators:
            sources = [(graph, name) for name in op.inputs]
            sources += across.get((graph, op.id), ())
            found[graph, op.id] = [
                (other, name) for other, name in sources if graphs[other].by_id[name].is_collective
            ]
    return found


def _across(of_phase: Mapping[str, OpGraph]) -> _Across:
    """What each operator waits for in another graph that works in the same memory."""
    found: _Across = {}
    for graph in of_phase.values():
        for op in graph.operators:
            own = _graph_of(op.id)
            for source in op.inputs:
                other = _graph_of(source)
                if other != own:
                    key = (own, op.id.rpartition(".")[2])
                    found.setdefault(key, []).append((other, source.rpartition(".")[2]))
    return found


def _graph_of(operator: str) -> str:
    label = label_of(operator)
    return strand(label).graph if label else ""


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


def _operators(plan: Plan, actions: Sequence[Action]) -> Iterator[tuple[Slot, str, bool]]:
    """(slot, operator, whether a barrier follows) in the order of issue."""
    issued: dict[str, list[_Issued]] = {}
    for action in actions:
        if action.phase not in issued:
            issued[action.phase] = _issued(plan.needed(action.phase), single=len(action.slots) == 1)
        slots = {slot.strand.label: slot for slot in action.slots}
        slots[""] = action.slots[0]
        for label, name, stop in issued[action.phase]:
            yield slots[label], name, stop


def _issued(planned: PhasePlan, *, single: bool) -> list[_Issued]:
    stops = frozenset(planned.barriers)
    return [
        ("" if single else label_of(name), name.rpartition(".")[2], name in stops)
        for name in planned.order
    ]
