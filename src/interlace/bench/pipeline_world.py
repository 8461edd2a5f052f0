"""One rank of the pipeline bench: `python -m interlace.bench.pipeline_world JOB RESULT`.

All ways of running a step take turns in one run: PyTorch's schedules on its own runtime, and ours
on ours. Every way has the same chunks: whole blocks, the embedding with the first and the head with
the last. Their gradients are compared once, before anything is timed.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from interlace.api import compile_step, stage_parameters
from interlace.bench.pipeline_rivals import build_rival
from interlace.config import PlanConfig
from interlace.errors import RunError
from interlace.ranks.launched import follow_launcher
from interlace.runtime.executor import Batch
from interlace.runtime.peak_memory import allocated_bytes, measure_growth
from interlace.runtime.pipeline_record import PipelineRecord
from interlace.step import Step

LIMIT = timedelta(seconds=300)
"""Limit of every wait of the bench; no step takes nearly so long."""
_WARM_UP = 2
"""Steps of each way that are not timed."""
_BOUND = 1e-4
"""By how much gradients in float32 may differ between the runtimes, of the largest one; they add
up in other orders."""


class AttentionPart(nn.Module):
    """The first half of a block: attention behind a norm, added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MlpPart(nn.Module):
    """The second half of a block: an MLP behind a norm, added."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class BenchBlock(nn.Sequential):
    """A block of a GPT: attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(AttentionPart(width, heads), MlpPart(width, 4 * width))


