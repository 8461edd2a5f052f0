"""AdamW with linear warm-up and cosine decay, PyTorch's own, and the norm by which it is clipped.

The norm is that of all gradients of a run, over its ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from interlace.config import OptimizerConfig
from interlace.parallel.local_parts import local


def build_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; matrices are decayed, vectors (norms) are not."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Factor (n+1)/warm-up, then a half cosine from 1 to `final_fraction` at the last step."""
    warm_up = min(config.warmup_steps, steps)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return config.final_fraction + (1 - config.final_fraction) * cosine

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def set_step(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Put the learning rates to where they are before step `step` (from 0).

    `load_state_dict` of a schedule alone leaves the rates in the optimizer as they were.
    """
    schedule.last_epoch = step
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(step)


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients over all ranks, in one all-reduce; equal on every rank.

    A rank adds the squares of its part divided by the number of ranks that hold the same part,
    so each element counts once. Gradients must lie as their parameters do.
    """
    total: Tensor | None = None
    for parameter in parameters:
        squares = _squares(parameter)
        total = squares if total is None else total + squares
    assert total is not None
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def norm_over_stages(
    masters: Mapping[str, nn.Parameter], names: Sequence[str], copies: Mapping[str, int]
) -> Tensor:
    """The same where each rank holds the masters of its stage of a pipeline. `names` are those of
    all stages, and `copies` says how many ranks hold each that this one has, beside those of its
    mesh. Squares are added in the order of `names`, as without a pipeline."""
    device = local(next(iter(masters.values()))).device
    squares = torch.zeros(len(names), dtype=torch.float64, device=device)
    for place, name in enumerate(names):
        if name in masters:
            squares[place] = _squares(masters[name]) / copies[name]
    dist.all_reduce(squares)
    total = squares.new_zeros(())
    for each in squares:
        total = total + each
    return total.sqrt()


def _squares(parameter: nn.Parameter) -> Tensor:
    """Of this rank's part of a gradient, as far as it counts for this rank."""
    gradient = parameter.grad
    assert gradient is not None
    copies = 1
    if isinstance(gradient, DTensor):
        for axis, placement in enumerate(gradient.placements):
            if isinstance(placement, Replicate):
                copies *= gradient.device_mesh.size(axis)
    return local(gradient).float().square().sum(dtype=torch.float64) / copies


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most `max_norm` (0: only measure).
    Returns the norm before clipping."""
    return clip_by(parameters, float(global_norm(parameters)), max_norm)


@torch.no_grad()
def clip_by(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> float:
    """The same, where the norm is known."""
    if max_norm and norm > max_norm:
        for parameter in parameters:
            assert parameter.grad is not None
            local(parameter.grad).mul_(max_norm / (norm + 1e-6))
    return norm
