"""A plan by PyTorch's own overlap scheduler, to compare with."""

from interlace.errors import InputError
from interlace.graphs.inductor import inductor_order
from interlace.ir.actions import strands_of
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import PhasePlan, Plan
from interlace.runtime.traced_strands import BACKWARD, FORWARD, Strands
from interlace.schedules.finder import find
from interlace.sim.lanes import simulate


def inductor_plan(strands: Strands, costs: CostTable) -> Plan:
    """The scheduler's order of each phase, from the same times as any search.

    It moves operators little, so of two strands it is given an order in which both strands progress
    alike. Raises InputError where torch has no such scheduler, and for a step that gathers weights
    or reduces gradients outside of micro-batches.
    """
    others = sorted(strands.graphs.keys() - {FORWARD, BACKWARD})
    if others:
        raise InputError(
            f"PyTorch's overlap scheduler is not given the strands {', '.join(others)} of a "
            "data-parallel step",
            hint="leave inductor out of compare.modes, or set parallel.zero to 3 and "
            "parallel.reduce to micro_batch",
        )
    traced = {name: strands.graphs[name] for name in (FORWARD, BACKWARD)}
    schedule = find("two_strand")
    phases = {}
    for phase in schedule.phases(strands.op_graphs):
        graph = phase_graph(phase, strands.op_graphs, 0)
        solo_ns = costs.of(graph)
        if len(strands_of(phase)) > 1:
            order = inductor_order(traced, alternating(graph, solo_ns), solo_ns)
        else:
            full = {f"{phase}.{name}": ns for name, ns in solo_ns.items()}
            found = inductor_order({phase: traced[phase]}, list(full), full)
            order = tuple(name.partition(".")[2] for name in found)
        timeline = simulate(
            graph, order, solo_ns, issue_ns=costs.issue_ns, contention=costs.contention
        )
        phases[phase] = PhasePlan(order, timeline.length_ns, timeline.exposed_ns())
    return Plan("inductor", strands.digest, costs.digest, schedule.name, phases)


def alternating(graph: OpGraph, solo_ns: dict[str, int]) -> tuple[str, ...]:
    """Both strands of `graph` in trace order, each operator where its strand has spent the same
    share of its time as the other."""
    totals: dict[str, int] = {}
    at: dict[str, int] = {}
    for name in graph.order:
        strand = name.partition(".")[0]
        at[name] = totals.get(strand, 0)
        totals[strand] = at[name] + solo_ns[name]

    def progress(name: str) -> float:
        return at[name] / max(1, totals[name.partition(".")[0]])

    return tuple(sorted(graph.order, key=progress))
