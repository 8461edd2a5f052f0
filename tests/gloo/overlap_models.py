"""Stages for the tests of `install_overlap`: with collectives inside, and odd ones."""

from typing import Any

import torch
import torch.distributed as dist
from stage_models import WIDTH, device_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

STAGES = 4
functional = torch.ops._c10d_functional


class Copied(torch.autograd.Function):
    """What ranks have alike, whose gradients they add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0].contiguous(), ctx.group), None


class Summed(torch.autograd.Function):
    """The sum over ranks, of which each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def summed(x: Tensor, group: str) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


class Block(nn.Module):
    """Two tensor-parallel layers and a residual, twice."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        part = 4 * WIDTH // dist.get_world_size(group)
        self.group = group.group_name
        self.wide = nn.ModuleList(nn.Linear(WIDTH, part) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(part, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            hidden = torch.relu(wide(Copied.apply(x, self.group)))
            x = x + Summed.apply(narrow(hidden), self.group)
        return x


def blocks(mesh: DeviceMesh) -> list[nn.Module]:
    """The stages of this rank's pipeline; the same at each call."""
    torch.manual_seed(7 + mesh.get_local_rank("tp"))
    return [Block(mesh.get_group("tp")) for _ in range(STAGES)]


def stages_of(modules: list[nn.Module], mesh: DeviceMesh) -> list[PipelineStage]:
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    return [
        PipelineStage(modules[each], each, STAGES, device_of(modules[each]), group=group)
        for each in (rank, STAGES - 1 - rank)
    ]


class Masked(nn.Module):
    """A last stage with a mask that came through all others, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(torch.where(mask.unsqueeze(-1), x, x.new_zeros(())))


def weighted_loss(output: Tensor, target: Tensor, *, weight: Tensor, power: float) -> Tensor:
    return ((output - target).abs() ** power).mean() * weight


class Dropped(nn.Module):
    """A stage with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


class Branching(nn.Module):
    """Its way depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x + self.layer.weight.sum()


class MixedTypes(nn.Module):
    """Trainable parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.float()


def sharded(mesh: DeviceMesh) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    whole = distribute_tensor(module.weight.detach(), mesh, [Replicate()])
    module.weight = nn.Parameter(whole)
    assert isinstance(module.weight, DTensor)
    return module
