"""Ring attention: keys and values travel past all queries (arXiv 2310.01889).

The sequence is cut into 2 n chunks for n ranks, and rank r holds chunks r and 2n - 1 - r, so that
causal work is equal (zig-zag). Its *halves* 0 and 1 are these chunks. In step 0 a rank attends to
its own keys. In step i it holds the keys of rank s = r - i (mod n). Of the four pairs of a query
half and a key half two are needed, and one of the two is the same for every rank:

    s < r    (query 0, key 0) and (query 1, key 0)
    s > r    (query 1, key 1) and (query 1, key 0)

The one that differs is *selected* by indices that are data, so that all ranks run one program on
equal shapes.

A backward takes the steps in reverse. It begins with the keys that came last, which are all that a
forward keeps, and keys go back the way that they came, so that a rank's own arrive for the last
block. The gradients of a block's keys and values go straight to their owner, which adds them up.
So the last of them travel beside the block of a rank's own keys, and no message is left alone.

Letters: S sequence (a rank's part), B micro-batch, H query heads, K key/value heads, E head size,
C = S / 2 (a half), Q = C * H / K: all queries of a half that share a key/value head. They see
the same keys, so they are one longer sequence and keys are never repeated.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from interlace.parallel.block_attention import attend, attend_backward
from interlace.parallel.in_graph import in_graph

_functional = torch.ops._c10d_functional
_SELECTED, _COMMON = 0, 1  # the two pairs of a step, in the order in which they are stacked
_NOTHING = -1e30  # log-sum-exp over no keys: finite, so that differences of two are numbers


class RingAttention(nn.Module):
    """Takes the place of `CausalAttention` on a rank that holds two zig-zag chunks."""

    early: Tensor
    """[n - 1], per step: whether the keys come from a lower rank."""
    foreign: Tensor
    """[n - 1, 2], per step: whether the pair at place p is of another query half than p."""
    query_halves: Tensor
    """[n - 1, 2], per step: the query half of each pair."""
    key_halves: Tensor
    """[n - 1, 2], per step: the key half of each pair."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__()
        self.group = mesh.get_group().group_name
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        early = torch.tensor([step <= self.rank for step in range(1, self.ranks)], device=device)
        selected = (~early).long()
        ones, zeros = torch.ones_like(selected), torch.zeros_like(selected)
        foreign = torch.stack((~early, torch.zeros_like(early)), 1)
        self.register_buffer("early", early, persistent=False)
        self.register_buffer("foreign", foreign, persistent=False)
        self.register_buffer("query_halves", torch.stack((selected, ones), 1), persistent=False)
        self.register_buffer("key_halves", torch.stack((selected, zeros), 1), persistent=False)

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
        """Each query attends to the keys of all ranks at or before its position.
        Returns [S, B, H, E]."""
        where = (self.early, self.foreign, self.query_halves, self.key_halves)
        return _ring(q_SBHE, k_SBKE, v_SBKE, *where, self.group, self.ranks, self.rank)


@in_graph
def _ring(*args: Any) -> Tensor:
    return _Ring.apply(*args)


