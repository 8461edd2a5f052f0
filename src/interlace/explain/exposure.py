"""How much of the communication of one rank was hidden under its compute.

Communication is the time in which at least one collective is under way, compute that in which at
least one compute kernel is. What is in both is hidden, the rest of the communication is exposed.
That is `get_comm_comp_overlap` of HolisticTraceAnalysis, to the nanosecond of the trace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.explain.rank_trace import Communicated, Computed, RankTrace
from interlace.ir import interval_sets as sets


@dataclass(frozen=True, slots=True)
class Exposure:
    """Sums over some steps of one rank, in ns."""

    device_ns: int
    """From the first kernel of each step to the first kernel of the next, or to the last end."""
    compute_ns: int
    communication_ns: int
    hidden_ns: int

    @property
    def exposed_ns(self) -> int:
        """Communication beside which nothing was computed."""
        return self.communication_ns - self.hidden_ns

    @property
    def idle_ns(self) -> int:
        """Time with neither: the host, copies, or other processes."""
        return max(0, self.device_ns - self.compute_ns - self.exposed_ns)

    @property
    def hidden_fraction(self) -> float:
        """Hidden / communication; 1 if there is no communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else 1.0


@dataclass(frozen=True, slots=True)
class KindRow:
    """The collectives of one kind in one process group, over the chosen steps of one rank."""

    kind: str
    group: str
    group_size: int
    count: int
    bytes: int | None
    """None if the trace does not have all sizes."""
    busy_ns: int
    """Time in which at least one of them was under way."""
    exposed_ns: int
    """That part of it in which nothing was computed; what two kinds expose at once counts for
    both."""


def exposure(trace: RankTrace) -> Exposure:
    """Of all chosen steps together."""
    busy = _union(trace.computed)
    talk = _union(trace.communicated)
    return Exposure(
        device_ns=sum(end - start for start, end in windows(trace)),
        compute_ns=sets.length(busy),
        communication_ns=sets.length(talk),
        hidden_ns=sets.length(sets.common(busy, talk)),
    )


def windows(trace: RankTrace) -> list[tuple[int, int]]:
    """Of each step that has any kernel, from its first kernel to the first of the next chosen step
    if that one follows at once, else to its last end."""
    items: list[Computed | Communicated] = [*trace.computed, *trace.communicated]
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for each in items:
        step = each.place.step
        starts[step] = min(starts.get(step, each.start_ns), each.start_ns)
        ends[step] = max(ends.get(step, each.end_ns), each.end_ns)
    found = []
    for step, start in sorted(starts.items()):
        following = starts.get(step + 1)
        found.append((start, ends[step] if following is None else max(start, following)))
    return found


def kind_rows(trace: RankTrace) -> tuple[KindRow, ...]:
    """One row for each kind and process group, the longest exposed first."""
    busy = _union(trace.computed)
    groups: dict[tuple[str, str], list[Communicated]] = {}
    for each in trace.communicated:
        groups.setdefault((each.kind, each.group), []).append(each)
    rows = []
    for (kind, group), members in groups.items():
        talk = _union(members)
        sizes = [each.bytes for each in members]
        known = [size for size in sizes if size is not None]
        rows.append(
            KindRow(
                kind=kind,
                group=group,
                group_size=max(each.group_size for each in members),
                count=len(members),
                bytes=sum(known) if len(known) == len(sizes) else None,
                busy_ns=sets.length(talk),
                exposed_ns=sets.length(sets.without(talk, busy)),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.exposed_ns, -row.busy_ns, row.kind, row.group)))


def exposed_in(trace: RankTrace, members: Sequence[Communicated]) -> int:
    """Time in which one of `members` was under way and nothing was computed."""
    return sets.length(sets.without(_union(members), _union(trace.computed)))


def _union(items: Iterable[Computed | Communicated]) -> list[sets.Interval]:
    return sets.union((each.start_ns, each.end_ns) for each in items)
