"""The problem that every search solves, and what a solution must respect."""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.ir.costs import Contention
from interlace.ir.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Problem:
    """Find an order of `graph` on one compute lane and its link lanes.

    A search returns the ids of all operators in an order that respects dependencies; its length
    is that of `sim.lanes.simulate`, its memory that of `search.memory.peak_bytes`. Searches
    work on `solo_ns` alone; the planner iterates them until the times include `contention`.
    """

    graph: OpGraph
    """One strand, or several merged (ids `strand.name`)."""
    solo_ns: Mapping[str, int]
    """Time of each operator."""
    issue_ns: int = 0
    """Time for which starting a collective holds the compute lane."""
    memory_bytes: int = 0
    """Largest allowed peak of values made by the graph; 0 for no bound."""
    contention: Contention | None = None
    """How operators and transfers slow each other down."""
