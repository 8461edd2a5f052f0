"""One rank of `interlace bench decompose`: blocks by all ways, in turns, on links of chosen rates.

    python -m interlace.bench.decompose_job JOB.json RESULT.json

Before each point one slice is computed and one is sent, alone; from both follows the rate at which
a transfer takes `ratio` times as long as the slice that it runs under.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.bench.decompose_blocks import TimedBlock, build_block
from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.decompose_shapes import (
    COMPUTE,
    VANILLA,
    Job,
    Shape,
    hidden_under_ns,
    read_job,
    settled,
)
from interlace.decompose.functions.exchange import Link, PeerMessage
from interlace.errors import RunError
from interlace.lab.hosts import set_own_rate
from interlace.lab.links import emulated_backend
from interlace.ranks.launched import follow_launcher

_LIMIT = timedelta(seconds=120)
"""Limit of every wait of the bench; no block takes nearly so long."""
_LATENCY_US = 50.0
"""Latency of the emulated link in us, the default of `link.latency_us`."""
_REPEATS = 5
"""Of each calibration: of real compute the fastest counts, of all else the median."""
_SENDS = 4
"""Slices sent one behind the other, so that the 80 KiB that pass unshaped after a pause are few."""
_LARGEST_DIFFERENCE = 1e-3
"""Between ways in float32, relative to the largest value; they add up in different orders."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One slice of a shape at one rate."""

    rate_mbit: float
    parts_ns: dict[str, int]
    """Compute, by part; see `Block.parts`."""
    transfer_ns: int
    transfer_cpu_ns: int
    """CPU time of this rank's process for one transfer."""


def main(job_path: str, result_path: str) -> int:
    """Measure as this rank; rank 0 writes the list of cases."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    job = read_job(Path(job_path))
    dist.init_process_group("gloo", timeout=_LIMIT)
    try:
        cases = [
            case
            for shape in job.shapes
            for ratio in shape.ratios
            for case in measure_point(job, shape, ratio)
        ]
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(cases), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def measure_point(job: Job, shape: Shape, ratio: float) -> list[dict[str, Any]]:
    """Forward, then forward and backward, of one shape at the rate that follows from `ratio`."""
    rate = shape.flops_per_s
    compute: AbstractContextManager[Callable[[], None] | None] = nullcontext()
    if rate is not None:
        compute = emulated_compute(rate, paced=shape.paced)
    with compute as begin, _calibrated(job, shape, ratio) as (group, calibration):
        block = build_block(shape, group)
        warm_up(block)
        found = []
        for backward in (False, True):
            began = time.monotonic()
            ways = take_turns(block, job, backward=backward, begin=begin)
            found.append(
                {
                    "ranks": dist.get_world_size(),
                    "shape": asdict(shape),
                    "ratio": ratio,
                    "backward": backward,
                    "calibration": asdict(calibration),
                    "ways": ways,
                }
            )
            _say(shape, ratio, backward=backward, seconds=time.monotonic() - began)
    return found


def take_turns(
    block: TimedBlock, job: Job, *, backward: bool, begin: Callable[[], None] | None = None
) -> dict[str, dict[str, list[int]]]:
    """Steps of each way in turn, the order rotated: {way: {"ns": [...], "cpu_ns": [...]}}.

    A step takes as long as on the slowest rank; all start together, and call `begin` first.
    """
    ways = block.shape.ways(block.ranks)
    results: dict[str, dict[str, list[int]]] = {way: {"ns": [], "cpu_ns": []} for way in ways}
    for turn in range(max(job.turns, job.most_turns)):
        if turn >= job.turns and all(settled(times["ns"]) for times in results.values()):
            break
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            dist.barrier(block.group)
            if begin is not None:
                begin()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            block.step(way, backward=backward)
            spent = [time.perf_counter_ns() - wall, time.process_time_ns() - cpu]
            block.take_gradients(way)
            slowest = _over_ranks(spent, dist.ReduceOp.MAX)
            results[way]["ns"].append(slowest[0])
            results[way]["cpu_ns"].append(slowest[1])
    return results


def warm_up(block: TimedBlock) -> None:
    """One step of each way. Raises RunError if one that computes gives another output, or other
    gradients, than VANILLA."""
    expected = _results(block, VANILLA)
    for way in block.shape.ways(block.ranks):
        found = _results(block, way)
        if way == COMPUTE or (block.shape.flops_per_s is not None and not block.shape.paced):
            continue
        pairs = zip(found, expected, strict=True)
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if not worst <= _LARGEST_DIFFERENCE:  # also when it is no number
            raise RunError(
                f"{way} of the {block.shape.name} block differs from vanilla by {worst:.1e}",
                hint="this is a mistake in Interlace; please report it",
            )


def _results(block: TimedBlock, way: str) -> list[Tensor]:
    out = block.step(way, backward=True)
    gradients = block.take_gradients(way)
    assert all(gradient is not None for gradient in gradients), "a leaf has no gradient"
    return [out, *(gradient for gradient in gradients if gradient is not None)]


@contextmanager
def _calibrated(
    job: Job, shape: Shape, ratio: float
) -> Iterator[tuple[dist.ProcessGroup, Calibration]]:
    """A group on links at which a transfer takes `ratio` times the slice's compute."""
    ranks = dist.get_world_size()
    # Of sleeps one that is too long makes the next one shorter, so that the median is right.
    typical = min if shape.flops_per_s is None else median
    parts = {
        name: _over_ranks([round(typical(_times_ns(call)))], dist.ReduceOp.AVG)[0]
        for name, call in build_block(shape, _world()).parts().items()
    }
    wanted_ns = ratio * hidden_under_ns(parts, ranks)
    rate_mbit = shape.slice_bytes * 8e3 / wanted_ns
    with _links(rate_mbit, emulated=job.emulated_links) as group:
        sent_ns, _ = _transfer(shape, group)
    # The overhead of gloo and of frames is part of the time, and much the same at all rates.
    rate_mbit *= sent_ns / wanted_ns
    with _links(rate_mbit, emulated=job.emulated_links) as group:
        sent_ns, cpu_ns = _transfer(shape, group)
        yield (
            group,
            Calibration(
                rate_mbit=rate_mbit,
                parts_ns=parts,
                transfer_ns=sent_ns,
                transfer_cpu_ns=cpu_ns,
            ),
        )


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the process group is made in main"
    return world


