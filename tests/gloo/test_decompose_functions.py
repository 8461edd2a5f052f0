"""Decomposed collectives as functions: on 2, 3, 4 and 8 ranks against one process.

The children check many cases each (`decompose_checks.py`) and return, by case, the largest error as
a multiple of its bound.
"""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from decompose_checks import (
    Case,
    Maker,
    cases,
    check_gather,
    check_gradient,
    check_reduce,
    check_scatter,
    check_ulysses,
    leaf,
    over_bound,
)
from processes import gloo_group, run_ranks
from torch import Tensor

from interlace.decompose import (
    gather_matmul,
    matmul_reduce,
    matmul_scatter,
    scatter_gradient,
    ulysses_attention,
)
from interlace.decompose.functions.loops import gather_slices
from interlace.decompose.order import VARIANTS, Order
from interlace.errors import InputError

BFLOAT16_U = torch.finfo(torch.bfloat16).eps / 2
Errors = dict[str, float]


def child_exact() -> Errors:
    errors: Errors = {}
    with gloo_group():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for case in cases(ranks):
            errors[f"gather {case}"] = check_gather(case, rank, 3, keep=True)
            errors[f"gather again {case}"] = check_gather(case, rank, 1, keep=False)
            errors[f"scatter {case}"] = check_scatter(case, rank)
            errors[f"reduce {case}"] = check_reduce(case, rank)
            errors[f"gradient {case}"] = check_gradient(case, rank)
            if case.variant == "direct":
                for causal in (False, True):
                    errors[f"ulysses {causal} {case}"] = check_ulysses(case, rank, causal=causal)
        errors |= {f"bfloat16 {name}": e for name, e in check_bfloat16(rank, ranks).items()}
    return errors


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_equal_to_one_process(ranks: int) -> None:
    """Every function, variant and shape: forward and gradients within 1e-12 of one process in
    float64, 1e-5 in float32, and the stated bound in bfloat16."""
    results = run_ranks("test_decompose_functions:child_exact", ranks)
    for result in results:
        assert len(result.value) == 15 * 5 + 5 * 2 + 3 * 6
        wrong = {name: error for name, error in result.value.items() if not error <= 1}
        assert not wrong


def check_bfloat16(rank: int, ranks: int) -> Errors:
    """Element by element: N u sum_k |partial_k| for sums over N ranks (dX: a rounding per weight),
    u for a plain matmul, 2 u for a sum of slices in float32."""
    errors: Errors = {}
    for variant in VARIANTS:
        case = Case(variant, 2, (6,) * ranks, dtype=torch.bfloat16)
        make = Maker(case)
        xs, ws = [make(6 * ranks, 16) for _ in range(ranks)], [make(8, 16) for _ in range(ranks)]
        grads = [make(6, 8) for _ in range(ranks)]
        x, w = leaf(xs[rank]), leaf(ws[rank])
        out = matmul_scatter(x, w, variant=variant, pieces=2)
        out.backward(grads[rank])
        mine = slice(6 * rank, 6 * rank + 6)
        partials = [a.double()[mine] @ b.double().t() for a, b in zip(xs, ws, strict=True)]
        grad = torch.cat(grads)
        errors[f"scatter {variant}"] = of_bound(out, partials, ranks)
        errors[f"scatter dx {variant}"] = of_bound(x.grad, [grad.double() @ ws[rank].double()], 1)
        # Between one rounding for each slice and none, |partial| is bounded by products of |.|.
        products = grad.double().t().abs() @ xs[rank].double().abs()
        error = (w.grad.double() - grad.double().t() @ xs[rank].double()).abs()
        errors[f"scatter dw {variant}"] = float((error / (2 * BFLOAT16_U * products)).max())

        slices = [a[:6] for a in xs]
        out_grads = [[make(6 * ranks, 8) for _ in range(2)] for _ in range(ranks)]
        two = [[b, c] for b, c in zip(ws, ws[1:] + ws[:1], strict=True)]
        x, pair = leaf(slices[rank]), [leaf(b) for b in two[rank]]
        torch.autograd.backward(gather_matmul(x, pair, variant=variant, pieces=2), out_grads[rank])
        partials = [
            g.double()[mine] @ b.double()
            for of_rank, weights in zip(out_grads, two, strict=True)
            for g, b in zip(of_rank, weights, strict=True)
        ]
        errors[f"gather dx {variant}"] = of_bound(x.grad, partials, 2 * ranks)
        full = torch.cat(slices).double()
        for k, (b, g) in enumerate(zip(pair, out_grads[rank], strict=True)):
            errors[f"gather dw {k} {variant}"] = of_bound(b.grad, [g.double().t() @ full], 1)
    return errors


def of_bound(found: Tensor, partials: list[Tensor], roundings: int) -> float:
    """The largest error as a multiple of roundings * u * sum of |partials|, to first order; 2^-20
    of the largest value is allowed for float32 inside a matmul."""
    bound = 1.05 * roundings * BFLOAT16_U * torch.stack(partials).abs().sum(0)
    expected = torch.stack(partials).sum(0)
    slack = 2**-20 * torch.stack(partials).abs().max()
    return float(((found.detach().double() - expected).abs() / (bound + slack)).max())


