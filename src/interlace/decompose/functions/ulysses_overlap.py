"""Ulysses attention whose all-to-alls next to attention run under it.

Outside attention a rank holds some rows of the sequence and all heads, inside all rows and some
heads. Attention runs query slice by query slice; each slice is sent to the rank that owns its rows
while the next one is computed, own slice last (CommFuse, arXiv 2604.24013, algorithm 5). Every
pair of ranks exchanges different data, so slices always go straight to their owner.

Letters: S sequence (a rank's part), L the whole of it, B micro-batch, H query heads, K key/value
heads, E head size, n ranks; h = H / n and k = K / n.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from interlace.decompose.attention_rows import attend_rows, attend_rows_backward
from interlace.decompose.functions.arguments import check_alike, gather_order, rank_and_ranks
from interlace.decompose.functions.exchange import Link, PeerMessage
from interlace.decompose.order import Order, RowPart
from interlace.errors import InputError


def ulysses_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = True,
    pieces: int = 1,
    rows_per_rank: Sequence[int] | None = None,
) -> Tensor:
    """Attention over the sequences of all ranks, joined in rank order: [S, B, H, E]. Scores are
    scaled by 1 / sqrt(E).

    Ranks must divide H and K. They hold equal parts of the sequence, or `rows_per_rank`. A slice
    is one rank's rows, sent in `pieces` parts. The first all-to-all (q, k, v) stays whole, as does
    that of dk and dv at the end of backward: every slice needs all keys.

    Backward gathers the output's gradient slice by slice, own slice first, and sends each slice of
    dq while the next one is computed. Memory beyond what the plain form needs: two slices, in
    backward. Raises InputError.
    """
    _, ranks = rank_and_ranks(group)
    _check(q_SBHE, k_SBKE, v_SBKE, ranks)
    order = gather_order(q_SBHE.shape[0], 1, group, "direct", pieces, rows_per_rank)
    return _Ulysses.apply(q_SBHE, k_SBKE, v_SBKE, order, group, causal)


class _Ulysses(Function):
    """Inside, rows come first, [L, B, h, E], so that slices of rows are contiguous."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBHE: Tensor,
        k_SBKE: Tensor,
        v_SBKE: Tensor,
        order: Order,
        group: dist.ProcessGroup | None,
        causal: bool,
    ) -> Tensor:
        qkv = _to_heads((q_SBHE, k_SBKE, v_SBKE), order, group)
        q, k, v = (_heads_first(x) for x in qkv)
        out_LBhE = torch.empty_like(qkv[0])
        wide = torch.promote_types(q.dtype, torch.float32)
        lse_BhL = q.new_empty((*q.shape[:2], order.total), dtype=wide)
        found = out_LBhE.new_empty((order.ranks, order.own.rows, *out_LBhE.shape[1:]))
        link, last = Link(group), order.ranks - 1
        for step, piece in product(range(order.ranks), range(order.pieces)):
            start, stop = part = order.scattered(step, 0, piece)
            rows = out_LBhE[start:stop]
            if part.rows:
                out, lse_BhL[:, :, start:stop] = attend_rows(q, k, v, start, stop, causal=causal)
                rows.copy_(_rows_first(out))
            if step < last:
                hop = order.hop(step, 0)
                arriving = PeerMessage(_own_rows(found[hop.source], order, piece), hop.source)
                link.start((step, piece), [PeerMessage(rows, hop.to)], [arriving])
            else:
                _own_rows(found[order.rank], order, piece).copy_(rows)
        link.finish()
        ctx.save_for_backward(*qkv, out_LBhE, lse_BhL)
        ctx.order, ctx.group, ctx.causal = order, group, causal
        return _join_heads(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBHE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order: Order = ctx.order
        *qkv, _, _ = ctx.saved_tensors
        wide = torch.promote_types(grad_SBHE.dtype, torch.float32)
        dkv = [torch.zeros_like(_heads_first(x), dtype=wide) for x in qkv[1:]]
        dq_LBhE = torch.empty_like(qkv[0])
        leaving = _by_rank(grad_SBHE, order.ranks)
        arrived = torch.empty_like(leaving)
        link, last = Link(ctx.group), order.ranks - 1
        slice_shape = (order.pieces, order.longest, *dq_LBhE.shape[1:])
        landing = [dq_LBhE.new_empty(slice_shape) for _ in range(min(2, last))]
        for step, piece in product(range(order.ranks), range(order.pieces)):
            part = order.gathered(step, 0, piece)
            if step == 0:
                grad = _own_rows(leaving[order.rank], order, piece)
            else:
                grad = landing[(step - 1) % 2][piece][: part.rows]
                link.received(("grad", step - 1, piece))
            if step < last:
                hop = order.hop(step, 0)
                rows = order.gathered(step + 1, 0, piece).rows
                next_grad = PeerMessage(landing[step % 2][piece][:rows], hop.source)
                mine = PeerMessage(_own_rows(leaving[hop.to], order, piece), hop.to)
                link.start(("grad", step, piece), [mine], [next_grad])
            dq = dq_LBhE[part.start : part.stop]
            if part.rows:
                dq.copy_(_query_gradient(ctx, part, grad, dkv))
            if step == 0:
                _own_rows(arrived[order.rank], order, piece).copy_(dq)
            else:
                hop = order.hop(step - 1, 0)  # brought the slice, whose gradient goes back
                back = PeerMessage(_own_rows(arrived[hop.to], order, piece), hop.to)
                link.start(("dq", step, piece), [PeerMessage(dq, hop.source)], [back])
        dk, dv = _to_rows([_rows_first(x).to(grad_SBHE.dtype) for x in dkv], order, ctx.group)
        link.finish()
        return _join_heads(arrived), dk, dv, None, None, None


def _query_gradient(ctx: Any, part: RowPart, grad_RBhE: Tensor, dkv: Sequence[Tensor]) -> Tensor:
    """The gradient [R, B, h, E] of the queries of `part`; adds to those of keys and values."""
    *qkv, out_LBhE, lse_BhL = ctx.saved_tensors
    q, k, v = (_heads_first(x) for x in qkv)
    dq = attend_rows_backward(
        (q, k, v),
        _heads_first(grad_RBhE),
        _heads_first(out_LBhE[part.start : part.stop]),
        lse_BhL[:, :, part.start : part.stop],
        part.start,
        causal=ctx.causal,
        dk_NKTE=dkv[0],
        dv_NKTE=dkv[1],
    )
    return _rows_first(dq)


def _check(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] + q.shape[3:] != k.shape[:2] + k.shape[3:]:
        raise InputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together",
            hint="pass q [S, B, H, E] and k, v [S, B, K, E]",
        )
    check_alike(q, k, v)
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % ranks or kv_heads % ranks:
        raise InputError(
            f"{ranks} ranks cannot divide {heads} query heads and {kv_heads} key/value heads",
            hint="repeat key/value heads with repeat_interleave(dim=2), or take fewer ranks",
        )
    if heads % kv_heads:
        raise InputError(
            f"{kv_heads} key/value heads cannot be shared equally by {heads} query heads",
            hint="K must be a divisor of H",
        )