@contextmanager
def _links(rate_mbit: float, *, emulated: bool) -> Iterator[dist.ProcessGroup]:
    """All ranks, joined by links of this rate."""
    kbit = max(1, round(rate_mbit * 1e3))
    (kbit,) = _over_ranks([kbit], dist.ReduceOp.MIN)
    if not emulated:
        set_own_rate(f"{kbit}kbit")
        dist.barrier()
        yield _world()
        return
    backend = emulated_backend(kbit * 1000, _LATENCY_US)
    group = dist.new_group(backend=backend, timeout=_LIMIT)
    assert isinstance(group, dist.ProcessGroup), "all ranks are in the group"
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _transfer(shape: Shape, group: dist.ProcessGroup) -> tuple[int, int]:
    """(time, CPU time) of sending one slice around the ring, averaged over ranks."""
    rank, ranks = group.rank(), group.size()
    sent = torch.zeros(shape.rows, shape.width)
    received = torch.empty_like(sent)
    to, source = PeerMessage(sent, (rank + 1) % ranks), PeerMessage(received, (rank - 1) % ranks)
    link = Link(group)
    samples = []
    for repeat in range(_REPEATS + 1):
        dist.barrier(group)
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(_SENDS):
            link.start("slice", [to], [source])
            link.finish()
        if repeat:
            samples.append((time.perf_counter_ns() - wall, time.process_time_ns() - cpu))
    times = [round(median(column) / _SENDS) for column in zip(*samples, strict=True)]
    wall_ns, cpu_ns = _over_ranks(times, dist.ReduceOp.AVG)
    return wall_ns, cpu_ns


@torch.no_grad()
def _times_ns(call: Callable[[], Tensor]) -> list[int]:
    call()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return times


def _over_ranks(values: Sequence[int], op: Any) -> list[int]:
    """Reduced over all ranks, which get the same numbers."""
    total = torch.tensor(values, dtype=torch.float64)
    mean = op == dist.ReduceOp.AVG
    dist.all_reduce(total, op=dist.ReduceOp.SUM if mean else op)
    return [round(value / (dist.get_world_size() if mean else 1)) for value in total.tolist()]


def _say(shape: Shape, ratio: float, *, backward: bool, seconds: float) -> None:
    if dist.get_rank() == 0:
        passes = "forward + backward" if backward else "forward"
        print(
            f"{shape.name}, {dist.get_world_size()} ranks, t_p {ratio:g} t_c, {passes}: "
            f"{seconds:.0f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
