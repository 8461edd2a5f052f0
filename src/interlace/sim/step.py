"""Simulate a whole step: every phase of every micro-batch, with nothing emptied in between.

A collective that one phase issues may end in the next one, so a step is a little shorter than
the sum of its phases. Gradient clipping and the optimizer are not part of it.
"""

from collections.abc import Iterator, Mapping

from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.phases import BACKWARD, FORWARD, NEXT, without_head
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
    """The timeline of one step of `micro_batches` under `plan`; `graphs` has `forward` and
    `backward`. A plan without a `pair` phase runs one strand."""
    strands = {name: graphs[name] for name in (FORWARD, BACKWARD)}
    times = {name: costs.of(graph) for name, graph in strands.items()}
    rank = Rank(costs.issue_ns, costs.contention)
    flying: dict[tuple[str, int, str], Transfer] = {}
    for strand, micro_batch, name, stop in _operators(plan, micro_batches):
        op = strands[strand].by_id[name]
        sources = ((strand, micro_batch, source) for source in op.inputs)
        rank.wait(flying[source] for source in sources if source in flying)
        ns = times[strand][name]
        if op.is_collective:
            flying[strand, micro_batch, name] = rank.collective(op, ns, strand, micro_batch)
        else:
            rank.compute(op, ns, strand, micro_batch)
        if stop:
            rank.wait(rank.in_flight())
    return Timeline(label, 0, rank.finish())


def _operators(plan: Plan, micro_batches: int) -> Iterator[tuple[str, int, str, bool]]:
    """(strand, micro-batch, operator, whether a barrier follows) in the order of issue."""
    for phase, forward, backward in _phases(plan, micro_batches):
        planned = plan.phases["pair" if phase == "last" else phase]
        order = without_head(planned.order) if phase == "last" else planned.order
        stops = frozenset(planned.barriers)
        owner = {
            FORWARD: (FORWARD, forward),
            NEXT: (FORWARD, forward + 1),
            BACKWARD: (BACKWARD, backward),
        }
        for full_name in order:
            head, _, name = full_name.rpartition(".")
            strand, micro_batch = owner[head or phase]
            yield strand, micro_batch, name, full_name in stops


def _phases(plan: Plan, micro_batches: int) -> Iterator[tuple[str, int, int]]:
    """(phase, forward micro-batch, backward micro-batch), as the executor runs them."""
    if "pair" not in plan.phases:
        for index in range(1, micro_batches + 1):
            yield FORWARD, index, 0
            yield BACKWARD, 0, index
        return
    yield FORWARD, 1, 0
    for index in range(2, micro_batches + 1):
        yield ("last" if index == micro_batches else "pair"), index, index - 1
    yield BACKWARD, 0, micro_batches
