"""Small models in stages, and how they train without a pipeline: what the tests of
`interlace.pipelining` compare with.

Every rank draws the whole model from one seed, and keeps the stages that a schedule puts on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from interlace.pipelining.chunk_numbers import found_for, stages_of

WIDTH = 8
ROWS = 2
"""Of a micro-batch."""


class Mlp(nn.Module):
    """Two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def mlps(count: int) -> list[nn.Module]:
    """The stages of a model; the same at each call."""
    torch.manual_seed(3)
    return [Mlp() for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def data(micro_batches: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a whole batch."""
    draw = torch.Generator().manual_seed(seed)
    shape = (ROWS * micro_batches, WIDTH)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


def own_stages(modules: Sequence[nn.Module], schedule: Any) -> list[PipelineStage]:
    """Those that the schedule puts on this rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numbers = stages_of(found_for(schedule, ranks, len(modules)), ranks, rank)
    return [
        PipelineStage(modules[each], each, len(modules), device_of(modules[each]))
        for each in numbers
    ]


def device_of(module: nn.Module) -> torch.device:
    """Where its parameters are; the CPU without any."""
    return next((each.device for each in module.parameters()), torch.device("cpu"))


def eager(
    run: Callable[..., Any], loss: Callable[..., Tensor], micro_batches: Sequence[tuple[Any, ...]],
    *, mean: bool = True,
) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
    """Losses and outputs of `run(*inputs)` on (*inputs, target); gradients of the mean of the
    losses, or of their sum, are added to the parameters."""
    losses, outputs = [], []
    for *inputs, target in micro_batches:
        output = run(*inputs)
        found = loss(output, target)
        (found / (len(micro_batches) if mean else 1)).backward()
        losses.append(found.detach())
        outputs.append(output.detach())
    return losses, outputs


def in_order(modules: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """The model of these stages."""
    return nn.Sequential(*modules)


def pairs(batch: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """Its micro-batches."""
    return list(zip(*(each.chunk(count) for each in batch), strict=True))


def call(schedule: Any, batch: tuple[Tensor, Tensor], method: str = "step", **given: Any) -> Any:
    """A call with what this rank has to pass; (output, losses)."""
    stages = schedule._stages
    losses: list[Tensor] = []
    args = (batch[0],) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        given |= {"target": batch[1], "losses": losses}
    return getattr(schedule, method)(*args, **given), losses


def close(found: Tensor, right: Tensor) -> None:
    """By the tolerances of PyTorch's own tests of pipelines."""
    torch.testing.assert_close(found, right, rtol=1e-5, atol=4e-5)


def compare(own: Sequence[PipelineStage], right: Sequence[nn.Module]) -> int:
    """The gradients of these stages with those of all stages; how many were compared."""
    count = 0
    for stage in own:
        twins = dict(right[stage.stage_index].named_parameters())
        for name, parameter in stage.submod.named_parameters():
            assert parameter.grad is not None, name
            grad = twins[name].grad
            assert grad is not None
            close(parameter.grad, grad)
            count += 1
    return count


class Handed(nn.Module):
    """A first stage that hands its second input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(x)), mask


class Named(nn.Module):
    """A last stage that reads the mask, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, *, by: Tensor, add: float) -> Tensor:
        kept = torch.where(mask.unsqueeze(-1), x, x.new_zeros(()))
        return self.layer(kept) * by.unsqueeze(-1) + add


WORDS = 11


class Words(nn.Module):
    """A first stage that reads integers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


class Mixed(nn.Module):
    """A stage with a buffer, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("mix", torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x @ self.mix) * self.frozen)


class Head(nn.Module):
    """A last stage with the weight of the first one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def tied() -> list[nn.Module]:
    """Four stages, of which a V puts the ends on one rank; the same at each call."""
    torch.manual_seed(4)
    words = Words()
    return [words, Mixed(), Mixed(), Head(words.words.weight)]


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)