class _Ring(Function):
    """Both passes in aten operators and functional collectives, so that both can be traced.

    Saved are q, the output, the log-sum-exp, and the keys and values that came last, which take as
    much as a rank's own. What the selected pair of a late step adds to query half 1 is summed apart
    and joined at the end.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_SBHE: Tensor,
        k_SBKE: Tensor,
        v_SBKE: Tensor,
        early: Tensor,
        foreign: Tensor,
        query_halves: Tensor,
        key_halves: Tensor,
        group: str,
        ranks: int,
        rank: int,
    ) -> Tensor:
        kv_heads = k_SBKE.shape[2]
        kv = _keys_and_values(k_SBKE, v_SBKE)
        arriving = _send(kv, 1, group, ranks, rank)
        out_BHSE, lse_BHS = attend(
            _heads_first(q_SBHE), _heads_first(k_SBKE), _heads_first(v_SBKE), causal=True
        )
        out = _fold(_sequence_first(out_BHSE), kv_heads).to(lse_BHS.dtype)
        lse, q = _fold_lse(lse_BHS, kv_heads), _fold(q_SBHE, kv_heads)
        late: tuple[Tensor, Tensor] | None = None
        for step in range(ranks - 1):
            kv = _functional.wait_tensor(arriving)
            if step < ranks - 2:
                arriving = _send(kv, 1, group, ranks, rank)
            pair = attend(*_pair(q, kv, query_halves[step], key_halves[step]), causal=False)
            pair_out, pair_lse = (x.unflatten(0, (2, -1)) for x in pair)
            pair_out = pair_out.to(out.dtype)
            if_late = pair_lse[_SELECTED].masked_fill(early[step], _NOTHING)
            found = (pair_out[_SELECTED], if_late)
            late = _merge(*late, *found) if late is not None else found
            if_own = pair_lse.masked_fill(foreign[step].view(2, 1, 1, 1), _NOTHING)
            out, lse = _merge(out, lse, pair_out, if_own)
        assert late is not None
        second_out, second_lse = _merge(out[1], lse[1], *late)
        out_SBHE = _unfold(torch.stack((out[0], second_out)).to(q.dtype), q_SBHE.shape)
        lse = torch.stack((lse[0], second_lse))
        where = (early, foreign, query_halves, key_halves)
        ctx.save_for_backward(q_SBHE, kv, out_SBHE, lse, *where)
        ctx.ring = (group, ranks, rank, k_SBKE.shape)
        return out_SBHE

    @staticmethod
    def backward(ctx: Any, grad_SBHE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_SBHE, kv, out_SBHE, lse, *where = ctx.saved_tensors
        early, foreign, query_halves, key_halves = where
        group, ranks, rank, keys_shape = ctx.ring
        grad, q, out = (_fold(x, keys_shape[2]) for x in (grad_SBHE, q_SBHE, out_SBHE))
        dq: Tensor | None = None
        late: Tensor | None = None
        dkv: Tensor | None = None
        returning: Tensor | None = None
        for step in reversed(range(ranks - 1)):
            arriving = _send(kv, -1, group, ranks, rank)
            pair = _pair(q, kv, query_halves[step], key_halves[step])
            known = (_pick(x, query_halves[step]) for x in (grad, out, lse))
            of_pair = attend_backward(pair, *known, causal=False)
            pair_dq, pair_dk, pair_dv = (x.unflatten(0, (2, -1)) for x in of_pair)
            if returning is not None:
                dkv = _added(dkv, _functional.wait_tensor(returning), lse.dtype)
            back = _by_key_half(torch.stack((pair_dk, pair_dv)), early[step], foreign[step, 0])
            returning = _send(back, -(step + 1), group, ranks, rank)
            late = _added(late, pair_dq[_SELECTED].masked_fill(early[step], 0), lse.dtype)
            if_own = pair_dq.masked_fill(foreign[step].view(2, 1, 1, 1, 1), 0)
            dq = _added(dq, if_own, lse.dtype)
            kv = _functional.wait_tensor(arriving)
        of_own = attend_backward(
            (_heads_first(q_SBHE), _halves_joined(kv[0]), _halves_joined(kv[1])),
            _heads_first(grad_SBHE),
            _heads_first(out_SBHE),
            _unfold_lse(lse, q_SBHE.shape),
            causal=True,
        )
        own_dq, own_dk, own_dv = (_sequence_first(x) for x in of_own)
        assert dq is not None
        assert late is not None
        assert returning is not None
        dkv = _added(dkv, _functional.wait_tensor(returning), lse.dtype)
        dkv = (dkv + _keys_and_values(own_dk, own_dv)).to(kv.dtype)
        dq = torch.stack((dq[0], dq[1] + late)) + _fold(own_dq, keys_shape[2])
        of_keys = (_unfold(dkv[place], keys_shape) for place in range(2))
        nothing = (None,) * 7  # the indices, the group and the two numbers have no gradients
        return _unfold(dq.to(q.dtype), q_SBHE.shape), *of_keys, *nothing


def _added(total: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if total is None else total + x


def _send(x: Tensor, distance: int, group: str, ranks: int, rank: int) -> Tensor:
    """Starts sending `x` to the rank `distance` above, and receiving as much from as far below."""
    to, source = [0] * ranks, [0] * ranks
    to[(rank + distance) % ranks] = x.shape[0]
    source[(rank - distance) % ranks] = x.shape[0]
    return _functional.all_to_all_single(x, source, to, group)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys together, from that over each."""
    share = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    return torch.lerp(out, other, share), torch.logaddexp(lse, other_lse)


