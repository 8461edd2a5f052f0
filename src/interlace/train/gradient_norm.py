"""The norm of all gradients of a run, over its ranks, and clipping by it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from interlace.parallel.local_parts import local


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
