"""Gradient reduce-scatter of data parallelism, under the matmuls that make the gradient."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.decompose.arguments import check_alike, scatter_order
from interlace.decompose.forms import scatter_slices
from interlace.decompose.ring import Part
from interlace.errors import InputError


@torch.no_grad()
def scatter_gradient(
    dy: Tensor,
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
    rows_per_rank: Sequence[int] | None = None,
) -> Tensor:
    """The weight gradient dy^T x of a linear, summed over ranks: this rank's rows, [rows, in].

    dy [..., out] is the gradient of its output and x [..., in] its input, for this rank's samples.
    Rows of the gradient are computed slice by slice, own slice last; ranks get equal numbers of
    the `out` rows, or `rows_per_rank`. For the mean over ranks divide by their number.

    Memory and sums as for `matmul_scatter`. Not differentiable. Raises InputError.
    """
    if dy.dim() < 2 or dy.shape[:-1] != x.shape[:-1]:
        raise InputError(
            f"dy {tuple(dy.shape)} and x {tuple(x.shape)} are not of the same samples",
            hint="pass dy [..., out] and x [..., in] that differ in the last dimension only",
        )
    check_alike(dy, x)
    order = scatter_order(dy.shape[-1], 1, group, variant, pieces, rows_per_rank)
    grad, samples = dy.flatten(0, -2), x.flatten(0, -2)
    result = grad.new_empty((order.own.rows, samples.shape[1]))

    def compute(part: Part, out: Tensor) -> None:
        torch.mm(grad[:, part.start : part.stop].t(), samples, out=out)

    scatter_slices(result, order, group, compute)
    return result
