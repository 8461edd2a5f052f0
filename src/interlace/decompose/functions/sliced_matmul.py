"""Data slicing: one collective is cut into k, each next to the matmul of its rows.

The published way to hide tensor-parallel collectives (Megatron-LM; MindSpeed CoC, whose steps these
are). A slice is the same part of every rank's rows, so its collective is an all-gather or
reduce-scatter of 1 / k of the bytes. Before a reduce-scatter the rows of a slice are copied
together, behind an all-gather they are copied apart, as CoC does, so that results have the layout
of the plain collective. The first all-gather and the last reduce-scatter stay exposed: this is the
baseline that the point-to-point forms are measured against.

Letters: n ranks, R rows of a rank, r rows of a slice of them, K inputs, D outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from interlace.decompose.functions.arguments import check_matmul, rank_and_ranks
from interlace.decompose.order import RowPart, cut
from interlace.errors import InputError
from interlace.graphs import collectives

ReduceExchange = Literal["reduce_scatter", "all_to_all"]
"""How slices are reduced. gloo's reduce-scatter is an all-reduce inside, of twice the bytes; an
all-to-all followed by a sum on the owner moves the (n - 1) / n of a true reduce-scatter."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a call is sliced."""

    group: str
    ranks: int
    slices: int
    exchange: ReduceExchange


def sliced_gather_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    slices: int,
    exchange: ReduceExchange = "reduce_scatter",
) -> Tensor | list[Tensor]:
    """x [R, ..., K] of all ranks, joined along dim 0, times weights [D, K] transposed:
    [n R, ..., D] each; a list of weights gives a list. R must be the same on all ranks.

    A slice's all-gather runs under the matmuls of the slice before it. Backward reduce-scatters the
    gradient of `x` slice by slice (`exchange`), under the weights' gradients at the end; kept for
    it is the gathered input. Raises InputError for what does not fit.
    """
    many = [weights] if isinstance(weights, Tensor) else list(weights)
    check_matmul(x, many)
    way = _way(group, slices, exchange, rows=x.shape[0])
    found = cast("tuple[Tensor, ...]", _GatherMatmul.apply(way, x, *many))
    return found[0] if isinstance(weights, Tensor) else list(found)


