"""A step on PyTorch's own pipeline runtime, as its users write it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

_V_SHAPES = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose last rank has the middle of the model, and whose first one both ends."""


def build_rival(
    chunk_of: Callable[[Mapping[str, int], int, int], nn.Module],
    size: Mapping[str, int],
    schedule: str,
    chunks: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Callable[[Sequence[tuple[Tensor, ...]]], Mapping[str, Tensor]]:
    """A way to run a step by a schedule of torch.distributed.pipelining, with so many chunks on a
    rank; `chunk_of(size, chunk, chunks)` builds a chunk of the model. The ranks of the pipeline are
    those of `group`, by default all."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = ranks * chunks
    own = [rank + k * ranks for k in range(chunks)]
    if schedule in _V_SHAPES:
        own = [rank, total - 1 - rank]
    modules = [chunk_of(size, chunk, total) for chunk in own]
    device = torch.device("cpu")
    stages: Any = [
        theirs.PipelineStage(module, chunk, total, device, group=group)
        for module, chunk in zip(modules, own, strict=True)
    ]
    kind = getattr(theirs, f"Schedule{schedule}")
    is_single = issubclass(kind, PipelineScheduleSingle)
    runner = kind(stages[0] if is_single else stages, size["micro_batches"], loss_of)
    has_first, has_last = 0 in own, total - 1 in own

    def run(batches: Sequence[tuple[Tensor, ...]]) -> Mapping[str, Tensor]:
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = None
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses: list[Tensor] = []
        inputs = (tokens,) if has_first else ()
        if has_last:
            runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            runner.step(*inputs)
        named = [pair for module in modules for pair in module.named_parameters()]
        return {name: p.grad for name, p in named if p.grad is not None}

    return run
