"""Decomposed functions of one rank against one process that computes what all ranks would.

Every rank makes the inputs of all ranks from one seed; the process runs plain eager autograd on
them in float64. A check returns its largest error as a multiple of the bound.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.decompose import (
    gather_matmul,
    matmul_reduce,
    matmul_scatter,
    scatter_gradient,
    ulysses_attention,
)
from interlace.decompose.order import VARIANTS

RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest error over largest value; float32 stands for sums of up to a few hundred terms."""


@dataclass(frozen=True)
class Case:
    variant: str
    pieces: int
    rows: tuple[int, ...]
    inner: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    scrambled: bool = False
    """Inputs, weights and gradients that are not contiguous."""

    def __str__(self) -> str:
        kind = f"{self.variant} pieces {self.pieces} rows {self.rows} {self.inner} {self.dtype}"
        return f"{kind} scrambled" if self.scrambled else kind

    @property
    def given_rows(self) -> tuple[int, ...] | None:
        """None where ranks have as many: the default must do."""
        return self.rows if len(set(self.rows)) > 1 else None


def cases(ranks: int) -> Iterator[Case]:
    even, uneven = (4,) * ranks, (5, 0, *range(1, 7))[:ranks]
    for variant, pieces in itertools.product(VARIANTS, (1, 3)):
        yield Case(variant, pieces, even)
        yield Case(variant, pieces, uneven, scrambled=True)
    for variant in VARIANTS:
        yield Case(variant, 2, uneven, (3, 2), torch.float32)


class Maker:
    """Random tensors, equal on all ranks."""

    def __init__(self, case: Case) -> None:
        self._draw = torch.Generator().manual_seed(len(str(case)))
        self._case = case

    def __call__(self, *shape: int) -> Tensor:
        made = torch.randn(shape, generator=self._draw, dtype=torch.float64).to(self._case.dtype)
        return made.transpose(0, -1).contiguous().transpose(0, -1) if self._case.scrambled else made


def leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy that takes gradients, with the strides of `x`."""
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def over_bound(found: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest value, over the bound of the dtype."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    found, expected = found.detach(), expected.detach().double()
    error = (found.double() - expected).abs().max() / expected.abs().max()
    return float(error) / RELATIVE[found.dtype]


def check_gather(case: Case, rank: int, weights: int, *, keep: bool) -> float:
    """gather_matmul with several weights: results, dX and all dW."""
    make, ranks = Maker(case), len(case.rows)
    xs = [make(rows, *case.inner, 6) for rows in case.rows]
    widths = (5, 3, 4)[:weights]
    ws = [[make(width, 6) for width in widths] for _ in range(ranks)]
    grads = [[make(sum(case.rows), *case.inner, width) for width in widths] for _ in range(ranks)]

    plain_xs = [leaf(x, torch.float64) for x in xs]
    plain_ws = [[leaf(w, torch.float64) for w in of_rank] for of_rank in ws]
    gathered = torch.cat(plain_xs)
    expected = [[gathered @ w.t() for w in of_rank] for of_rank in plain_ws]
    plain_outs = [out for of_rank in expected for out in of_rank]
    torch.autograd.backward(plain_outs, [g.double() for of_rank in grads for g in of_rank])

    x, mine = leaf(xs[rank]), [leaf(w) for w in ws[rank]]
    found = gather_matmul(
        x,
        mine if weights > 1 else mine[0],
        variant=case.variant,
        pieces=case.pieces,
        rows_per_rank=case.given_rows,
        keep_gathered=keep,
    )
    outs = found if isinstance(found, list) else [found]
    torch.autograd.backward(outs, grads[rank])
    errors = [over_bound(a, b) for a, b in zip(outs, expected[rank], strict=True)]
    errors += [over_bound(a.grad, b.grad) for a, b in zip(mine, plain_ws[rank], strict=True)]
    return max(*errors, over_bound(x.grad, plain_xs[rank].grad))


def check_scatter(case: Case, rank: int) -> float:
    """matmul_scatter: results, dX and dW; and the result against the collective."""
    make, ranks = Maker(case), len(case.rows)
    xs = [make(sum(case.rows), *case.inner, 6) for _ in range(ranks)]
    ws = [make(5, 6) for _ in range(ranks)]
    grads = [make(rows, *case.inner, 5) for rows in case.rows]

    plain_xs, plain_ws = [[leaf(x, torch.float64) for x in made] for made in (xs, ws)]
    total = torch.stack([x @ w.t() for x, w in zip(plain_xs, plain_ws, strict=True)]).sum(0)
    total.backward(torch.cat(grads).double())

    x, w = leaf(xs[rank]), leaf(ws[rank])
    options = {"variant": case.variant, "pieces": case.pieces}
    found = matmul_scatter(x, w, rows_per_rank=case.given_rows, **options)
    found.backward(grads[rank])
    reduced = (xs[rank] @ ws[rank].t()).contiguous()
    dist.all_reduce(reduced)
    mine = slice(sum(case.rows[:rank]), sum(case.rows[: rank + 1]))
    return max(
        over_bound(found, total[mine]),
        over_bound(found, reduced[mine]),
        over_bound(x.grad, plain_xs[rank].grad),
        over_bound(w.grad, plain_ws[rank].grad),
    )


def check_reduce(case: Case, rank: int) -> float:
    """matmul_reduce, whose output and its gradient are the same on all ranks."""
    make, ranks = Maker(case), len(case.rows)
    xs = [make(sum(case.rows), *case.inner, 6) for _ in range(ranks)]
    ws = [make(5, 6) for _ in range(ranks)]
    grad = make(sum(case.rows), *case.inner, 5)
    plain_xs, plain_ws = [[leaf(x, torch.float64) for x in made] for made in (xs, ws)]
    total = torch.stack([x @ w.t() for x, w in zip(plain_xs, plain_ws, strict=True)]).sum(0)
    total.backward(grad.double())

    x, w = leaf(xs[rank]), leaf(ws[rank])
    found = matmul_reduce(x, w, variant=case.variant, pieces=case.pieces)
    found.backward(grad)
    everyone = [torch.empty_like(found) for _ in range(ranks)]
    dist.all_gather(everyone, found.detach())
    assert all(torch.equal(other, found) for other in everyone), "ranks got different bits"
    return max(
        over_bound(found, total),
        over_bound(x.grad, plain_xs[rank].grad),
        over_bound(w.grad, plain_ws[rank].grad),
    )


def check_gradient(case: Case, rank: int) -> float:
    """scatter_gradient: this rank's rows of the sum of all weight gradients."""
    make, ranks = Maker(case), len(case.rows)
    dys = [make(3, *case.inner, sum(case.rows)) for _ in range(ranks)]
    xs = [make(3, *case.inner, 6) for _ in range(ranks)]
    pairs = [
        (dy.double().flatten(0, -2), x.double().flatten(0, -2))
        for dy, x in zip(dys, xs, strict=True)
    ]
    total = torch.stack([dy.t() @ x for dy, x in pairs]).sum(0)
    found = scatter_gradient(
        dys[rank],
        xs[rank],
        variant=case.variant,
        pieces=case.pieces,
        rows_per_rank=case.given_rows,
    )
    return over_bound(found, total[sum(case.rows[:rank]) : sum(case.rows[: rank + 1])])


def check_ulysses(case: Case, rank: int, *, causal: bool) -> float:
    """ulysses_attention with grouped queries: result and gradients."""
    make, ranks = Maker(case), len(case.rows)
    heads = (2 * ranks, ranks, ranks)
    parts = [[make(rows, 2, count, 8) for count in heads] for rows in case.rows]
    grads = [make(rows, 2, 2 * ranks, 8) for rows in case.rows]
    plain = [[leaf(x, torch.float64) for x in part] for part in parts]
    q, k, v = (torch.cat(x).permute(1, 2, 0, 3) for x in zip(*plain, strict=True))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=causal
    ).permute(2, 0, 1, 3)
    out.backward(torch.cat(grads).double())

    mine = [leaf(x) for x in parts[rank]]
    found = ulysses_attention(
        *mine, causal=causal, pieces=case.pieces, rows_per_rank=case.given_rows
    )
    found.backward(grads[rank])
    start = sum(case.rows[:rank])
    errors = [over_bound(a.grad, b.grad) for a, b in zip(mine, plain[rank], strict=True)]
    return max(*errors, over_bound(found, out[start : start + case.rows[rank]]))
