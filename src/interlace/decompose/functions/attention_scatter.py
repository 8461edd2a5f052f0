"""Query-split attention: attention, output projection and reduce-scatter as one.

Rows of queries are computed slice by slice, and each slice is projected and sent while the next one
is computed, the own slice last (CommFuse, arXiv 2604.24013, algorithm 4). Keys and values are those
of the whole sequence and of this rank's heads.

With a causal mask slice j of N does 2 j + 1 of N^2 parts of the work. Every rank computes every
slice, so ranks have equal work without zig-zag, which would also put a part of another rank's slice
last; what is unequal are the steps. The order of the ring takes that well: a partial sum comes from
a rank that visits the same slices one step ahead, so that a rank waits only by as much as a
transfer takes longer than its first slice. Of the time above that of all compute, more pieces hide
most, as they leave earlier. With `direct` ranks wait for others that are at longer slices.
Computed for N = 4 and transfers of 0.8 of a mean slice, attention alone, relative to the compute:
ring 1.15, 1.06 and 1.01 with 1, 2 and 4 pieces; direct 1.39, 1.29 and 1.24.

Letters: S sequence, R rows of a slice, B micro-batch, H query heads, K key/value heads (a divisor
of H), E head size, D outputs.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from interlace.decompose.attention_rows import attend_rows, attend_rows_backward
from interlace.decompose.functions.arguments import check_alike, scatter_order
from interlace.decompose.functions.loops import gather_slices, scatter_slices
from interlace.decompose.functions.weight_gradient import GradientSum
from interlace.decompose.order import Order, RowPart
from interlace.errors import InputError


def query_split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    variant: str = "ring",
    pieces: int = 1,
    causal: bool = True,
) -> Tensor:
    """Attention of q [S, B, H, E] to k and v [S, B, K, E], projected by out_weight [D, H E] and
    summed over ranks: this rank's [S / N, B, D]. Scores are scaled by 1 / sqrt(E).

    `variant` and `pieces` are those of `matmul_scatter`. Without `causal` k and v may have another
    length. Backward gathers the gradient, own slice first, and computes each slice's share of all
    gradients as it arrives; kept for it are q, k, v, the attention's output and its log-sum-exp.
    Memory beyond that: two to three slices of the result. Raises InputError.
    """
    _check(q, k, v, out_weight, causal=causal)
    order = scatter_order(q.shape[0], 1, group, variant, pieces, None)
    found = _QuerySplit.apply(q, k, v, out_weight, order, group, causal)
    return cast("Tensor", found)


def _check(q: Tensor, k: Tensor, v: Tensor, out_weight: Tensor, *, causal: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise InputError(
            f"{shapes} are not [sequence, batch, heads, head size]",
            hint="k and v have the shape of q, but for the number of heads",
        )
    if q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise InputError(
            f"{shapes} do not fit each other",
            hint="batch and head size are equal, and the heads of k divide those of q",
        )
    if causal and q.shape[0] != k.shape[0]:
        raise InputError(
            f"a causal mask needs as many keys as queries, not {k.shape[0]} and {q.shape[0]}",
            hint="set causal to False, or pass the whole sequence's keys",
        )
    if out_weight.dim() != 2 or out_weight.shape[1] != q.shape[2] * q.shape[3]:
        raise InputError(
            f"out_weight {tuple(out_weight.shape)} cannot take {q.shape[2]} heads of size "
            f"{q.shape[3]}",
            hint="it has the layout of torch.nn.Linear, [out, heads * head size]",
        )
    check_alike(q, k, v, out_weight)


class _QuerySplit(Function):
    """`mixed` [S, B, H, E] is the attention's output, `lse` [B, H, S] its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out_weight: Tensor,
        order: Order,
        group: dist.ProcessGroup | None,
        causal: bool,
    ) -> Tensor:
        length, batch, heads, _ = q.shape
        mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_empty((batch, heads, length), dtype=wide)
        q, k, v = (_with_dense_heads(x) for x in (q, k, v))
        qkv = (_heads_first(q), _heads_first(k), _heads_first(v))

        def compute(part: RowPart, out: Tensor) -> None:
            rows, rows_lse = attend_rows(*qkv, part.start, part.stop, causal=causal)
            place = mixed[part.start : part.stop]
            place.copy_(_sequence_first(rows))
            lse[:, :, part.start : part.stop].copy_(rows_lse)
            torch.mm(place.view(-1, out_weight.shape[1]), out_weight.t(), out=out.flatten(0, 1))

        result = q.new_empty((order.own.rows, batch, out_weight.shape[0]))
        scatter_slices(result, order, group, compute)
        ctx.save_for_backward(q, k, v, out_weight, mixed, lse)
        ctx.way = (order, group, causal)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out_weight, mixed, lse = ctx.saved_tensors
        order, group, causal = ctx.way
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (_heads_first(torch.zeros_like(x, dtype=lse.dtype)) for x in (k, v))
        of_weight = GradientSum(out_weight) if ctx.needs_input_grad[3] else None
        qkv = (_heads_first(q), _heads_first(k), _heads_first(v))

        def compute(part: RowPart, values: Tensor) -> None:
            arrived, rows = values.flatten(0, 1), slice(part.start, part.stop)
            d_mixed = (arrived @ out_weight).view(part.rows, *q.shape[1:])
            of_rows = attend_rows_backward(
                qkv,
                _heads_first(d_mixed),
                _heads_first(mixed[rows]),
                lse[:, :, rows],
                part.start,
                causal=causal,
                dk_NKTE=dk,
                dv_NKTE=dv,
            )
            dq[rows].copy_(_sequence_first(of_rows))
            if of_weight is not None:
                of_weight.add(arrived, mixed[rows].view(-1, out_weight.shape[1]))

        gather_slices(gradient.contiguous(), order, group, compute)
        of_kv = (_sequence_first(x).to(k.dtype) for x in (dk, dv))
        return dq, *of_kv, of_weight.total() if of_weight is not None else None, None, None, None


def _with_dense_heads(x_SBHE: Tensor) -> Tensor:
    """Attention kernels read a head's elements at stride 1, whatever their stride is."""
    return x_SBHE if x_SBHE.stride(-1) == 1 else x_SBHE.contiguous()


def _heads_first(x_SBHE: Tensor) -> Tensor:
    return x_SBHE.permute(1, 2, 0, 3)


def _sequence_first(x_BHSE: Tensor) -> Tensor:
    return x_BHSE.permute(2, 0, 1, 3)