class GptChunk(nn.Module):
    """Some blocks of a GPT, by number; its embedding before and its head behind them, if it has
    them."""

    words: nn.Embedding | None
    blocks: nn.ModuleDict
    head: nn.Linear | None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        if self.words is not None:
            x = self.words(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Gpt(GptChunk):
    """Some blocks of a GPT, with the embedding or the head if it has them."""

    def __init__(self, size: Mapping[str, int], chunk: int = 0, chunks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)  # every chunk draws the whole model, so that all are parts of one
        width, blocks = size["width"], size["blocks"]
        words = nn.Embedding(size["words"], width)
        every = [BenchBlock(width, size["heads"]) for _ in range(blocks)]
        head = nn.Linear(width, size["words"], bias=False)
        first, last = (blocks * k // chunks for k in (chunk, chunk + 1))
        self.words = words if chunk == 0 else None
        self.blocks = nn.ModuleDict({str(k): every[k] for k in range(first, last)})
        self.head = head if chunk == chunks - 1 else None


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step_loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same of the whole model."""
    return loss_of(module(tokens), targets)


StepFunction = Callable[[Sequence[Batch]], Mapping[str, Tensor]]
"""Runs a step, and gives this rank's gradients by the names of the whole model."""


def our_way(
    size: Mapping[str, int], schedule: str, chunks: int, mesh: DeviceMesh
) -> tuple[StepFunction, Step]:
    """A schedule on our runtime; and its step, for predictions."""
    model = Gpt(size)
    total = chunks * mesh.size()
    starts = [f"blocks.{size['blocks'] * k // total}" for k in range(1, total)]
    example = batches_of({**size, "micro_batches": 1})[0]
    step = compile_step(
        model, step_loss, example, mesh=mesh, schedule=schedule, split_at=starts,
        config=PlanConfig(cache=False, profile_repeats=3),
    )  # fmt: skip

    def run(batches: Sequence[Batch]) -> Mapping[str, Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        step(batches)
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run, step


def batches_of(size: Mapping[str, int]) -> list[Batch]:
    """Micro-batches of tokens and targets."""
    draw = torch.Generator().manual_seed(1)
    shape = (size["batch"], size["length"])
    return [
        tuple(torch.randint(size["words"], shape, generator=draw) for _ in range(2))
        for _ in range(size["micro_batches"])
    ]


def check_same(ways: Mapping[str, StepFunction], batches: Sequence[Batch]) -> None:
    """Raise RunError if a way computes other gradients, for weights that two ways have here."""
    seen: dict[str, Tensor] = {}
    for name, way in ways.items():
        for weight, gradient in way(batches).items():
            known = seen.setdefault(weight, gradient.clone())
            worst = float((gradient - known).abs().max() / known.abs().max().clamp_min(1e-12))
            if worst > _BOUND:
                raise RunError(f"{name} has another gradient of {weight}: off by {worst:.2g}")


def take_turns(
    ways: Mapping[str, StepFunction],
    batches: Sequence[Batch],
    repeats: int,
    warm_up: int = _WARM_UP,
) -> dict[str, list[int]]:
    """ns of each step of each way, from the first rank's start to the last one's end, behind
    `warm_up` turns."""
    times: dict[str, list[int]] = {name: [] for name in ways}
    for repeat in range(warm_up + repeats):
        for name, way in ways.items():
            took = _timed(way, batches)
            if repeat >= warm_up:
                times[name].append(took)
    return times


def _timed(way: StepFunction, batches: Sequence[Batch]) -> int:
    """Of the rank that took longest; all begin together."""
    dist.barrier()
    began = time.perf_counter_ns()
    way(batches)
    return _most(time.perf_counter_ns() - began)


def predict(
    ways: Mapping[str, StepFunction],
    steps: Mapping[str, Step],
    batches: Sequence[Batch],
    repeats: int,
) -> dict[str, dict[str, list[float]]]:
    """By schedule ns of steps. `recorded` and `predicted`: of a recorded step, and as it is
    simulated from its own times. `measured`: the mean of the steps right before and behind it,
    which are timed as in `take_turns`, so that it sees the machine in the same state. And bubbles
    of the recorded step, `bubble_measured` and `bubble_predicted`, as shares of all ranks' time."""
    keys = ("measured", "recorded", "predicted", "bubble_measured", "bubble_predicted")
    found: dict[str, dict[str, list[float]]] = {key: {name: [] for name in steps} for key in keys}
    for _ in range(repeats):
        for name, step in steps.items():
            ways[f"ours {name}"](batches)  # so that none has weights to fetch that others have not
            before = _timed(ways[f"ours {name}"], batches)
            record = recorded(step, batches)
            behind = _timed(ways[f"ours {name}"], batches)
            for key, value in (
                ("measured", (before + behind) / 2),
                ("recorded", record.measured.step_ns),
                ("predicted", record.predicted.step_ns),
                ("bubble_measured", record.measured.bubble_fraction),
                ("bubble_predicted", record.predicted.bubble_fraction),
            ):
                found[key][name].append(value)
    return found


def recorded(step: Step, batches: Sequence[Batch]) -> PipelineRecord:
    """The record of a step that begins with no gradients, as those do that are timed."""
    for parameter in stage_parameters(step).values():
        parameter.grad = None
    return step.record_pipeline(batches)


def peaks(
    ways: Mapping[str, StepFunction], steps: Mapping[str, Step], batches: Sequence[Batch]
) -> dict[str, dict[str, list[float]]]:
    """The most bytes that a rank has at a time beside weights, of the rank that has most: gradients
    and what forwards keep for backwards. `peak` by way as the C allocator counts it, with all that
    operators need while they run, and `peak_predicted` by schedule without; neither where the C
    library is not glibc, which is said."""
    found: dict[str, dict[str, list[float]]] = {"peak": {}, "peak_predicted": {}}
    if allocated_bytes() is None:
        if dist.get_rank() == 0:
            print("note: the C library does not tell what it holds: no memory", file=sys.stderr)
        return found
    for name, way in ways.items():
        held = sum(gradient.nbytes for gradient in way(batches).values())
        dist.barrier()
        growth = measure_growth(lambda way=way: way(batches), torch.device("cpu"))  # type: ignore[misc]
        assert growth.allocated_bytes is not None
        # Gradients of the step before are there when it begins, and PyTorch's are dropped then.
        found["peak"][name] = [_most(growth.allocated_bytes + held)]
        if (step := steps.get(name.removeprefix("ours "))) is not None:
            kept = recorded(step, batches).predicted.peak_bytes[dist.get_rank()]
            found["peak_predicted"][name.removeprefix("ours ")] = [_most(kept + held)]
    return found


def _most(value: int) -> int:
    """The largest of all ranks."""
    total = torch.tensor(value)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return int(total)


def main(job_path: str, result_path: str) -> int:
    """Measure as this rank; rank 0 writes the times."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        size: Any = job["size"]
        ways: dict[str, StepFunction] = {}
        steps: dict[str, Step] = {}
        for ours, theirs, chunks in job["schedules"]:
            ways[f"ours {ours}"], steps[ours] = our_way(size, ours, chunks, mesh)
            if theirs:
                ways[f"torch {theirs}"] = build_rival(Gpt, size, theirs, chunks, loss_of)
        batches = batches_of(size)
        check_same(ways, batches)
        found: dict[str, Any] = {"times": take_turns(ways, batches, job["repeats"])}
        found |= predict(ways, steps, batches, job["recorded"])
        found |= peaks(ways, steps, batches)
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