def child_groups() -> Errors:
    """Groups that are not the world: two of two ranks, and one of this rank alone."""
    errors: Errors = {}
    with gloo_group():
        world = dist.get_rank()
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        alone = [dist.new_group([rank]) for rank in range(4)][world]
        torch.manual_seed(world % 2)
        xs, weight = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(3, 4).double()
        group, rank = pairs[world % 2], world // 2
        for variant in VARIANTS:
            out = gather_matmul(xs[rank], weight, group, variant=variant)
            errors[f"pair {variant}"] = over_bound(out, xs.flatten(0, 1) @ weight.t())
            x, w = leaf(xs[0]), leaf(weight)
            one = gather_matmul(x, w, alone, variant=variant, pieces=2)
            two = matmul_scatter(x, w, alone, variant=variant, pieces=2)
            three = matmul_reduce(x, w, alone, variant=variant)
            (one + two + three).sum().backward()
            errors[f"alone {variant}"] = over_bound(one, xs[0] @ weight.t())
            errors[f"alone dw {variant}"] = over_bound(w.grad, 3 * xs[0].sum(0).expand(3, 4))
            errors[f"alone dx {variant}"] = over_bound(x.grad, 3 * weight.sum(0).expand(6, 4))
        errors |= check_frozen(xs[rank], weight, group)
        check_buffers_are_free()
    return errors


def check_frozen(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Errors:
    """Only x, or only the weight, takes gradients. The gradient that comes in is expanded."""
    only_x, only_w = leaf(x), leaf(weight)
    gather_matmul(only_x, weight, group).sum().backward()
    gather_matmul(x, only_w, group).sum().backward()
    everyone = torch.empty(2, *x.shape, dtype=x.dtype)
    dist.all_gather(list(everyone), x, group=group)
    return {
        "only x": over_bound(only_x.grad, 2 * weight.sum(0).expand(6, 4)),
        "only weight": over_bound(only_w.grad, everyone.sum((0, 1)).expand(3, 4)),
    }


def check_buffers_are_free() -> None:
    """Rank 1 is late with its last transfer, and rank 0 overwrites what it sent on return."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    order = Order(variant="ring", rank=rank, rows=(50_000,) * ranks)
    into = torch.empty(order.total, 2)
    seen: list[Tensor] = []

    def compute(_: object, values: Tensor) -> None:
        if rank == 1 and len(seen) < 2:
            time.sleep(0.2)
        seen.append(values.clone())

    gather_slices(torch.full((50_000, 2), float(rank)), order, None, compute, into=into)
    into.fill_(-1)
    owners = [(rank - step) % ranks for step in range(ranks)]
    for owner, values in zip(owners, seen, strict=True):
        assert bool((values == owner).all()), f"slice of rank {owner} was overwritten"


def test_groups_and_buffers() -> None:
    """Sub-groups, a group of one, frozen inputs; buffers may be reused once a call returned."""
    for result in run_ranks("test_decompose_functions:child_groups", 4):
        assert len(result.value) == 14
        assert not {name: error for name, error in result.value.items() if not error <= 1}


def child_refusals() -> list[str]:
    x, w, q = torch.ones(4, 6), torch.ones(5, 6), torch.ones(4, 1, 2, 8)
    found = [refusal(lambda: gather_matmul(x, w))]
    with gloo_group():
        other = [dist.new_group([rank]) for rank in range(2)][1 - dist.get_rank()]
        calls: list[Callable[[], object]] = [
            lambda: gather_matmul(x, w, variant="rings"),
            lambda: gather_matmul(x, w, pieces=0),
            lambda: gather_matmul(x, torch.ones(6, 5)),
            lambda: gather_matmul(x, []),
            lambda: gather_matmul(x[0], w),
            lambda: gather_matmul(x, w.double()),
            lambda: gather_matmul(x.int(), w.int()),
            lambda: gather_matmul(x, w, rows_per_rank=[4]),
            lambda: gather_matmul(x, w, rows_per_rank=[3, 3]),
            lambda: matmul_scatter(x[:3], w),
            lambda: matmul_scatter(x, w, rows_per_rank=[3, 2]),
            lambda: matmul_scatter(x, w, rows_per_rank=[5, -1]),
            lambda: scatter_gradient(x, w),
            lambda: ulysses_attention(q, q[..., :4], q),
            lambda: ulysses_attention(q[:, :, :1], q[:, :, :1], q[:, :, :1]),
            lambda: gather_matmul(x, w, other),
        ]
        found += [refusal(call) for call in calls]
        dist.barrier()  # no rank may leave while another still connects
    return found


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refused:
        call()
    assert refused.value.hint
    return refused.value.message


def test_wrong_inputs_are_refused() -> None:
    """Each wrong argument raises InputError with its values, before any transfer."""
    for result in run_ranks("test_decompose_functions:child_refusals", 2):
        assert result.value == [
            "there is no process group yet",
            "unknown variant 'rings'",
            "pieces = 0",
            "a weight (6, 5) cannot take the 6 features of x (4, 6)",
            "there is no weight",
            "x has shape (6,)",
            "tensors differ: torch.float32 on cpu, torch.float64 on cpu",
            "tensors are torch.int32",
            "rows_per_rank = [4] in a group of 2 ranks",
            f"rows_per_rank says 3 rows for rank {result.rank}, which has 4",
            "3 rows cannot be divided equally among 2 ranks",
            "rows_per_rank adds up to 5, but there are 4 rows",
            "rows_per_rank = [5, -1] in a group of 2 ranks",
            "dy (4, 6) and x (5, 6) are not of the same samples",
            "q (4, 1, 2, 8), k (4, 1, 2, 4) and v (4, 1, 2, 8) do not fit together",
            "2 ranks cannot divide 1 query heads and 1 key/value heads",
            f"rank {result.rank} is not in the process group that was given",
        ]