def _own_rows(x: Tensor, order: Order, piece: int) -> Tensor:
    """Rows of one piece out of those of this rank's slice."""
    start, stop = order.part(order.rank, piece)
    return x[start - order.own.start : stop - order.own.start]


def _to_heads(
    tensors: Sequence[Tensor], order: Order, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """[S, B, H, E] -> [L, B, h, E] each: all rows of a share of the heads."""
    inputs = [_by_rank(x, order.ranks).flatten(0, 1) for x in tensors]
    equal = [order.own.rows] * order.ranks
    return _all_to_all(inputs, list(order.rows), equal, group)


def _to_rows(
    tensors: Sequence[Tensor], order: Order, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """[L, B, h, E] -> [S, B, H, E] each: this rank's rows of all heads."""
    equal = [order.own.rows] * order.ranks
    inputs = [x.contiguous() for x in tensors]
    found = _all_to_all(inputs, equal, list(order.rows), group)
    return [_join_heads(x.view(order.ranks, order.own.rows, *x.shape[1:])) for x in found]


def _all_to_all(
    inputs: Sequence[Tensor],
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    outputs = [x.new_empty((sum(output_splits), *x.shape[1:])) for x in inputs]
    works = [
        dist.all_to_all_single(out, x, output_splits, input_splits, group=group, async_op=True)
        for out, x in zip(outputs, inputs, strict=True)
    ]
    for work in works:
        cast("dist.Work", work).wait()  # async_op=True gives a work
    return outputs


def _by_rank(x_SBHE: Tensor, ranks: int) -> Tensor:
    """[n, S, B, h, E], contiguous: what each rank gets."""
    return x_SBHE.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()


def _join_heads(x_nSBhE: Tensor) -> Tensor:
    """[S, B, H, E] from what each rank sent."""
    return x_nSBhE.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _heads_first(x_SBHE: Tensor) -> Tensor:
    return x_SBHE.permute(1, 2, 0, 3)


def _rows_first(x_BHSE: Tensor) -> Tensor:
    return x_BHSE.permute(2, 0, 1, 3)
