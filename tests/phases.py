"""Phases of a step by what they are, for tests that look at plans."""

from collections.abc import Callable, Collection, Mapping

from interlace.ir.actions import steady_phase
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import PhasePlan, Plan
from interlace.schedules.finder import find
from interlace.search.planner import searched_phases


def phase_graphs(
    strands: Mapping[str, OpGraph], head: int = 0, schedule: str = "two_strand"
) -> dict[str, OpGraph]:
    """The graph of every phase of a schedule, in order of appearance."""
    names = find(schedule).phases(strands, head=bool(head))
    return {name: phase_graph(name, strands, head) for name in names}


def planned_graphs(strands: Mapping[str, OpGraph], head: int = 0) -> dict[str, OpGraph]:
    """The graphs of the phases that a plan of two strands orders: first, both strands, last."""
    graphs = phase_graphs(strands, head)
    return {name: graphs[name] for name in searched_phases(tuple(graphs))}


def plan_by(
    strands: Mapping[str, OpGraph], order: Callable[[OpGraph], PhasePlan], head: int = 0
) -> Plan:
    """A plan of two strands whose phases are ordered by `order`."""
    phases = {name: order(graph) for name, graph in planned_graphs(strands, head).items()}
    return Plan("random", "g", "c", "two_strand", phases, head)


def both(phases: Collection[str]) -> str:
    """The phase in which a forward runs beside a backward."""
    return steady_phase(phases)
