"""AdamW with linear warm-up and cosine decay, all of it PyTorch's own."""

import math

import torch
from torch import nn

from interlace.config import OptimizerConfig


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
