"""Tokens to rows sorted by expert, and rows back to tokens: one sort, one gather each way.

Both gathers are given the order and its inverse, so that each one's gradient is the other and no
gradient needs an addition at an index.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("interlace::expert_order", mutates_args=())
def expert_order(ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the N K rows, numbered n K + k: (order, place, counts).

    `order[i]` is the row that stands at place i when rows are sorted by expert (rows of one expert
    keep their order), `place` is its inverse, both [N K]; `counts` [E] are the rows of each expert.
    A row whose id is `experts` has been dropped: it stands behind all others and is not counted.
    """
    flat = ids_NK.flatten()
    ordered, order = flat.sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    # Not bincount, which makes the host wait for the largest id.
    edges = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
    return order, place, torch.searchsorted(ordered, edges).diff()


@expert_order.register_fake
def _(ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = ids_NK.numel()
    return tuple(ids_NK.new_empty(n, dtype=torch.int64) for n in (rows, rows, experts))  # type: ignore[return-value]


@torch.library.custom_op("interlace::rows_of_tokens", mutates_args=())
def rows_of_tokens(x_ND: Tensor, order: Tensor, place: Tensor, per_token: int) -> Tensor:
    """[N, D] -> [N K, D]: each token once for each of its `per_token` experts, by expert."""
    return x_ND.index_select(0, order // per_token if per_token > 1 else order)


@rows_of_tokens.register_fake
def _(x_ND: Tensor, order: Tensor, place: Tensor, per_token: int) -> Tensor:
    return x_ND.new_empty(order.shape[0], x_ND.shape[1])


@torch.library.custom_op("interlace::tokens_of_rows", mutates_args=())
def tokens_of_rows(rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """[N K, D] sorted by expert -> [N K, D] in the order of the tokens."""
    return rows.index_select(0, place)


@tokens_of_rows.register_fake
def _(rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
    return rows.new_empty(place.shape[0], rows.shape[1])


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.per_token = inputs[3]


def _after_spread(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_rows = tokens_of_rows(gradient, *ctx.saved_tensors)
    if ctx.per_token > 1:
        of_rows = of_rows.view(-1, ctx.per_token, of_rows.shape[1]).sum(1)
    return of_rows, None, None, None


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _after_gather(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return rows_of_tokens(gradient, *ctx.saved_tensors, 1), None, None


rows_of_tokens.register_autograd(_after_spread, setup_context=_keep_spread)
tokens_of_rows.register_autograd(_after_gather, setup_context=_keep_gather)

ORDER = torch.ops.interlace.expert_order.default
"""The operator that sorts, as it stands in traced graphs."""
