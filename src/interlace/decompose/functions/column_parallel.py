"""All-gather, then matmuls, as one: each slice is multiplied while the next one travels."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from interlace.decompose.functions.arguments import check_matmul, gather_order, is_differentiated
from interlace.decompose.functions.loops import gather_slices, scatter_slices, waits
from interlace.decompose.functions.weight_gradient import GradientSum, fill
from interlace.decompose.order import Order, RowPart


@overload
def gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
    rows_per_rank: Sequence[int] | None = None,
    keep_gathered: bool = True,
) -> Tensor: ...


@overload
def gather_matmul(
    x: Tensor,
    weight: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
    rows_per_rank: Sequence[int] | None = None,
    keep_gathered: bool = True,
) -> list[Tensor]: ...


def gather_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
    rows_per_rank: Sequence[int] | None = None,
    keep_gathered: bool = True,
) -> Tensor | list[Tensor]:
    """x [rows, ..., in] of all ranks, joined along dim 0, times weight [out, in] transposed:
    [total rows, ..., out]. A list of weights gives a list, and x is gathered once.

    `rows_per_rank` is needed where ranks hold different numbers of rows. Each rank's slice is cut
    into `pieces` parts. Backward computes dX in scatter form, with the weight gradients as filler;
    for these the gathered x is kept or, without `keep_gathered`, gathered again.

    Memory beyond the results: the gathered x if it is kept, else two slices of it.
    Sums: results have the order of a plain matmul. dX is summed up over ranks in the dtype of x,
    with one rounding per rank and weight. Raises InputError.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    check_matmul(x, weights)
    inner = x.shape[1:-1]
    order = gather_order(x.shape[0], inner.numel(), group, variant, pieces, rows_per_rank)
    keep = keep_gathered and is_differentiated(*weights)
    found = _GatherMatmul.apply(x.flatten(0, -2), order, group, keep, *weights)
    rows = order.total // max(1, inner.numel())
    outs = [out.view(rows, *inner, out.shape[1]) for out in found]
    return outs[0] if isinstance(weight, Tensor) else outs


class _GatherMatmul(Function):
    """On matrices: x [rows, in] and weights [out, in]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order: Order,
        group: dist.ProcessGroup | None,
        keep: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        gathered = x.new_empty((order.total, x.shape[1])) if keep else None
        outs = tuple(x.new_empty((order.total, weight.shape[0])) for weight in weights)

        def compute(part: RowPart, values: Tensor) -> None:
            for weight, out in zip(weights, outs, strict=True):
                torch.mm(values, weight.t(), out=out[part.start : part.stop])

        gather_slices(x, order, group, compute, into=gathered)
        ctx.save_for_backward(gathered if keep else x, *weights)
        ctx.order, ctx.group, ctx.kept = order, group, keep
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        needs_x, _, _, _, *needs_weight = ctx.needs_input_grad
        wanted = [k for k, needed in enumerate(needs_weight) if needed]
        grads_of_wanted = [grads[k] for k in wanted]
        filler: Iterator[None] = iter(())
        if ctx.kept:
            found = [torch.empty_like(weights[k]) for k in wanted]
            filler = fill(found, grads_of_wanted, x, waits(ctx.order))
        else:
            found = _gather_again(x, grads_of_wanted, [weights[k] for k in wanted], ctx)
        dx = _scatter_input_gradient(grads, weights, ctx, filler) if needs_x else None
        for _ in filler:  # nothing is left of it if there was a scatter
            pass
        of_weights: list[Tensor | None] = [None] * len(weights)
        for k, gradient in zip(wanted, found, strict=True):
            of_weights[k] = gradient
        return dx, None, None, None, *of_weights


def _scatter_input_gradient(
    grads: Sequence[Tensor], weights: Sequence[Tensor], ctx: Any, filler: Iterator[None]
) -> Tensor:
    """This rank's rows of the sum over ranks and weights of grad @ weight."""
    order: Order = ctx.order
    dx = weights[0].new_empty((order.own.rows, weights[0].shape[1]))

    def compute(part: RowPart, out: Tensor) -> None:
        first, *others = [grad[part.start : part.stop] for grad in grads]
        torch.mm(first, weights[0], out=out)
        for grad, weight in zip(others, weights[1:], strict=True):
            out.addmm_(grad, weight)

    scatter_slices(dx, order, ctx.group, compute, filler=filler)
    return dx


def _gather_again(
    x: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor], ctx: Any
) -> list[Tensor]:
    """Weight gradients from slices of x that are gathered a second time."""
    if not weights:
        return []
    sums = [GradientSum(weight) for weight in weights]

    def compute(part: RowPart, values: Tensor) -> None:
        for one, grad in zip(sums, grads, strict=True):
            one.add(grad[part.start : part.stop], values)

    gather_slices(x, ctx.order, ctx.group, compute)
    return [one.total() for one in sums]
