"""Timelines as a Chrome trace, which Perfetto and chrome://tracing open.

One process per mode and rank, one thread per lane. An arrow leads from each collective to the wait
that it caused. Times in the format are microseconds; three decimals keep whole nanoseconds.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.report.tables import MODE_NAMES

Event = dict[str, Any]


def trace_gz(timelines: Mapping[str, Mapping[int, Timeline]]) -> bytes:
    """The gzipped trace of all modes and ranks."""
    events = list(trace_events(timelines))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def trace_events(timelines: Mapping[str, Mapping[int, Timeline]]) -> Iterator[Event]:
    """Names of processes and threads, complete events, and arrows."""
    process = 0
    for mode, by_rank in timelines.items():
        for rank, timeline in by_rank.items():
            process += 1
            name = f"{MODE_NAMES.get(mode, mode)}, rank {rank}"
            yield _metadata("process_name", process, 0, {"name": name})
            yield _metadata("process_sort_index", process, 0, {"sort_index": process})
            yield from _process_events(timeline, process)


def _process_events(timeline: Timeline, process: int) -> Iterator[Event]:
    issued: dict[tuple[str, int, str], tuple[Span, int]] = {}
    waits: list[tuple[Span, int]] = []
    thread = 0
    for lane in timeline.lanes:
        spans = [span for span in timeline.spans if span.lane == lane]
        for index, row in enumerate(_without_overlap(spans)):
            thread += 1
            suffix = f" ({index + 1})" if index else ""
            yield _metadata("thread_name", process, thread, {"name": lane + suffix})
            yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})
            for span in row:
                yield _complete(span, process, thread, is_link=lane != COMPUTE_LANE)
                if span.kind == WAIT:
                    waits.append((span, thread))
                elif lane != COMPUTE_LANE:
                    issued[_identity(span)] = (span, thread)
    for number, (wait, wait_thread) in enumerate(waits):
        collective, thread = issued.get(_identity(wait), (wait, 0))
        if collective is not wait and max(collective.start_ns, wait.start_ns) < wait.end_ns:
            common = {"name": "wait", "cat": "wait", "id": f"{process}.{number}", "pid": process}
            yield {**common, "ph": "s", "tid": thread, "ts": _microseconds(collective.start_ns)}
            end_us = _microseconds(wait.end_ns - 1)
            yield {**common, "ph": "f", "bp": "e", "tid": wait_thread, "ts": end_us}


def _without_overlap(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as needed; complete events of one thread must not cross."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        for row in rows:
            if row[-1].end_ns <= span.start_ns:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows or [[]]


def _identity(span: Span) -> tuple[str, int, str]:
    return (span.strand, span.micro_batch, span.name)


def _metadata(kind: str, process: int, thread: int, arguments: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _microseconds(time_ns: int) -> float:
    return time_ns / 1000


def _name(span: Span, *, is_link: bool) -> str:
    """The operator; on the compute lane, waits and the issuing of collectives say so."""
    if span.kind == WAIT:
        return f"exposed: {span.name}"
    return f"issue {span.name}" if span.kind in COLLECTIVES and not is_link else span.name


def _complete(span: Span, process: int, thread: int, *, is_link: bool) -> Event:
    arguments: Event = {"kind": span.kind}
    if span.strand:
        arguments["strand"] = span.strand
    if span.micro_batch:
        arguments["micro_batch"] = span.micro_batch
    if is_link:
        arguments["bytes"] = span.bytes
        arguments["issue_us"] = _microseconds(span.issue_ns)
        arguments["queued_us"] = _microseconds(max(0, span.start_ns - span.issue_ns))
        arguments["end_observed"] = span.end_known
    if span.kind == WAIT:
        arguments["waits_for"] = span.name
    return {
        "ph": "X",
        "name": _name(span, is_link=is_link),
        "cat": f"{span.kind},{span.strand}" if span.strand else span.kind,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start_ns),
        "dur": _microseconds(span.duration_ns),
        "args": arguments,
    }