def _by_key_half(pairs: Tensor, early: Tensor, late: Tensor) -> Tensor:
    """Gradients of keys and values of two pairs [2, 2, ...], as those of key halves 0 and 1."""
    selected, common = pairs[:, _SELECTED], pairs[:, _COMMON]
    halves = (common + selected.masked_fill(late, 0), selected.masked_fill(early, 0))
    return torch.stack(halves, 1)


def _pair(
    q: Tensor, kv: Tensor, query_halves: Tensor, key_halves: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of both pairs, [2 B, K, ...]."""
    return _pick(q, query_halves), _pick(kv[0], key_halves), _pick(kv[1], key_halves)


def _pick(x: Tensor, halves: Tensor) -> Tensor:
    """[2, B, ...] -> those halves, [2 B, ...]."""
    return x.index_select(0, halves).flatten(0, 1)


def _heads_first(x_SBHE: Tensor) -> Tensor:
    return x_SBHE.permute(1, 2, 0, 3)


def _sequence_first(x_BHSE: Tensor) -> Tensor:
    return x_BHSE.permute(2, 0, 1, 3)


def _keys_and_values(k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
    """What travels: [2 (keys, values), 2 (halves), B, K, C, E], contiguous."""
    halves = [x.unflatten(0, (2, -1)).permute(0, 2, 3, 1, 4) for x in (k_SBKE, v_SBKE)]
    return torch.stack(halves)


# Kernels return strides that their traced shapes do not promise, so copies are asked for by
# `clone`, which is traced even where the promised strides would need none.


def _halves_joined(x: Tensor) -> Tensor:
    """What travels of keys or of values, [2, B, K, C, E] -> [B, K, S, E], contiguous."""
    return x.permute(1, 2, 0, 3, 4).clone(memory_format=torch.contiguous_format).flatten(2, 3)


def _fold(x_SBHE: Tensor, kv_heads: int) -> Tensor:
    """[S, B, H, E] -> [2, B, K, Q, E], contiguous."""
    x = x_SBHE.unflatten(2, (kv_heads, -1)).unflatten(0, (2, -1))
    return x.permute(0, 2, 3, 4, 1, 5).clone(memory_format=torch.contiguous_format).flatten(3, 4)


def _unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """[2, B, K, Q, E] -> [S, B, H, E], contiguous."""
    x = x.unflatten(3, (shape[2] // x.shape[2], -1)).permute(0, 4, 1, 2, 3, 5)
    return x.clone(memory_format=torch.contiguous_format).view(shape)


def _fold_lse(lse_BHS: Tensor, kv_heads: int) -> Tensor:
    """[B, H, S] -> [2, B, K, Q], contiguous."""
    lse = lse_BHS.unflatten(2, (2, -1)).unflatten(1, (kv_heads, -1)).permute(3, 0, 1, 2, 4)
    return lse.clone(memory_format=torch.contiguous_format).flatten(3, 4)


def _unfold_lse(lse: Tensor, shape: torch.Size) -> Tensor:
    """[2, B, K, Q] -> [B, H, S], contiguous, for queries of `shape` [S, B, H, E]."""
    lse = lse.unflatten(3, (shape[2] // lse.shape[2], -1)).permute(1, 2, 3, 0, 4)
    return lse.clone(memory_format=torch.contiguous_format).view(shape[1], shape[2], shape[0])
