"""Matmul, then reduce-scatter or all-reduce, as one: each slice travels while the next one is
multiplied."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from interlace.decompose.functions.arguments import check_matmul, rank_and_ranks, scatter_order
from interlace.decompose.functions.loops import gather_slices, scatter_slices
from interlace.decompose.functions.weight_gradient import GradientSum
from interlace.decompose.order import Order, RowPart, cut


def matmul_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
    rows_per_rank: Sequence[int] | None = None,
) -> Tensor:
    """x [total rows, ..., in] times weight [out, in] transposed, summed over ranks and scattered
    along dim 0: this rank's [rows, ..., out].

    Ranks get equal numbers of rows, or `rows_per_rank`. Each rank's slice is cut into `pieces`
    parts. Backward gathers the output's gradient: each slice gives its rows of dX and its share of
    dW while the next one travels; weight gradients narrower than float32 are summed in float32.

    Memory beyond the results: three slices of the output, with two ranks two; backward two.
    Sums: over ranks in the dtype of x, one rounding to each addition, like a ring reduce-scatter:
    the error is at most N u sum_k |x_k w_k^T| on N ranks with unit roundoff u (2^-8 in bfloat16)
    plus that of the matmuls. Raises InputError.
    """
    check_matmul(x, [weight])
    inner = x.shape[1:-1]
    order = scatter_order(x.shape[0], inner.numel(), group, variant, pieces, rows_per_rank)
    out: Tensor = _MatmulScatter.apply(x.flatten(0, -2), weight, order, group)
    rows = order.own.rows // max(1, inner.numel())
    return out.view(rows, *inner, out.shape[1])


def matmul_reduce(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
) -> Tensor:
    """x [rows, ..., in] times weight [out, in] transposed, summed over ranks: [rows, ..., out].

    The scatter form, then a gather of the sums, under which there is nothing to compute; any
    number of rows. The gradient that comes in is taken to be equal on all ranks, as of a
    row-parallel linear whose output is replicated, so backward needs no transfer.

    Memory and sums as for `matmul_scatter`; all ranks get the same bits. Raises InputError.
    """
    check_matmul(x, [weight])
    matrix = x.flatten(0, -2)
    _, ranks = rank_and_ranks(group)
    rows = [part.rows for part in cut(matrix.shape[0], ranks)]
    order = scatter_order(matrix.shape[0], 1, group, variant, pieces, rows)
    out: Tensor = _MatmulReduce.apply(matrix, weight, order, group)
    return out.view(*x.shape[:-1], out.shape[1])


class _MatmulScatter(Function):
    """On matrices: x [total rows, in] and weight [out, in]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, order: Order, group: dist.ProcessGroup | None
    ) -> Tensor:
        result = x.new_empty((order.own.rows, weight.shape[0]))
        _multiply_and_scatter(x, weight, result, order, group)
        ctx.save_for_backward(x, weight)
        ctx.order, ctx.group = order, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = x.new_empty(x.shape) if needs_x else None
        dw = GradientSum(weight) if needs_weight else None

        def compute(part: RowPart, values: Tensor) -> None:
            if dx is not None:
                torch.mm(values, weight, out=dx[part.start : part.stop])
            if dw is not None:
                dw.add(values, x[part.start : part.stop])

        gather_slices(grad.contiguous(), ctx.order, ctx.group, compute)
        return dx, dw.total() if dw is not None else None, None, None


class _MatmulReduce(Function):
    """On matrices: x [rows, in] and weight [out, in]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, order: Order, group: dist.ProcessGroup | None
    ) -> Tensor:
        result = x.new_empty((order.total, weight.shape[0]))
        own = result[order.own.start : order.own.stop]
        _multiply_and_scatter(x, weight, own, order, group)
        gather_slices(own, order, group, lambda part, values: None, into=result)
        ctx.save_for_backward(x, weight)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.mm(grad, weight) if needs_x else None
        return dx, torch.mm(grad.t(), x) if needs_weight else None, None, None


def _multiply_and_scatter(
    x: Tensor, weight: Tensor, result: Tensor, order: Order, group: dist.ProcessGroup | None
) -> None:
    def compute(part: RowPart, out: Tensor) -> None:
        torch.mm(x[part.start : part.stop], weight.t(), out=out)

    scatter_slices(result, order, group, compute)
