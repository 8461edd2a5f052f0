"""Measure every operator and every collective of a chunk alone, on the real machine.

The forward and the backward graph run one after the other with real data, each collective
waited for at once, so that nothing overlaps. Per key the median over repeats is taken. Ranks then
agree: compute takes the slowest rank's time; a collective takes the fastest rank's, since the rank
that arrives last sees the transfer and the others also see their own waiting.
"""

import hashlib
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.timeline import WAIT, Timeline

WARM_UP = 2


def machine_id(device_type: str, link: str) -> str:
    """What measured times are valid for: processor or GPU, threads, torch, link."""
    name = torch.cuda.get_device_name() if device_type == "cuda" else processor_name()
    parts = (name, str(torch.get_num_threads()), str(torch.__version__), link)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(
    run_once: Callable[[], Timeline],
    graphs: Mapping[str, OpGraph],
    *,
    repeats: int,
    machine: str,
    graph_digest: str,
) -> CostTable:
    """The cost table of `graphs` by strand name. `run_once` runs both graphs, recorded.

    Collective on all ranks of the default group; every rank returns the same table.
    """
    samples: dict[str, list[int]] = {}
    issues: list[int] = []
    for repeat in range(WARM_UP + repeats):
        timeline = run_once()
        if repeat < WARM_UP:
            continue
        for span in timeline.spans:
            if span.kind == WAIT or span.name not in graphs[span.strand].by_id:
                continue
            op = graphs[span.strand].by_id[span.name]
            if span.lane != op.lane:
                issues.append(span.duration_ns)
            else:
                samples.setdefault(op.key, []).append(
                    span.end_ns - (span.issue_ns if op.is_collective else span.start_ns)
                )
    mine = {key: int(median(values)) for key, values in samples.items()}
    collective = {op.key for graph in graphs.values() for op in graph.collectives}
    solo = _agree(mine, collective)
    issue = _agree({"issue": int(median(issues)) if issues else 0}, set())["issue"]
    return CostTable(solo, "profile", issue, graph_digest, machine)


def _agree(mine: Mapping[str, int], take_min: set[str]) -> dict[str, int]:
    keys = sorted(mine)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(mine)
    signs = torch.tensor([-1 if key in take_min else 1 for key in keys], dtype=torch.int64)
    times = torch.tensor([mine[key] for key in keys], dtype=torch.int64) * signs
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    times = times.to(device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    agreed = (times.cpu() * signs).tolist()
    return dict(zip(keys, agreed, strict=True))


def cached(
    directory: Path | None, machine: str, graph_digest: str, measure_now: Callable[[], CostTable]
) -> CostTable:
    """The table of an earlier run on this machine and graph, or a fresh one, which is then kept.

    The first rank reads the file and gives it to all, so that ranks never mix old and new times.
    """
    path = directory / f"{graph_digest}-{machine}.json" if directory else None
    found = None
    if path is not None and _rank() == 0 and path.exists():
        try:
            found = store.load(path, CostTable)
        except InputError:
            path.unlink()  # half-written or of another version: measured again below
    found = _broadcast(found)
    if found is not None and (found.machine, found.graph_digest) == (machine, graph_digest):
        return found
    table = measure_now()
    if path is not None and _rank() == 0:
        store.save(table, path)
    return table


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _broadcast(table: CostTable | None) -> CostTable | None:
    """Give the first rank's table to all, as bytes of JSON of announced length."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return table
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    text = store.dumps(table).encode() if table is not None else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    if not int(length):
        return None
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if text:
        payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    payload = payload.to(device)
    dist.broadcast(payload, src=0)
    return store.loads(
        payload.cpu().numpy().tobytes().decode(), CostTable, "the first rank's table"
    )