def sliced_matmul_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    slices: int,
    exchange: ReduceExchange = "reduce_scatter",
) -> Tensor:
    """x [n R, ..., K] times weight [D, K] transposed, summed over ranks: this rank's [R, ..., D].

    Each slice's reduce-scatter runs under the matmuls of the slices behind it. Backward gathers
    the gradient slice by slice and keeps it for the gradient of `weight`. Raises InputError for
    what does not fit.
    """
    check_matmul(x, [weight])
    _, ranks = rank_and_ranks(group)
    if x.shape[0] % ranks:
        raise InputError(
            f"{x.shape[0]} rows cannot be scattered equally over {ranks} ranks",
            hint="pad x to a multiple of the ranks",
        )
    way = _way(group, slices, exchange, rows=x.shape[0] // ranks)
    return cast("Tensor", _MatmulScatter.apply(way, x, weight))


def _way(
    group: dist.ProcessGroup | None, slices: int, exchange: ReduceExchange, *, rows: int
) -> _Way:
    _, ranks = rank_and_ranks(group)
    if exchange not in get_args(ReduceExchange):
        raise InputError(
            f"unknown exchange {exchange!r}",
            hint="set it to " + " or ".join(get_args(ReduceExchange)),
        )
    if not 1 <= slices <= rows:
        raise InputError(
            f"{rows} rows of a rank cannot be cut into {slices} slices",
            hint=f"set slices to a number from 1 to {rows}" if rows else "give x some rows",
        )
    found = group or dist.group.WORLD
    assert found is not None
    return _Way(found.group_name, ranks, slices, exchange)


def _gather_form(
    x: Tensor, weights: Sequence[Tensor], way: _Way
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(products of the gathered `x` with each weight [K, D], gathered `x` [n R, ..., K])."""
    shape = (way.ranks * x.shape[0], *x.shape[1:-1])
    gathered = x.new_empty((*shape, x.shape[-1]))
    outputs = tuple(x.new_empty((*shape, weight.shape[1])) for weight in weights)
    parts = cut(x.shape[0], way.slices)

    def gather(part: RowPart) -> collectives.Pending:
        return collectives.all_gather(x[part.start : part.stop], way.ranks, way.group)

    arriving = gather(parts[0])
    for index, part in enumerate(parts):
        arrived = collectives.wait(arriving)
        if index + 1 < len(parts):
            arriving = gather(parts[index + 1])
        rows = _slice_of(gathered, part, way)
        rows.copy_(arrived.view(rows.shape))
        for output, weight in zip(outputs, weights, strict=True):
            rows = _slice_of(output, part, way)
            rows.copy_((arrived.flatten(0, -2) @ weight).view(rows.shape))
    return outputs, gathered


def _slice_of(whole: Tensor, part: RowPart, way: _Way) -> Tensor:
    """Rows `part` of each rank, [n, r, ...], of a tensor with the rows of all ranks."""
    return whole.unflatten(0, (way.ranks, -1))[:, part.start : part.stop]


def _scatter_form(
    xs: Sequence[Tensor], weights: Sequence[Tensor], way: _Way
) -> Callable[[], Tensor]:
    """Starts the sum over ranks and over pairs of x [n R, ..., K] @ weight [K, D]; the call that it
    returns waits for this rank's [R, ..., D]."""
    rows = xs[0].shape[0] // way.ranks
    result = xs[0].new_empty((rows, *xs[0].shape[1:-1], weights[0].shape[1]))
    finishing = []
    for part in cut(rows, way.slices):
        partial: Tensor | None = None
        for x, weight in zip(xs, weights, strict=True):
            matrix = _slice_of(x, part, way).reshape(-1, x.shape[-1])
            partial = matrix @ weight if partial is None else partial.addmm_(matrix, weight)
        assert partial is not None
        finishing.append(_reduce(partial, result[part.start : part.stop], way))

    def finish() -> Tensor:
        for wait in finishing:
            wait()
        return result

    return finish


def _reduce(partial: Tensor, into: Tensor, way: _Way) -> Callable[[], object]:
    """Starts the reduction of a slice [n r, D] over the ranks; the call that it returns waits and
    writes this rank's [r, ..., D]."""
    if way.exchange == "reduce_scatter":
        pending = collectives.reduce_scatter(partial, "sum", way.ranks, way.group, consume=True)
        return lambda: into.copy_(collectives.wait(pending).view(into.shape))
    splits = [partial.shape[0] // way.ranks] * way.ranks
    exchanged = collectives.all_to_all(partial, splits, splits, way.group)

    def add_up() -> Tensor:
        received = collectives.wait(exchanged).view(way.ranks, *into.shape)
        return torch.sum(received, 0, out=into)

    return add_up


class _GatherMatmul(Function):
    """Saved for backward: the gathered input and the weights."""

    @staticmethod
    def forward(ctx: Any, way: _Way, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        outputs, gathered = _gather_form(x, [weight.t() for weight in weights], way)
        ctx.way = way
        ctx.save_for_backward(gathered, *weights)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gathered, *weights = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[1:]
        finish = _scatter_form(gradients, weights, ctx.way) if needs_x else None
        of_weights = [
            _weight_gradient(gradient, gathered) if need else None
            for gradient, need in zip(gradients, needed, strict=True)
        ]
        return None, finish() if finish else None, *of_weights


class _MatmulScatter(Function):
    """Saved for backward: input and weight."""

    @staticmethod
    def forward(ctx: Any, way: _Way, x: Tensor, weight: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(x, weight)
        return _scatter_form([x], [weight.t()], way)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[1:]
        dx, gathered = _gather_form(gradient, [weight] if needs_x else [], ctx.way)
        of_weight = _weight_gradient(gathered, x) if needs_weight else None
        return None, dx[0] if dx else None, of_weight


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)
