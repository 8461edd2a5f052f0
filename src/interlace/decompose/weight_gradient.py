"""Weight gradients in parts: as filler while transfers run, or summed up as slices arrive."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from interlace.decompose.ring import cut


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
