"""The norm of the gradients of a model whose parts lie on several ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.runtime.stage_link import StageLink


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor], link: StageLink | None, device: torch.device) -> Tensor:
    """The 2-norm of all gradients, plain or DTensors, in float64. Of a pipeline each rank gives
    those that it adds up, and `link` leads to the others; then collective over the pipeline."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        groups.setdefault(mesh, []).append(gradient)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for members in groups.values():
        norm = torch.nn.utils.get_total_norm(members)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        squares += whole.double().square()
    if link is not None:
        link.add_up(squares, "the norm of the gradients")
    return squares.sqrt()
