"""One matmul for each expert, on the rows that it got.

Forward and the gradient of the rows are one operator; the gradient of the weights is another, for
which nothing waits, so that a planner may move it, and which adds to a buffer where there is one.
An expert without rows has no output rows, and a gradient of 0.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def grouped_matmul(rows: Tensor, weight_LFD: Tensor, counts: Tensor, ranks: int) -> Tensor:
    """[M, D] x [L, F, D] -> [M, F]: each row by the weight of its expert, as `nn.Linear` does.

    `counts` are those of `host_counts`. Rows behind the last expert's, which were dropped, give 0.
    """
    return _grouped_matmul(rows, weight_LFD, counts, ranks, False)


@torch.library.custom_op("interlace::grouped_matmul", mutates_args=())
def _grouped_matmul(
    rows: Tensor, weight: Tensor, counts: Tensor, ranks: int, backward: bool
) -> Tensor:
    if not backward:
        weight = weight.transpose(1, 2)
    sizes = _rows_of_experts(counts, ranks)
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        used = rows[: sum(sizes)]
        out[: sum(sizes)] = F.grouped_mm(used, weight, offs=ends.to(rows.device))
    else:
        for expert, (start, end) in enumerate(_spans(sizes)):
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
    out[sum(sizes) :] = 0
    return out


@_grouped_matmul.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, ranks: int, backward: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if backward else 1])


@torch.library.custom_op("interlace::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(gradient: Tensor, rows: Tensor, counts: Tensor, ranks: int) -> Tensor:
    """[M, F], [M, D] -> [L, F, D]: for each expert, the sum over its rows."""
    sizes = _rows_of_experts(counts, ranks)
    out = rows.new_empty(len(sizes), gradient.shape[1], rows.shape[1])
    for expert, (start, end) in enumerate(_spans(sizes)):
        if start == end:
            out[expert] = 0
        else:
            torch.mm(gradient[start:end].t(), rows[start:end], out=out[expert])
    return out


@grouped_weight_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor, ranks: int) -> Tensor:
    experts = counts.shape[1] // ranks
    return rows.new_empty(experts, gradient.shape[1], rows.shape[1])


_ADDS = "interlace::add_grouped_weight_gradient"
torch.library.define(
    _ADDS,
    "(Tensor(a!) buffer, Tensor gradient, Tensor rows, Tensor counts, int ranks) -> Tensor(a!)",
)


@torch.library.impl(_ADDS, ("CPU", "CUDA"))
def _add_grouped_weight_gradient(
    buffer: Tensor, gradient: Tensor, rows: Tensor, counts: Tensor, ranks: int
) -> Tensor:
    """`grouped_weight_gradient` added to `buffer` [L, F, D] of the same type, which is returned;
    experts without rows cost nothing."""
    for expert, (start, end) in enumerate(_spans(_rows_of_experts(counts, ranks))):
        if start < end:
            buffer[expert].addmm_(gradient[start:end].t(), rows[start:end])
    return buffer


@torch.library.register_fake(_ADDS)
def _(buffer: Tensor, gradient: Tensor, rows: Tensor, counts: Tensor, ranks: int) -> Tensor:
    return buffer


def _rows_of_experts(counts: Tensor, ranks: int) -> list[int]:
    return counts[1].view(ranks, -1).sum(0).tolist()


def _spans(sizes: list[int]) -> Iterator[tuple[int, int]]:
    end = 0
    for size in sizes:
        start, end = end, end + size
        yield start, end


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.ranks = inputs[3]


def _after(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, counts = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_rows = _grouped_matmul(gradient, weight, counts, ctx.ranks, True)
    of_weight = grouped_weight_gradient(gradient, rows, counts, ctx.ranks)
    return of_rows, of_weight, None, None, None


MATMUL = torch.ops.interlace.grouped_matmul.default
"""The operators, as they stand in traced graphs."""
WEIGHT_GRADIENT = torch.ops.interlace.grouped_weight_gradient.default
ADD_WEIGHT_GRADIENT = torch.ops.interlace.add_grouped_weight_gradient.default

_grouped_matmul.register_autograd(_after, setup_context=_keep)


@register_flop_formula(torch.ops.interlace.grouped_matmul)
def _flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.interlace.grouped_weight_gradient)
def _gradient_flops(gradient: Any, rows: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * gradient[1]


@register_flop_formula(torch.ops.interlace.add_grouped_weight_gradient)
def _added_flops(buffer: Any, gradient: Any, rows: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * gradient[1]
