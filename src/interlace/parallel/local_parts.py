"""Run an unmodified module on this rank's part of its parameters.

The module's own `forward` reads `self.weight` and gets a plain tensor, this rank's part;
optimizers, checkpoints and `named_parameters` see the DTensor. The module object stays the same
and gets a subclass of its class (as FSDP2 does it), so no name in a state dict changes.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

WHOLE: tuple[Placement, ...] = (Replicate(),)
"""Placements of a tensor that every rank of a one-dimensional mesh holds whole."""


def stored(tensor: Tensor) -> Tensor:
    """This rank's part as it is, without an operator of autograd: to look at, not to change."""
    if isinstance(tensor, DTensor):
        # By the protocol of tensors that wrap others; of a parameter `to_local` makes a new one.
        names, _ = tensor.__tensor_flatten__()
        return getattr(tensor, names[0])
    return tensor


def with_part(whole: DTensor, part: Tensor) -> DTensor:
    """A tensor that is laid out as `whole`, of which this rank holds `part`."""
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements,
        run_check=False, shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached; shares memory with `tensor`."""
    return stored(tensor).detach()


def lay_out(
    model: nn.Module, mesh: DeviceMesh, shards: dict[str, int], partial: Collection[str]
) -> None:
    """Make every parameter of `model` a DTensor on a one-dimensional mesh, in place.

    Parameters in `shards` are cut along the dimension given there, the others are whole on every
    rank. Of the whole ones in `partial` each rank computes a part of the gradient; the sum over
    ranks is the gradient. Every rank must hold equal weights. A parameter with several names stays
    one parameter, and is cut if any of its names is in `shards`.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    laid_out: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, own in names.items():
        dims = {shards[name] for name in own if name in shards}
        layout = [Shard(dims.pop())] if dims else WHOLE
        whole = distribute_tensor(parameter.detach(), mesh, layout, src_data_rank=None)
        laid_out[parameter] = nn.Parameter(
            _own_storage(whole), requires_grad=parameter.requires_grad
        )
    for prefix, module in model.named_modules():
        members: dict[str, Any] = {}
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, laid_out[parameter])
            members[name] = _part(name, partial=f"{prefix}.{name}".lstrip(".") in partial)
        if members:
            specialise(module, (), members)


def specialise(module: nn.Module, mixins: tuple[type, ...], members: dict[str, Any]) -> None:
    """Give one module object a subclass of its class."""
    base = type(module)
    module.__class__ = type(base.__name__, (*mixins, base), {"__doc__": base.__doc__, **members})


def _part(name: str, *, partial: bool) -> Any:
    """A property: `module.NAME` gives this rank's part, a plain tensor that gradients pass."""
    gradient = [Partial()] if partial else None

    def read(module: nn.Module) -> Tensor:
        parameter: Any = module._parameters[name]
        return parameter.to_local(grad_placements=gradient)

    return property(read)


def _own_storage(whole: DTensor) -> DTensor:
    """Give a rank's part a storage of its own: a slice of rows would keep the whole weight."""
    part = whole.to_local()
    if part.untyped_storage().nbytes() == part.numel() * part.element_size():
        return whole
    return with_part(whole, part.clone())


def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same whole tensor, now read by split modules: its gradient is summed over ranks."""
    whole = DTensor.from_local(x, mesh, WHOLE, run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def leave(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum of all ranks' `x`, on every rank; its gradient is the same on every rank."""
    parts = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=WHOLE).to_local()


def gather_features(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """[..., D / ranks] -> [..., D]; in backward each rank takes its slice."""
    return split_features_of(x, mesh).redistribute(placements=WHOLE).to_local()


def take_features(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """[..., D] -> this rank's [..., D / ranks]; in backward slices are gathered."""
    whole = DTensor.from_local(x, mesh, WHOLE, run_check=False)
    return whole.redistribute(placements=[Shard(x.ndim - 1)]).to_local()


def split_features_of(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """[..., D / ranks] per rank as one DTensor [..., D]."""
    return DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False)


class Entered(nn.Module):
    """Its output goes to column modules only: their input gradients are summed here, once."""

    tensor_mesh: DeviceMesh

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Its own forward."""
        return enter(super().forward(*args, **kwargs), self.tensor_mesh)


class Column(nn.Module):
    """A linear layer that computes this rank's slice of the output features."""

    tensor_mesh: DeviceMesh
    enters: bool
    """Whether it sums its input gradient itself."""
    finish: Callable[[Tensor, DeviceMesh], Tensor] | None
    """What becomes of the slice: gathered, wrapped as a DTensor, or left as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F / ranks]."""
        if self.enters:
            x = enter(x, self.tensor_mesh)
        y = super().forward(x)
        return y if self.finish is None else self.finish(y, self.tensor_mesh)


class Row(nn.Module):
    """A linear layer over this rank's slice of the input features; the sum leaves it."""

    tensor_mesh: DeviceMesh
    weight: Tensor
    bias: Tensor | None
    splits_input: bool

    def forward(self, x: Tensor) -> Tensor:
        """[..., F / ranks] -> [..., D]."""
        if self.splits_input:
            x = take_features(x, self.tensor_mesh)
        y = leave(torch.nn.functional.linear(x, self.weight), self.tensor_mesh)
        return y if self.bias is None else y + self.bias


class VocabularyRows(nn.Module):
    """An embedding whose rows are split over ranks: each rank looks up its own tokens."""

    tensor_mesh: DeviceMesh
    weight: Tensor
    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D], whole on every rank."""
        rows = self.weight.shape[0]
        local = tokens - self.first_row
        foreign = (local < 0) | (local >= rows)
        x = super().forward(local.masked_fill(foreign, 0))
        return leave(x.masked_fill(foreign.unsqueeze(-1), 0), self.tensor_mesh)
