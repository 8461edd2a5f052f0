"""The problem that every search solves, and what a solution must respect."""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.ir.costs import Contention
from interlace.ir.graph import OpGraph
from interlace.schedules.finder import sequential
from interlace.search.memory import step_peak_bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Find an order of `graph` on one compute lane and its link lanes.

    A search returns the ids of all operators in an order that respects dependencies; its length
    is that of `sim.lanes.simulate`, its memory that of `search.memory.peak_bytes`. Searches
    work on `solo_ns` alone; the planner gives them times that an earlier simulation found under
    `contention`, and polishes what they find under it (`search.contended`).
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

    @property
    def slowed(self) -> Contention | None:
        """The contention if there is any."""
        given = self.contention
        return None if given is None or given.is_none else given


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits in bytes of one rank; without any, a plan may take what it likes."""

    bound_bytes: int = 0
    """Values of one phase may never take more; 0 for no bound."""
    constant_bytes: int = 0
    """What is there beside values: weights, gradient sums, optimizer state."""
    extra_share: float | None = None
    """Two strands aim to take no more than one strand and this share of all that it needs."""
    extra_bytes: int = 0
    """But so many bytes beyond one strand are always fine."""

    def aim(self, strands: Mapping[str, OpGraph]) -> int:
        """Bytes of values within which `merge` looks for a plan, 0 for no limit. One strand after
        the other always keeps within the share, so the share alone leaves no phase unplanned."""
        if self.extra_share is None:
            return self.bound_bytes
        one = step_peak_bytes(sequential(strands), strands)
        extra = max(self.extra_bytes, int(self.extra_share * (self.constant_bytes + one)))
        return min(self.bound_bytes or one + extra, one + extra)
