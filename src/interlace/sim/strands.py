"""Simulate one rank's issue order on one compute lane and one queue per link.

The rank issues operators in order. A compute operator starts when the compute lane is free and
the collectives that it needs are done; waiting for them is exposed communication. A collective is
issued without blocking and takes its link in issue order. Links do not slow compute down here.
"""

from collections.abc import Mapping, Sequence

from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.timeline import WAIT, Span, Timeline


def simulate(
    graph: OpGraph,
    order: Sequence[str],
    solo_ns: Mapping[str, int],
    *,
    issue_ns: int = 0,
    label: str = "predicted",
) -> Timeline:
    """The timeline of `order`. `issue_ns` is the compute lane's time to start a collective."""
    now = 0
    lane_free: dict[str, int] = {}
    finish: dict[str, int] = {}
    spans: list[Span] = []
    for name in order:
        op = graph.by_id[name]
        strand = name.partition(".")[0] if "." in name else graph.name
        for source in op.inputs:
            if finish[source] > now:
                spans.append(Span(source, WAIT, COMPUTE_LANE, now, finish[source], strand))
                now = finish[source]
        if op.is_collective:
            start = max(now, lane_free.get(op.lane, 0))
            finish[name] = lane_free[op.lane] = start + solo_ns[name]
            size = max(op.bytes_in, op.bytes_out)
            spans.append(Span(name, op.kind, op.lane, start, finish[name], strand, 0, now, size))
            if issue_ns:
                spans.append(Span(name, op.kind, COMPUTE_LANE, now, now + issue_ns, strand))
            now += issue_ns
        else:
            spans.append(Span(name, op.kind, COMPUTE_LANE, now, now + solo_ns[name], strand))
            now = finish[name] = now + solo_ns[name]
    last = max(finish.values(), default=0)
    if last > now:
        spans.append(Span("end", WAIT, COMPUTE_LANE, now, last))
    return Timeline(label, 0, tuple(spans))
