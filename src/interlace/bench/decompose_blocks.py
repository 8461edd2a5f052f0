"""MLP and attention blocks shared by the ranks of a group, by every way to do their communication.

Tokens are the rows. A rank has `rows` of them outside a block and all of them inside, with its part
of the block's inner width: all-gather, column-parallel matmul, row-parallel matmul, reduce-scatter.
Letters: n ranks, R rows of a rank, D width of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from interlace.bench.decompose_shapes import COMPUTE, QUERY_SPLIT, SLICES, VANILLA, VARIANTS, Shape
from interlace.decompose.functions.attention_scatter import query_split_attention
from interlace.decompose.functions.column_parallel import gather_matmul
from interlace.decompose.functions.row_parallel import matmul_scatter
from interlace.decompose.functions.sliced_matmul import sliced_gather_matmul, sliced_matmul_scatter
from interlace.graphs import collectives


def build_block(shape: Shape, group: dist.ProcessGroup) -> "TimedBlock":
    """This rank's part, with random weights; x is the same on every way."""
    return {"mlp": Mlp, "attention": AttentionBlock}[shape.block](shape, group)


GroupExchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


class TimedBlock(ABC):
    """What both blocks share. `shape.width` is D; weights are [outputs, inputs]."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        self.shape = shape
        self.group = group
        self.ranks = group.size()
        draw = torch.Generator().manual_seed(7)  # all ranks draw the same rows
        size = (self.ranks * shape.rows, shape.width)
        self.all_rows = torch.randn(size, generator=draw).requires_grad_()
        self.all_gradients = torch.randn(size, generator=draw)
        self.own = slice(group.rank() * shape.rows, (group.rank() + 1) * shape.rows)
        self.x = self.all_rows.detach()[self.own].clone().requires_grad_()
        self.draw = draw.manual_seed(group.rank())
        self.weights: list[Tensor] = []

    def weight(self, inputs: int, outputs: int) -> Tensor:
        """A new leaf of [outputs, inputs]."""
        made = torch.randn((outputs, inputs), generator=self.draw).mul_(inputs**-0.5)
        self.weights.append(made.requires_grad_())
        return made

    @abstractmethod
    def forward(self, way: str) -> Tensor:
        """[R, D]; of COMPUTE [n R, D], the own part of the sum over ranks."""

    @abstractmethod
    def parts(self) -> dict[str, Callable[[], Tensor]]:
        """Calls that compute one slice of each site."""

    def step(self, way: str, *, backward: bool) -> Tensor:
        """Forward and, with `backward`, gradients of x and of the weights; returns the output."""
        with torch.set_grad_enabled(backward):
            out = self.forward(way)
        if backward:
            whole = way == COMPUTE
            out.backward(self.all_gradients if whole else self.all_gradients[self.own])
        return out.detach()

    def take_gradients(self, way: str) -> list[Tensor | None]:
        """The gradients of the last step, x first, which are then forgotten."""
        leaves = [self.all_rows if way == COMPUTE else self.x, *self.weights]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    def gather(self, way: str, weights: list[Tensor]) -> list[Tensor]:
        """All rows times each weight, [n R, ...]."""
        if way == COMPUTE:
            return [self.all_rows @ weight.t() for weight in weights]
        if way == VANILLA:
            rows = cast("Tensor", _Collective.apply(self.x, self.group, _gathered, _scattered))
            return [rows @ weight.t() for weight in weights]
        if way in SLICES:
            found = sliced_gather_matmul(
                self.x, weights, self.group, slices=SLICES[way], exchange="all_to_all"
            )
        else:
            variant = way if way in VARIANTS else "ring"
            found = gather_matmul(self.x, weights, self.group, variant=variant)
        return cast("list[Tensor]", found)

    def scatter(self, way: str, x: Tensor, weight: Tensor) -> Tensor:
        """x [n R, ...] times weight, summed over ranks: the own [R, D]."""
        if way == COMPUTE:
            return x @ weight.t()
        if way == VANILLA:
            return cast(
                "Tensor", _Collective.apply(x @ weight.t(), self.group, _scattered, _gathered)
            )
        if way in SLICES:
            return sliced_matmul_scatter(
                x, weight, self.group, slices=SLICES[way], exchange="all_to_all"
            )
        return matmul_scatter(x, weight, self.group, variant=way)


class Mlp(TimedBlock):
    """Two matmuls with GELU between them; in CommFuse tables 1 and 3 the inner width is 4 D."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        super().__init__(shape, group)
        inner = shape.inner * shape.width // self.ranks
        self.up, self.down = self.weight(shape.width, inner), self.weight(inner, shape.width)

    def forward(self, way: str) -> Tensor:
        """As of `TimedBlock`."""
        (inner,) = self.gather(way, [self.up])
        return self.scatter(way, F.gelu(inner), self.down)

    def parts(self) -> dict[str, Callable[[], Tensor]]:
        """As of `TimedBlock`."""
        inner = torch.zeros(self.shape.rows, self.down.shape[1])
        return {
            "gather": partial(torch.mm, self.x.detach(), self.up.detach().t()),
            "scatter": partial(torch.mm, inner, self.down.detach().t()),
        }


class AttentionBlock(TimedBlock):
    """One sequence of all rows, as many key/value heads as query heads (table 4)."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup) -> None:
        super().__init__(shape, group)
        inner = shape.width // self.ranks
        self.projections = [self.weight(shape.width, inner) for _ in "qkv"]
        self.out = self.weight(inner, shape.width)

    def forward(self, way: str) -> Tensor:
        """As of `TimedBlock`."""
        q, k, v = map(self.heads, self.gather(way, self.projections))
        causal = self.shape.causal
        if way == QUERY_SPLIT:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))  # a micro-batch of one
            return query_split_attention(q, k, v, self.out, self.group, causal=causal).squeeze(1)
        return self.scatter(way, attend(q, k, v, causal=causal), self.out)

    def heads(self, x: Tensor) -> Tensor:
        """[n R, heads * size] -> [n R, heads, size]."""
        return x.view(x.shape[0], -1, self.shape.head_size)

    def parts(self) -> dict[str, Callable[[], Tensor]]:
        """As of `TimedBlock`; `attention` is that of all rows."""
        x, weights = self.x.detach(), [weight.detach().t() for weight in self.projections]
        inner = torch.zeros(self.ranks * self.shape.rows, self.out.shape[1])
        heads = self.heads(inner)

        def gather() -> Tensor:
            return [x @ weight for weight in weights][-1]

        return {
            "gather": gather,
            "scatter": partial(torch.mm, inner[: self.shape.rows], self.out.detach().t()),
            "attention": partial(attend, heads, heads, heads, causal=self.shape.causal),
        }


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of [S, heads, size] -> [S, heads * size]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.squeeze(0).transpose(0, 1).flatten(1)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait(collectives.all_gather(x, group.size(), group.group_name))


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A reduce-scatter of minimal bytes: gloo's own is an all-reduce, of twice as many."""
    rows = x.shape[0] // group.size()
    splits = [rows] * group.size()
    received = collectives.wait(collectives.all_to_all(x, splits, splits, group.group_name))
    return received.view(group.size(), rows, -1).sum(0)


class _Collective(Function):
    """A collective whose gradient is the other one: all-gather and reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, there: GroupExchange, back: GroupExchange
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.back(gradients[0], ctx.group), None, None, None
