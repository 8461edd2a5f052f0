"""Weight gradients in parts: as filler while transfers run, summed up as slices arrive, or
scattered over data-parallel ranks under the matmuls that make them.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.decompose.functions.arguments import check_alike, scatter_order
from interlace.decompose.functions.loops import scatter_slices
from interlace.decompose.order import RowPart, cut
from interlace.errors import InputError


def fill(
    gradients: Sequence[Tensor], grad_outputs: Sequence[Tensor], x: Tensor, parts: int
) -> Iterator[None]:
    """Computes gradient [out, in] = grad_output^T x for every pair, in `parts` items of equal
    work: some rows of some gradients each. Sums have the order of a single matmul."""
    total = sum(gradient.shape[0] for gradient in gradients)
    for low, high in cut(total, max(1, parts)):
        offset = 0
        for gradient, grad_output in zip(gradients, grad_outputs, strict=True):
            rows = slice(max(0, low - offset), max(0, high - offset))
            offset += gradient.shape[0]
            out = gradient[rows]
            if out.shape[0]:
                torch.mm(grad_output[:, rows].t(), x, out=out)
        yield


class GradientSum:
    """The gradient [out, in] of a weight, as a sum over slices of rows. Types narrower than
    float32 are summed up in float32 and rounded once at the end."""

    def __init__(self, weight: Tensor) -> None:
        self._dtype = weight.dtype
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._sum = torch.zeros(weight.shape, dtype=wide, device=weight.device)

    def add(self, grad_output: Tensor, x: Tensor) -> None:
        """Adds grad_output^T x of one slice, [rows, out] and [rows, in]."""
        if self._sum.dtype == x.dtype:
            self._sum.addmm_(grad_output.t(), x)
        else:
            self._sum.add_(torch.mm(grad_output.t(), x))

    def total(self) -> Tensor:
        """The sum, in the dtype of the weight."""
        return self._sum.to(self._dtype)


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

    def compute(part: RowPart, out: Tensor) -> None:
        torch.mm(grad[:, part.start : part.stop].t(), samples, out=out)

    scatter_slices(result, order, group, compute)
    return result
