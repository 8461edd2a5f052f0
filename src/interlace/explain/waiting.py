"""Waiting for slower ranks, told apart from moving data.

A collective lasts on each rank from its own start until all ranks have come and the data have
moved. So the shortest of its durations over the ranks is the most that moving took, and what a rank
spends beyond that it waited. This compares durations alone: clocks of the ranks need not agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from interlace.explain.exposure import exposure
from interlace.explain.rank_trace import Communicated, RankTrace
from interlace.ir import interval_sets as sets

_SENDS = ("send",)
"""Kinds whose durations on two ranks cannot be told to belong together."""
_STRAGGLES = 1.1
"""Compute over the median of the ranks from which a rank is called a straggler; a choice."""
_Key = tuple[str, str, tuple[int, ...], str]
"""Step, kind, ranks, name of the group."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank over the chosen steps, ns."""

    rank: int
    step_ns: int
    """Median of the marked steps on the host."""
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    hidden_fraction: float
    waiting_ns: int | None
    """Of the collectives that were found on several ranks, what each lasted beyond the shortest;
    None if none was."""
    straggler: bool
    """Computes at least 1.1 times as long as the median rank."""

    @property
    def waiting_share(self) -> float:
        """Waiting over communication; 0 where it is not known."""
        if self.waiting_ns is None or not self.communication_ns:
            return 0.0
        return min(1.0, self.waiting_ns / self.communication_ns)


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks that were given."""

    rows: tuple[RankRow, ...]
    matched: int
    """Collectives that were found on several ranks."""
    unmatched: str
    """Why some were not; empty if all were or there is one rank."""

    @property
    def waiting_share(self) -> float:
        """Waiting over communication, of all ranks that know it; 0 if none does."""
        known = [row for row in self.rows if row.waiting_ns is not None]
        total = sum(row.communication_ns for row in known)
        return sum(row.waiting_ns or 0 for row in known) / total if total else 0.0


def compare_ranks(traces: Sequence[RankTrace]) -> Ranks:
    """Each rank's time, and who waits for whom."""
    members = [_by_key(trace) for trace in traces]
    waiting: dict[int, int] = {}
    matched, differ, nameless = 0, 0, 0
    for key in sorted({key for each in members for key in each}):
        found = [(i, each[key]) for i, each in enumerate(members) if key in each]
        if not _comparable(found[0][1][0], len(traces)):
            nameless += sum(len(own) for _, own in found)
        elif len({len(own) for _, own in found}) > 1:
            differ += sum(len(own) for _, own in found)
        elif len(found) > 1:
            matched += len(found[0][1])
            for same in zip(*(own for _, own in found), strict=True):
                shortest = min(each.duration_ns for each in same)
                for (i, _), each in zip(found, same, strict=True):
                    waiting[i] = waiting.get(i, 0) + each.duration_ns - shortest
    figures = [exposure(trace) for trace in traces]
    middle = median([each.compute_ns for each in figures])
    rows = tuple(
        RankRow(
            rank=trace.rank,
            step_ns=round(median([step.duration_ns for step in trace.steps])),
            compute_ns=own.compute_ns,
            communication_ns=own.communication_ns,
            exposed_ns=own.exposed_ns,
            hidden_fraction=own.hidden_fraction,
            waiting_ns=waiting.get(i),
            straggler=len(traces) > 1 and own.compute_ns >= _STRAGGLES * middle,
        )
        for i, (trace, own) in enumerate(zip(traces, figures, strict=True))
    )
    return Ranks(rows, matched, _unmatched(len(traces), differ, nameless))


def _by_key(trace: RankTrace) -> dict[_Key, list[Communicated]]:
    found: dict[_Key, list[Communicated]] = {}
    for each in trace.communicated:
        if each.kind not in _SENDS:
            step = trace.steps[each.place.step].name
            group = "" if each.ranks else each.group
            found.setdefault((step, each.kind, each.ranks, group), []).append(each)
    return found


def _comparable(each: Communicated, given: int) -> bool:
    """Whether the trace says which ranks take part: by their numbers, or because all do."""
    return bool(each.ranks) or each.group_size == given


def _unmatched(given: int, differ: int, nameless: int) -> str:
    if given == 1:
        return ""
    reasons = []
    if nameless:
        reasons.append(f"{nameless:,} collectives of groups whose ranks the traces do not name")
    if differ:
        reasons.append(f"{differ:,} collectives of which the ranks do not have equally many")
    return "; ".join(reasons)


def busiest(traces: Sequence[RankTrace]) -> RankTrace:
    """The rank that computes longest. The others wait for it, so its collectives wait least."""
    return max(traces, key=lambda trace: (_compute_ns(trace), -trace.rank))


def _compute_ns(trace: RankTrace) -> int:
    return sets.length(sets.union((each.start_ns, each.end_ns) for each in trace.computed))
