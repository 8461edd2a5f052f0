"""Recorded steps as Kineto traces, one file for each rank and way of running, which tools for
torch.profiler's traces read, HolisticTraceAnalysis among them.

A lane becomes a stream, a collective a kernel with NCCL's name and arguments, the step a
`ProfilerStep`. Waits are left out: they are where the compute stream is empty. So are the calls
that issue collectives, which are the launches. Backward is marked as autograd would, except in
recordings of two strands: passes take turns operator by operator, and no such marks would fit.
"""

import gzip
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from interlace.explain.run_trace import RecordedRun
from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE, Kind
from interlace.ir.timeline import BACKWARD, WAIT, Span, Timeline
from interlace.run_files import write_whole

_NAMES = {
    Kind.ALL_GATHER: "AllGather",
    Kind.REDUCE_SCATTER: "ReduceScatter",
    Kind.ALL_REDUCE: "AllReduce",
    Kind.ALL_TO_ALL: "AllToAll",
    Kind.BROADCAST: "Broadcast",
    Kind.SEND: "SendRecv",
}
"""How NCCL's kernels call the kinds."""
_COMPUTE_STREAM, _FIRST_LINK = 7, 20
"""Numbers of streams, as CUDA traces usually have them."""
_TWO_STRANDS = "2"
"""Way of running in which passes take turns."""
_HOST = 1
"""Number of the process and of the thread of the host."""


def write_kineto(run: RecordedRun, folder: Path) -> list[Path]:
    """Write `MODE/rank-N.json.gz` for each recorded step; returns the files."""
    written = []
    for mode, by_rank in sorted(run.timelines.items()):
        for rank, timeline in sorted(by_rank.items()):
            path = folder / mode / f"rank-{rank}.json.gz"
            text = json.dumps(_trace(timeline, rank, len(by_rank), mode, run.degrees))
            write_whole(path, gzip.compress(text.encode(), mtime=0))
            written.append(path)
    return written


def _trace(
    timeline: Timeline, rank: int, world: int, mode: str, degrees: dict[str, int]
) -> dict[str, Any]:
    lanes = timeline.lanes[1:]
    groups = [
        {"pg_name": lane, "pg_desc": lane, "pg_size": degrees.get(lane, 0), "ranks": []}
        for lane in lanes
    ]
    streams = {lane: _FIRST_LINK + i for i, lane in enumerate(lanes)}
    events = [_event("user_annotation", "ProfilerStep#1", 0, timeline.length_ns, _HOST, {})]
    if mode != _TWO_STRANDS:
        events += _backwards(timeline)
    for number, span in enumerate(timeline.spans, start=1):
        if span.lane != COMPUTE_LANE:
            events += _launched(span, streams[span.lane], number, degrees)
        elif span.kind != WAIT and span.kind not in COLLECTIVES:
            events += _launched(span, _COMPUTE_STREAM, number, degrees)
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "recorded by Interlace"}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": world, "pg_config": groups,
        },
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }  # fmt: skip


def _backwards(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A mark around each run of backward operators, from the first launch to the last."""
    own = [s for s in timeline.spans if s.lane != COMPUTE_LANE or s.kind != WAIT]
    own.sort(key=_launch_ns)
    for strand, members in groupby(own, key=lambda span: span.strand):
        launches = [_launch_ns(span) for span in members]
        if strand == BACKWARD:
            name = "autograd::engine::evaluate_function: backward"
            yield _event("cpu_op", name, launches[0], launches[-1] + 1, _HOST, {})


def _launch_ns(span: Span) -> int:
    return span.start_ns if span.lane == COMPUTE_LANE else span.issue_ns


def _launched(
    span: Span, stream: int, number: int, degrees: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """The call that launches a kernel, and the kernel."""
    issued = _launch_ns(span)
    args: dict[str, Any] = {"correlation": number}
    yield _event("cuda_runtime", "cudaLaunchKernel", issued, issued + 1, _HOST, args)
    name = f"{span.kind} {span.name}"
    kernel = {**args, "device": 0, "stream": stream}
    if span.lane != COMPUTE_LANE:
        name = f"ncclDevKernel_{_NAMES.get(Kind(span.kind), 'Other')}"
        kernel |= {
            "Collective name": span.kind,
            "In msg nelems": span.bytes,
            "Out msg nelems": span.bytes,
            "dtype": "Byte",
            "Group size": degrees.get(span.lane, 0),
            "Process Group Name": span.lane,
        }
    yield _event("kernel", name, span.start_ns, span.end_ns, stream, kernel)


def _event(
    category: str, name: str, start_ns: int, end_ns: int, thread: int, args: dict[str, Any]
) -> dict[str, Any]:
    process = 0 if category == "kernel" else _HOST
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread,
        "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": args,
    }  # fmt: skip
