"""Timeline: what one rank did, or would do, when. The simulator and the recorder return it.

Times are integer nanoseconds from the start of the timeline. A collective is a span on its
link's lane from the moment its link takes it up to its end; the time in which the compute lane
does nothing but wait for it is a span of kind `wait` on the compute lane, with its name.

The steady state of a recorded step: the part in which two strands run.

Before the first backward operator only the first micro-batch goes forward, after the last forward
operator only the last one goes backward. What lies between does not depend on the number of
micro-batches, so it says what a long step would hide.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.interval_sets import length, union

WAIT = "wait"
"""Kind of the spans in which the compute lane waits for a collective."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operator, collective or wait on one lane."""

    name: str
    kind: str
    lane: str
    start_ns: int
    end_ns: int
    strand: str = ""
    """`forward`, `backward` or empty (optimizer, data)."""
    micro_batch: int = 0
    """1-based; 0 when it belongs to none."""
    issue_ns: int = 0
    """Collectives: when the rank asked for it; it may then queue behind others."""
    bytes: int = 0
    end_known: bool = True
    """Collectives: whether the end was observed. If not, `end_ns` is the first moment at which
    it was certainly over."""

    @property
    def duration_ns(self) -> int:
        """Length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """All collectives of one kind on one lane."""

    kind: str
    lane: str
    count: int
    bytes: int
    busy_ns: int
    exposed_ns: int

    @property
    def hidden_ns(self) -> int:
        """Busy time during which the rank computed."""
        return max(0, self.busy_ns - self.exposed_ns)


@dataclass(frozen=True)
class Timeline:
    """The spans of one rank for one step or one phase."""

    label: str
    rank: int
    spans: tuple[Span, ...]

    @cached_property
    def length_ns(self) -> int:
        """From 0 to the last end."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The compute lane, then the link lanes."""
        links = sorted({span.lane for span in self.spans} - {COMPUTE_LANE})
        return (COMPUTE_LANE, *links)

    @property
    def collectives(self) -> tuple[Span, ...]:
        """Spans on link lanes."""
        return tuple(span for span in self.spans if span.lane != COMPUTE_LANE)

    def exposed_ns(self) -> int:
        """Time in which the compute lane is idle because it waits for a collective."""
        return sum(span.duration_ns for span in self.spans if span.kind == WAIT)

    def communication_ns(self) -> int:
        """Time in which at least one link lane is busy, summed over lanes."""
        total = 0
        for lane in self.lanes[1:]:
            total += _busy_ns(span for span in self.spans if span.lane == lane)
        return total

    def hidden_fraction(self) -> float:
        """1 - exposed / communication; 1 when nothing was communicated."""
        communication = self.communication_ns()
        return 1.0 - min(1.0, self.exposed_ns() / communication) if communication else 1.0

    def collective_rows(self) -> tuple[CollectiveRow, ...]:
        """Per kind and lane: count, bytes, busy and exposed time."""
        waits: dict[str, int] = {}
        for span in self.spans:
            if span.kind == WAIT:
                key = _identity(span)
                waits[key] = waits.get(key, 0) + span.duration_ns
        rows: dict[tuple[str, str], list[Span]] = {}
        for span in self.collectives:
            rows.setdefault((span.lane, span.kind), []).append(span)
        return tuple(
            CollectiveRow(
                kind=kind,
                lane=lane,
                count=len(spans),
                bytes=sum(s.bytes for s in spans),
                busy_ns=_busy_ns(spans),
                exposed_ns=sum(waits.get(_identity(s), 0) for s in spans),
            )
            for (lane, kind), spans in sorted(rows.items())
        )


def _identity(span: Span) -> str:
    return f"{span.strand}.{span.micro_batch}.{span.name}"


def _busy_ns(spans: Iterable[Span]) -> int:
    """Time in which at least one of the spans runs."""
    return length(union((span.start_ns, span.end_ns) for span in spans))


def overlaps(spans: tuple[Span, ...]) -> list[tuple[Span, Span]]:
    """Neighbouring spans of one lane that overlap; empty for a sound compute lane."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    return [(a, b) for a, b in pairwise(ordered) if b.start_ns < a.end_ns]


BACKWARD = "backward"
"""Name of the strand whose first operator begins the steady window."""


def steady_window(timeline: Timeline) -> tuple[int, int] | None:
    """From the start of the first backward operator to the end of the last forward one, in
    nanoseconds. None if there is no such time, as in a step of one micro-batch."""
    issued = [s for s in timeline.spans if s.lane == COMPUTE_LANE and s.kind != WAIT and s.strand]
    starts = [span.start_ns for span in issued if span.strand == BACKWARD]
    ends = [span.end_ns for span in issued if span.strand != BACKWARD]
    if not starts or not ends or max(ends) <= min(starts):
        return None
    return min(starts), max(ends)


def steady_state(timeline: Timeline) -> Timeline | None:
    """What `timeline` holds of its steady window; spans across a border are cut there."""
    window = steady_window(timeline)
    if window is None:
        return None
    spans = tuple(_cut(s, *window) for s in timeline.spans if _inside(s, *window))
    return Timeline(timeline.label, timeline.rank, spans)


def compute_ns(timeline: Timeline) -> int:
    """Time in which the compute lane has work; issuing a collective counts."""
    return sum(
        span.duration_ns
        for span in timeline.spans
        if span.lane == COMPUTE_LANE and span.kind != WAIT
    )


def _inside(span: Span, start_ns: int, end_ns: int) -> bool:
    return span.start_ns < end_ns and span.end_ns > start_ns


def _cut(span: Span, start_ns: int, end_ns: int) -> Span:
    return replace(span, start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
