"""Simulate a whole step: every phase of every micro-batch, with nothing emptied in between.

A collective that one phase issues may end in the next one, so a step is a little shorter than
the sum of its phases. Gradient clipping and the optimizer are not part of it.
"""

from collections.abc import Container, Iterator, Mapping

from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.phases import (
    AGAIN,
    BACKWARD,
    BASE_STRAND,
    BEFORE,
    FINAL,
    FIRST,
    FORWARD,
    GATHER,
    LAST,
    NEXT,
    PASS,
    REDUCE,
    STRANDS,
    end_strands,
    phase_graphs,
    phases_of_step,
)
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.sim.strands import Rank, Transfer


def simulate_step(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    micro_batches: int,
    *,
    label: str = "predicted",
) -> Timeline:
    """The timeline of one step of `micro_batches` under `plan`; `graphs` are those of the strands.
    A plan without a `pair` phase runs one strand."""
    strands = {name: graphs[name] for name in STRANDS if name in graphs}
    times = {name: costs.of(graph) for name, graph in strands.items()}
    across = _across(phase_graphs(graphs, plan.ahead))
    rank = Rank(costs.issue_ns, costs.contention)
    flying: dict[tuple[str, int, str], Transfer] = {}
    for strand, micro_batch, name, stop in _operators(plan, strands, micro_batches):
        op = strands[strand].by_id[name]
        shown = PASS.get(strand, strand)
        sources = [(strand, micro_batch, source) for source in op.inputs]
        sources += [
            (other, micro_batch, source) for other, source in across.get((strand, name), ())
        ]
        rank.wait(flying[source] for source in sources if source in flying)
        ns = times[strand][name]
        if op.is_collective:
            flying[strand, micro_batch, name] = rank.collective(op, ns, shown, micro_batch)
        else:
            rank.compute(op, ns, shown, micro_batch)
        if stop:
            rank.wait(rank.in_flight())
    return Timeline(label, 0, rank.finish())


def _across(of_phase: Mapping[str, OpGraph]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """What each operator waits for in another strand of its own micro-batch."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for graph in of_phase.values():
        for op in graph.operators:
            strand, _, name = op.id.rpartition(".")
            strand = BASE_STRAND.get(strand, strand)
            for source in op.inputs:
                other, _, own = source.rpartition(".")
                if BASE_STRAND.get(other, other) != strand:
                    found.setdefault((strand, name), []).append((other, own))
    return found


def _operators(
    plan: Plan, strands: Container[str], micro_batches: int
) -> Iterator[tuple[str, int, str, bool]]:
    """(strand, micro-batch, operator, whether a barrier follows) in the order of issue."""
    orders = plan.orders
    alone = {FORWARD: end_strands(strands)[0], BACKWARD: end_strands(strands)[1]}
    alone |= {AGAIN: FORWARD, BEFORE: BACKWARD}
    for phase, forward, backward in phases_of_step(orders, micro_batches):
        planned = plan.phases.get("pair" if phase == LAST else phase)
        stops = frozenset(planned.barriers if planned else ())
        owner = {
            GATHER: (GATHER, forward),
            FIRST: (FIRST, forward),
            FORWARD: (FORWARD, forward),
            NEXT: (FORWARD, forward + 1),
            BACKWARD: (BACKWARD, backward),
            FINAL: (FINAL, backward),
            REDUCE: (REDUCE, backward),
        }
        for full_name in orders[phase]:
            head, _, name = full_name.rpartition(".")
            strand, micro_batch = owner[head or alone[phase]]
            yield strand, micro_batch, name, full_name in stops
