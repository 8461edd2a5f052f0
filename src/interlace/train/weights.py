"""Master weights: what the optimizer owns, always in float32.

With float32 compute they are the module's own parameters. With bfloat16 compute the module holds
bfloat16 copies, gradients are summed in float32 and `publish` rounds the masters into the copies
after each optimizer step.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from interlace.runtime.executor import local


class MasterWeights:
    """Masters of a module's parameters, by name; parameters shared by two names appear once."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        """Casts the module to `compute_dtype` in place if that is not float32."""
        self.module = module
        self.masters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.separate = compute_dtype != torch.float32
        if self.separate:
            copies = {
                name: nn.Parameter(parameter.detach().clone())
                for name, parameter in self.masters.items()
            }
            cast_parameters(module, compute_dtype)
            self.masters = copies

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer gets."""
        return list(self.masters.values())

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module's parameters."""
        if self.separate:
            for name, parameter in self.module.named_parameters():
                local(parameter).copy_(local(self.masters[name]))

    def buffers(self) -> dict[str, Tensor]:
        """A zeroed float32 local gradient buffer per parameter name of the module; names of one
        shared parameter share one buffer."""
        shared: dict[nn.Parameter, Tensor] = {}
        found = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if parameter not in shared:
                shared[parameter] = torch.zeros_like(local(parameter), dtype=torch.float32)
            found[name] = shared[parameter]
        return found

    def set_gradients(
        self, buffers: Mapping[str, Tensor], placements: Mapping[str, tuple | None]
    ) -> None:
        """Make `buffers` the masters' gradients, without a copy. `placements` says how each
        lies on its mesh; missing names lie as their parameter does."""
        for name, master in self.masters.items():
            buffer = buffers[name]
            if not isinstance(master, DTensor):
                master.grad = buffer
                continue
            layout = placements.get(name) or master.placements
            master.grad = DTensor.from_local(
                buffer, master.device_mesh, layout,
                run_check=False, shape=master.shape, stride=master.stride(),
            )  # fmt: skip


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in `dtype`, in place; buffers keep theirs (rotary tables need float32)."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.detach().to(dtype))
            setattr(owner, name, cast[parameter])


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients over all ranks, in one all-reduce; equal on every rank.

    A rank adds the squares of its part divided by the number of ranks that hold the same part,
    so each element counts once. Gradients must lie as their parameters do.
    """
    total: Tensor | None = None
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        copies = 1
        if isinstance(gradient, DTensor):
            for axis, placement in enumerate(gradient.placements):
                if isinstance(placement, Replicate):
                    copies *= gradient.device_mesh.size(axis)
        squares = local(gradient).float().square().sum(dtype=torch.float64) / copies
        total = squares if total is None else total + squares
    assert total is not None
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most `max_norm` (0: only measure).
    Returns the norm before clipping."""
    norm = float(global_norm(parameters))
    if max_norm and norm > max_norm:
        for parameter in parameters:
            assert parameter.grad is not None
            local(parameter.grad).mul_(max_norm / (norm + 1e-6))
    return norm
