"""One rank of the bench of tensor-parallel shares: `python -m interlace.bench.tensor_share_world
JOB RESULT`.

For each share the rate of emulated compute is set by an all-reduce that is timed alone. Then every
schedule is compiled, with plans made from times under emulation, and all ways take turns.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from interlace.api import compile_step
from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.pipeline_rivals import build_rival
from interlace.bench.pipeline_world import (
    LIMIT,
    Batch,
    GptChunk,
    StepFunction,
    batches_of,
    check_same,
    loss_of,
    step_loss,
    take_turns,
)
from interlace.bench.tensor_share import ONE_STRAND, RANKS_OF_STAGE, RIVAL, STAGES, WAYS, ShareSize
from interlace.config import PlanConfig
from interlace.ir.actions import Direction
from interlace.ranks.launched import follow_launcher
from interlace.runtime.pipeline_record import PipelineRecord
from interlace.step import Step

_REDUCES = 20
"""All-reduces that are timed, one after the other; the median counts."""
_RECORDED = 3
"""Steps of each of our ways that are recorded."""
_PLAN: dict[str, ParallelStyle] = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(),
    "out": RowwiseParallel(), "wide": ColwiseParallel(), "narrow": RowwiseParallel(),
}  # fmt: skip
"""PyTorch's plan of a block: two all-reduces in forward, two in backward."""


class SplitBlock(nn.Module):
    """A block of a GPT whose heads may be those of one rank."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, _ = x.shape
        normed = self.norm(x)
        shape = (batch, length, -1, self.size)
        query, key, value = (
            project(normed).view(shape).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second_norm(x))))


class SplitGpt(GptChunk):
    """Some blocks of a GPT under tensor parallelism, with the embedding or the head if it has
    them, which are whole on every rank. Without a mesh all is."""

    def __init__(
        self, size: ShareSize, mesh: DeviceMesh | None, chunk: int = 0, chunks: int = 1
    ) -> None:
        super().__init__()
        torch.manual_seed(0)  # every chunk draws the whole model, so that all are parts of one
        words = nn.Embedding(size.words, size.width)
        every = [SplitBlock(size.width, size.heads) for _ in range(size.blocks)]
        head = nn.Linear(size.width, size.words, bias=False)
        first, last = (size.blocks * k // chunks for k in (chunk, chunk + 1))
        self.words = words if chunk == 0 else None
        self.blocks = nn.ModuleDict({str(k): every[k] for k in range(first, last)})
        self.head = head if chunk == chunks - 1 else None
        if mesh is not None:
            for block in self.blocks.values():
                parallelize_module(block, mesh, _PLAN)


def our_way(
    size: ShareSize, schedule: str, chunks: int, mesh: DeviceMesh
) -> tuple[StepFunction, Step]:
    """A schedule on our runtime; and its step."""
    model, total = SplitGpt(size, mesh["tp"]), chunks * STAGES
    starts = [f"blocks.{size.blocks * k // total}" for k in range(1, total)]
    step = compile_step(
        model, step_loss, _batches(size)[0], mesh=mesh, schedule=schedule, split_at=starts,
        config=PlanConfig(cache=False, profile_repeats=3),
    )  # fmt: skip

    def run(batches: Sequence[Batch]) -> Mapping[str, Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        step(batches)
        return _gradients(model.named_parameters())

    return run, step


def rival(size: ShareSize, mesh: DeviceMesh) -> StepFunction:
    """PyTorch's 1F1B with the same modules."""

    def chunk_of(_size: Mapping[str, int], chunk: int, chunks: int) -> nn.Module:
        return SplitGpt(size, mesh["tp"], chunk, chunks)

    steps = {"micro_batches": size.micro_batches}
    run = build_rival(chunk_of, steps, "1F1B", 1, loss_of, mesh.get_group("pp"))
    return lambda batches: _gradients(run(batches).items())


def _gradients(named: Any) -> dict[str, Tensor]:
    """This rank's parts, of parameters or of gradients by name."""
    found = {name: each.grad if isinstance(each, nn.Parameter) else each for name, each in named}
    return {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in found.items()
        if each is not None
    }


def _batches(size: ShareSize) -> list[Batch]:
    return batches_of(
        {"words": size.words, "batch": 1, "length": size.length,
         "micro_batches": size.micro_batches}
    )  # fmt: skip


def reduce_ns(size: ShareSize, mesh: DeviceMesh) -> float:
    """ns of an all-reduce of a block, with nothing else under way; equal on all ranks."""
    value, group = torch.zeros(size.reduced_values), mesh.get_group("tp")
    times = []
    for _ in range(_REDUCES):
        dist.barrier(group)
        began = time.perf_counter_ns()
        dist.all_reduce(value, group=group)
        times.append(time.perf_counter_ns() - began)
    total = torch.tensor(float(median(times)))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def measure_share(size: ShareSize, share: float, mesh: DeviceMesh) -> dict[str, Any]:
    """One point: steps of all ways, records of ours."""
    rate = size.flops_per_s(share, reduce_ns(size, mesh))
    ways: dict[str, StepFunction] = {RIVAL: rival(size, mesh)}
    steps: dict[str, Step] = {}
    with emulated_compute(rate):  # plans are made from times as they will be
        for name, chunks in WAYS:
            ways[name], steps[name] = our_way(size, name, chunks, mesh)
    batches = _batches(size)
    check_same(ways, batches)
    with emulated_compute(rate) as forget:
        fresh = {name: partial(_afresh, way, forget) for name, way in ways.items()}
        times = take_turns(fresh, batches, size.repeats)
        records = {
            name: [_recorded(step, batches, forget) for _ in range(_RECORDED)]
            for name, step in steps.items()
        }
    return {
        "share": share,
        "flops_per_s": rate,
        "times": times,
        "predicted": {n: [each.predicted.step_ns for each in own] for n, own in records.items()},
        "apart": [_apart_ns(record) for record in records[ONE_STRAND]],
        "together": [_together_ns(record) for record in records["folded"]],
    }


def _apart_ns(record: PipelineRecord) -> float:
    """F + B of half a stage, by one strand."""
    chunks = record.costs.chunks
    return mean(each.forward_ns + each.input_ns + each.weight_ns for each in chunks) / 2


def _together_ns(record: PipelineRecord) -> float:
    """FB of two chunks of half a stage."""
    return mean(
        ns for phase, ns in record.costs.pairs_ns.items() if str(Direction.BACKWARD) in phase
    )


def _recorded(step: Step, batches: Sequence[Batch], forget: Callable[[], None]) -> PipelineRecord:
    forget()
    return step.record_pipeline(batches)


def _afresh(way: StepFunction, forget: Any, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """A step whose sleeps are not shortened by those of the step before."""
    forget()
    return way(batches)


def main(job_path: str, result_path: str) -> int:
    """Measure as this rank; rank 0 writes the points."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    job: dict[str, Any] = json.loads(Path(job_path).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        mesh = init_device_mesh("cpu", (STAGES, RANKS_OF_STAGE), mesh_dim_names=("pp", "tp"))
        size = ShareSize(**job)
        points = [measure_share(size, share, mesh) for share in size.shares]
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(points), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
