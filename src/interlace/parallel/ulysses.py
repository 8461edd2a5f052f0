"""Ulysses: ranks that share a sequence trade it for heads around attention (arXiv 2309.14509).

Outside attention a rank holds a part of the sequence and all heads, inside all of the sequence and
a part of the heads. Each rank sends another rank what that one lacks, in one all-to-all.

Letters: S sequence (a rank's part), L = n S the whole of it on n ranks, B micro-batch, H query
heads, K key/value heads, E head size.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError
from interlace.parallel.in_graph import in_graph

_functional = torch.ops._c10d_functional


class UlyssesAttention(nn.Module):
    """Runs `core`, attention over a whole sequence, on a share of the heads."""

    def __init__(self, core: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.core = core
        self.group, self.ranks = mesh.get_group().group_name, mesh.size()

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
        """Returns [S, B, H, E]. Raises InputError unless the ranks divide the query heads."""
        heads, kv_heads = q_SBHE.shape[2], k_SBKE.shape[2]
        copies = kv_copies(heads, kv_heads, self.ranks)
        q_LBHE = self._exchange(self._by_rank(q_SBHE))
        kv = [self._by_rank(_repeat_heads(x, copies)) for x in (k_SBKE, v_SBKE)]
        k_LBKE, v_LBKE = self._exchange(torch.cat(kv, dim=3)).chunk(2, dim=2)
        out_LBHE = self.core(q_LBHE, k_LBKE, v_LBKE)
        out = self._exchange(out_LBHE.unflatten(0, (self.ranks, -1)))
        return out.unflatten(0, (self.ranks, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _by_rank(self, x_SBHE: Tensor) -> Tensor:
        """[S, B, H, E] -> [n, S, B, H / n, E]: what each rank will get, still as a view."""
        return x_SBHE.unflatten(2, (self.ranks, -1)).permute(2, 0, 1, 3, 4)

    def _exchange(self, x: Tensor) -> Tensor:
        """[n, S, ...], a part for each rank -> [n S, ...], a part from each rank."""
        return _exchange(x.flatten(0, 1), self.group, self.ranks)


@in_graph
def _exchange(x: Tensor, group: str, ranks: int) -> Tensor:
    return _Exchange.apply(x, group, ranks)


class _Exchange(Function):
    """An all-to-all of equal parts; its gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _all_to_all(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _all_to_all(grad, ctx.group, ctx.ranks), None, None


def _all_to_all(x: Tensor, group: str, ranks: int) -> Tensor:
    parts = [x.shape[0] // ranks] * ranks
    out = _functional.all_to_all_single(x.contiguous(), parts, parts, group)
    return _functional.wait_tensor(out)


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often key/value heads must be repeated so that each rank gets the ones of its query
    heads, in equal numbers. 1 if the ranks divide them; never more than query heads per key head.

    Raises InputError unless the ranks divide the query heads.
    """
    if heads % ranks:
        raise InputError(
            f"ulysses cannot divide the {heads} query heads of a rank among "
            f"parallel.context = {ranks} ranks",
            hint="set parallel.context to a divisor, or parallel.context_method to ring",
        )
    group = heads // kv_heads
    return group // math.gcd(group, heads // ranks)


def _repeat_heads(x_SBKE: Tensor, copies: int) -> Tensor:
    if copies == 1:
        return x_SBKE
    length, batch, heads, size = x_SBKE.shape
    copied = x_SBKE.unsqueeze(3).expand(length, batch, heads, copies, size)
    return copied.reshape(length, batch, heads * copies, size)
