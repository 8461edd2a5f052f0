"""The steady state of a recorded step: the part in which two strands run.

Before the first backward operator only the first micro-batch goes forward, after the last forward
operator only the last one goes backward. What lies between does not depend on the number of
micro-batches, so it says what a long step would hide.
"""

from dataclasses import replace

from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.timeline import WAIT, Span, Timeline

BACKWARD = "backward"


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
