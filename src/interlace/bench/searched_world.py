"""One rank of the bench of searched pipelines: `python -m interlace.bench.searched_world JOB
RESULT`.

Each way is a schedule in a file with its own cut of the model, run by our runtime; the rival runs
one of these cuts by PyTorch's interleaved 1F1B. Gradients are compared once as they are computed;
then matmuls sleep.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from interlace.api import compile_step
from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.pipeline_rivals import build_rival
from interlace.bench.pipeline_world import (
    LIMIT,
    AttentionPart,
    GptChunk,
    MlpPart,
    StepFunction,
    batches_of,
    check_same,
    loss_of,
    step_loss,
    take_turns,
)
from interlace.bench.searched_model import UnevenSize
from interlace.config import PlanConfig
from interlace.ir.actions import Direction, Share, Strand
from interlace.ranks.launched import follow_launcher
from interlace.runtime.pipeline_record import PipelineRecord
from interlace.sim.pipeline_costs import PipelineCosts
from interlace.step import Step

_RECORDED = 2
"""Steps of each of our ways that are recorded."""


class UnevenGpt(GptChunk):
    """Some units of a GPT whose blocks have MLPs of different widths: the embedding, halves of
    blocks, the head, numbered in this order."""

    def __init__(self, size: UnevenSize, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)  # every chunk draws the whole model, so that all are parts of one
        words = nn.Embedding(size.words, size.width)
        halves: list[nn.Module] = []
        for block in range(size.blocks):
            halves.append(AttentionPart(size.width, size.heads))
            halves.append(MlpPart(size.width, size.mlp(block)))
        head = nn.Linear(size.width, size.words, bias=False)
        units = len(halves) + 2
        last = units if last is None else last
        self.words = words if first == 0 else None
        self.blocks = nn.ModuleDict(
            {str(k): half for k, half in enumerate(halves) if first <= k + 1 < last}
        )
        self.head = head if last == units else None


def our_way(
    size: UnevenSize, way: Mapping[str, Any], mesh: DeviceMesh
) -> tuple[StepFunction, Step]:
    """A schedule in a file on our runtime; and its step."""
    model = UnevenGpt(size)
    step = compile_step(
        model, step_loss, _batches(size)[0], mesh=mesh, schedule=way["schedule"],
        config=PlanConfig(cache=False),
    )  # fmt: skip

    def run(batches: Sequence[tuple[Tensor, ...]]) -> Mapping[str, Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        step(batches)
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run, step


def rival(size: UnevenSize, starts: Sequence[int]) -> StepFunction:
    """PyTorch's interleaved 1F1B with the same cut."""
    ends = (*starts[1:], 2 * size.blocks + 2)

    def chunk_of(_size: Mapping[str, int], chunk: int, chunks: int) -> nn.Module:
        assert chunks == len(starts)
        return UnevenGpt(size, starts[chunk], ends[chunk])

    steps = {"micro_batches": size.micro_batches}
    per_rank = len(starts) // dist.get_world_size()
    return build_rival(chunk_of, steps, "Interleaved1F1B", per_rank, loss_of)


def _batches(size: UnevenSize) -> list[tuple[Tensor, ...]]:
    return batches_of(
        {"words": size.words, "batch": 1, "length": size.tokens,
         "micro_batches": size.micro_batches}
    )  # fmt: skip


def main(job_path: str, result_path: str) -> int:
    """Measure as this rank; rank 0 writes the times."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        size = UnevenSize(**job["size"])
        ways: dict[str, StepFunction] = {}
        steps: dict[str, Step] = {}
        for name, way in job["ways"].items():
            ways[name], steps[name] = our_way(size, way, mesh)
        for name, same in job["rival"].items():
            ways[name] = rival(size, job["ways"][same]["starts"])
        batches = _batches(size)
        check_same(ways, batches)
        with emulated_compute(size.flops_per_s) as forget:
            times = take_turns(
                {name: partial(_afresh, way, forget) for name, way in ways.items()},
                batches, size.repeats,
            )  # fmt: skip
            records = {
                name: [_recorded(step, batches, forget) for _ in range(_RECORDED)]
                for name, step in steps.items()
            }
        found = {
            "times": times,
            "predicted": {n: [e.predicted.step_ns for e in own] for n, own in records.items()},
            "measured": {n: [e.measured.step_ns for e in own] for n, own in records.items()},
            "passes": {name: _passes(own) for name, own in records.items()},
        }
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _recorded(step: Step, batches: Sequence[tuple[Tensor, ...]], forget: Any) -> PipelineRecord:
    forget()
    return step.record_pipeline(batches)


def _passes(records: Sequence[PipelineRecord]) -> list[list[int]]:
    """By chunk: ns of its forward, gradients of inputs, and of weights, each with what its rank
    does behind it for messages; means over steps."""
    kinds = (
        ("forward_ns", Direction.FORWARD, Share.WHOLE),
        ("input_ns", Direction.BACKWARD, Share.INPUT),
        ("weight_ns", Direction.BACKWARD, Share.WEIGHT),
    )

    def took(costs: PipelineCosts, chunk: int) -> list[int]:
        return [
            getattr(costs.chunks[chunk], name)
            + costs.between_ns.get(Strand(direction, chunk, share).text, 0)
            for name, direction, share in kinds
        ]

    count = len(records[0].costs.chunks)
    return [
        [round(fmean(each)) for each in zip(*(took(r.costs, chunk) for r in records), strict=True)]
        for chunk in range(count)
    ]


def _afresh(
    way: StepFunction, forget: Any, batches: Sequence[tuple[Tensor, ...]]
) -> Mapping[str, Tensor]:
    """A step whose sleeps are not shortened by those of the step before."""
    forget()
    return way(batches)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
