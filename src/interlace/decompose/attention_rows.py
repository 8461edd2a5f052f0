"""Attention of some rows of the queries to all keys that they may see.

With a causal mask rows [a, b) see keys [0, b): the block of keys [0, a) in full, and the square
block [a, b) below its diagonal. Each is one call of an attention kernel without a mask tensor, so
that slices do the work of the whole, and no kernel's rule for causal masks that are not square
matters. The two are merged by their log-sum-exps (`parallel.block_attention`).

Letters: N batch, H query heads, K key/value heads (a divisor of H), S queries, T keys, R rows of a
slice, E head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from interlace.parallel.block_attention import attend, attend_backward


class _Block(NamedTuple):
    """Keys [start, stop); `causal` if it is the square block on the diagonal."""

    start: int
    stop: int
    causal: bool


def _blocks(start: int, stop: int, keys: int, *, causal: bool) -> list[_Block]:
    """The blocks of keys that queries [start, stop) see."""
    if not causal:
        return [_Block(0, keys, False)]
    diagonal = _Block(start, stop, True)
    return [diagonal, _Block(0, start, False)] if start else [diagonal]


def attend_rows(
    q_NHSE: Tensor, k_NKTE: Tensor, v_NKTE: Tensor, start: int, stop: int, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """(output [N, H, R, E], log-sum-exp [N, H, R]) of the queries [start, stop), R = stop - start.

    Scores are scaled by 1 / sqrt(E). With `causal`, S = T and query i sees keys 0..i.
    """
    return _attend(q_NHSE[:, :, start:stop], k_NKTE, v_NKTE, start, causal=causal)


def _attend(
    rows: Tensor, k: Tensor, v: Tensor, start: int, *, causal: bool
) -> tuple[Tensor, Tensor]:
    (first, *others) = _blocks(start, start + rows.shape[2], k.shape[2], causal=causal)
    out, lse = _attend_block(rows, k, v, first)
    for block in others:
        other, other_lse = _attend_block(rows, k, v, block)
        share = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        out = torch.lerp(out.to(lse.dtype), other.to(lse.dtype), share).to(rows.dtype)
        lse = torch.logaddexp(lse, other_lse)
    return out, lse


def _attend_block(rows: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    keys = slice(block.start, block.stop)
    return attend(rows, k[:, :, keys], v[:, :, keys], causal=block.causal)


def attend_rows_backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    grad_NHRE: Tensor,
    out_NHRE: Tensor,
    lse_NHR: Tensor,
    start: int,
    *,
    causal: bool,
    dk_NKTE: Tensor,
    dv_NKTE: Tensor,
) -> Tensor:
    """The gradient [N, H, R, E] of the queries from row `start` on; their share of the gradients
    of keys and values is added to `dk_NKTE` and `dv_NKTE`, which may be of a wider type.

    `grad_NHRE`, `out_NHRE` and `lse_NHR` belong to these rows, over all keys that they see.
    """
    q_NHSE, k_NKTE, v_NKTE = qkv
    stop = start + grad_NHRE.shape[2]
    rows = q_NHSE[:, :, start:stop]
    total: Tensor | None = None
    for block in _blocks(start, stop, k_NKTE.shape[2], causal=causal):
        keys = slice(block.start, block.stop)
        block_qkv = (rows, k_NKTE[:, :, keys], v_NKTE[:, :, keys])
        dq, dk, dv = attend_backward(block_qkv, grad_NHRE, out_NHRE, lse_NHR, causal=block.causal)
        dk_NKTE[:, :, keys].add_(dk)
        dv_NKTE[:, :, keys].add_(dv)
        total = dq if total is None else total + dq
    assert total is not None
    return total


@torch.library.custom_op("interlace::attention_rows", mutates_args=())
def attention_rows(
    query: Tensor, key: Tensor, value: Tensor, start: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of the queries [N, H, R, E] from row `start` on, as an operator of a graph.

    Keys and values are all that there are: where the rows lie is a number and not a shape, so that
    the operator has the same shapes on all ranks, which compute other rows."""
    return _attend(query, key, value, start, causal=is_causal)


@attention_rows.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, start: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=wide)


OPERATOR = torch.ops.interlace.attention_rows.default
"""What graphs call."""
