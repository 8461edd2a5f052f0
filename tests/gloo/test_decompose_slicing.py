"""Proves that data slicing computes what the plain collectives do, forward and backward.

Functions run on groups of 2 and 4 of one world of four ranks, against one process that has the
inputs of all ranks. The pass runs there too, on a traced Llama, against the plain graphs.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor

from interlace.decompose.functions.sliced_matmul import sliced_gather_matmul, sliced_matmul_scatter
from interlace.errors import InputError

RANKS = 4
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
CASES = [
    # rows of a rank, inputs, outputs, slices, dtype, exchange
    (8, 16, 12, 2, torch.float64, "reduce_scatter"),
    (8, 16, 12, 4, torch.float64, "all_to_all"),
    (11, 7, 5, 8, torch.float64, "all_to_all"),
    (5, 3, 1, 5, torch.float64, "reduce_scatter"),
    (1, 4, 4, 1, torch.float64, "all_to_all"),
    (32, 64, 48, 4, torch.float32, "all_to_all"),
    (32, 64, 48, 4, torch.bfloat16, "all_to_all"),
    (32, 64, 48, 4, torch.bfloat16, "reduce_scatter"),
]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same numbers on every rank that asks; not contiguous, as a transposed matrix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*reversed(shape), generator=generator, dtype=torch.float64).to(dtype).t()


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any element, relative to the largest of its tensor."""
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def gather_error(group: dist.ProcessGroup, case: tuple[Any, ...]) -> float:
    rows, inputs, outputs, slices, dtype, exchange = case
    ranks, rank = group.size(), group.rank()

    def weights_of(owner: int) -> list[Tensor]:
        return [
            draw(outputs + i, inputs, seed=10 + 7 * owner + i, dtype=dtype).requires_grad_()
            for i in range(2)
        ]

    def upstream(owner: int) -> list[Tensor]:
        shape = (ranks * rows, outputs)
        return [
            draw(shape[0], shape[1] + i, seed=90 + 7 * owner + i, dtype=dtype) for i in range(2)
        ]

    x = draw(rows, inputs, seed=rank, dtype=dtype).requires_grad_()
    weights = weights_of(rank)
    found = sliced_gather_matmul(x, weights, group, slices=slices, exchange=exchange)
    torch.autograd.backward(found, upstream(rank))

    whole = torch.cat([draw(rows, inputs, seed=r, dtype=dtype) for r in range(ranks)])
    whole = whole.double().requires_grad_()
    expected: list[Tensor] = []
    for owner in range(ranks):
        theirs = [w.detach().double().requires_grad_() for w in weights_of(owner)]
        products = [whole @ w.t() for w in theirs]
        torch.autograd.backward(products, [g.double() for g in upstream(owner)])
        if owner == rank:
            expected = [*products, *(w.grad for w in theirs)]
    of_x = whole.grad.view(ranks, rows, inputs)[rank]
    return furthest([*found, *(w.grad for w in weights), x.grad], [*expected, of_x])


def scatter_error(group: dist.ProcessGroup, case: tuple[Any, ...]) -> float:
    rows, inputs, outputs, slices, dtype, exchange = case
    ranks, rank = group.size(), group.rank()

    def leaves(owner: int) -> list[Tensor]:
        shapes = ((ranks * rows, inputs), (outputs, inputs))
        return [
            draw(*shape, seed=20 + 7 * owner + i, dtype=dtype) for i, shape in enumerate(shapes)
        ]

    upstream = draw(ranks * rows, outputs, seed=5, dtype=dtype)
    mine = slice(rank * rows, (rank + 1) * rows)
    x, weight = (leaf.requires_grad_() for leaf in leaves(rank))
    found = sliced_matmul_scatter(x, weight, group, slices=slices, exchange=exchange)
    found.backward(upstream[mine])

    theirs = [[leaf.double().requires_grad_() for leaf in leaves(r)] for r in range(ranks)]
    total = torch.stack([a @ w.t() for a, w in theirs]).sum(0)
    total.backward(upstream.double())
    gradients = [leaf.grad for leaf in theirs[rank]]
    return furthest([found, x.grad, weight.grad], [total[mine], *gradients])


def functions() -> dict[str, float]:
    """The error of every case over its bound, per function and group."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
    return {
        f"{name} {ranks} ranks {case}": error(group, case) / BOUND[case[4]]
        for ranks, group in groups.items()
        for name, error in (("gather", gather_error), ("scatter", scatter_error))
        for case in CASES
    }


def graphs() -> dict[str, Any]:
    """How far sliced graphs are from plain ones; what is refused; collectives of sliced graphs."""
    from decompose_world import asked, batches, build_llama, furthest

    from interlace.decompose.rewrite.find import find_sites
    from interlace.decompose.rewrite.slicing import slice_site
    from interlace.graphs.trace import trace_chunk
    from interlace.parallel.tensor import loss_context

    model = build_llama(torch.float64, RANKS, layers=1)
    plain, sliced = model.strands(None), model.strands(asked("slicing", 3))
    with loss_context(model.meshes.tensor):
        chunk = trace_chunk(model.module, batches()[0])
    sites, _ = find_sites(chunk.forward, model.meshes.axis_of_group)
    with pytest.raises(InputError) as caught:
        slice_site(chunk.forward, sites[0], 5)
    return {
        "error": furthest(model.step(sliced), model.step(plain)),
        "refusal": str(caught.value),
        "digest": sliced.digest,
        "plain": collectives_of(plain),
        "sliced": collectives_of(sliced),
        "decomposed": sliced.listing.decomposed,
    }


def collectives_of(strands: Any) -> dict[str, list[int]]:
    """Number and bytes of the collectives that move activations, by kind."""
    kinds = ("all_gather", "reduce_scatter")
    found = {kind: [op for op in strands.pair.operators if op.kind == kind] for kind in kinds}
    return {kind: [len(ops), sum(op.bytes_in for op in ops)] for kind, ops in found.items()}


def child() -> dict[str, Any]:
    """Everything that a rank finds out."""
    with gloo_group():
        return {"functions": functions(), "graphs": graphs()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank found out."""
    return [r.value for r in run_ranks("test_decompose_slicing:child", RANKS, timeout_s=120)]


def test_functions_equal_one_process(found: list[dict[str, Any]]) -> None:
    """Results and gradients of both functions, within 1e-12 in float64, 1e-5 in float32 and 3e-2 in
    bfloat16 of the largest element, for even and uneven slices and both ways to reduce."""
    for rank in found:
        assert len(rank["functions"]) == 2 * 2 * len(CASES)
        assert not {name: error for name, error in rank["functions"].items() if not error <= 1}


def test_sliced_graphs_have_the_losses_and_gradients_of_plain_ones(
    found: list[dict[str, Any]],
) -> None:
    """Within 1e-12 in float64 on four ranks; every rank has the same program, and each site's
    collective became three that move as many bytes."""
    facts = found[0]["graphs"]
    assert facts["error"] < 1e-12
    assert all(rank["graphs"]["digest"] == facts["digest"] for rank in found)
    more = 0
    for kind, (count, size) in facts["plain"].items():
        assert facts["sliced"][kind][1] == size
        more += facts["sliced"][kind][0] - count
    assert more == 2 * facts["decomposed"] > 0


def test_slices_that_do_not_divide_the_rows_are_refused(found: list[dict[str, Any]]) -> None:
    """Ranks would scatter unequal parts; the message says which numbers do."""
    assert "12 rows" in found[0]["graphs"]["refusal"]
    assert "divisor of 12" in found[0]["graphs"]["refusal"]


def leading_dimensions(group: dist.ProcessGroup | None = None) -> dict[str, bool]:
    """A child: [rows, batch, features] gives what the flattened rows give, in that shape."""
    with gloo_group():
        rank = dist.get_rank()
        x = draw(6, 10, seed=rank, dtype=torch.float64).contiguous()
        weight = draw(4, 5, seed=3, dtype=torch.float64)
        rows, cubes = x.view(12, 5), x.view(6, 2, 5)
        gathered = sliced_gather_matmul(cubes, weight, group, slices=3)
        plain = sliced_gather_matmul(rows, weight, group, slices=3)
        scattered = sliced_matmul_scatter(cubes, weight, group, slices=3)
        flat = sliced_matmul_scatter(rows, weight, group, slices=3)
        return {
            "gather": torch.equal(gathered, plain.view(12, 2, 4)),
            "scatter": torch.equal(scattered, flat.view(3, 2, 4)),
        }


def test_dimensions_between_rows_and_features_are_kept() -> None:
    """A sequence-first activation needs no reshaping."""
    for result in run_ranks("test_decompose_slicing:leading_dimensions", 2, timeout_s=60):
        assert result.value == {"gather": True, "scatter": True}


def refusals() -> list[str]:
    """A child: what each wrong input is answered."""
    with gloo_group():
        other = dist.new_group([1])
        if dist.get_rank():
            return []
        x, weight = torch.zeros(6, 4), torch.zeros(3, 4)
        wrong = [
            lambda: sliced_gather_matmul(x, weight, other, slices=2),
            lambda: sliced_gather_matmul(x, weight, slices=7),
            lambda: sliced_gather_matmul(x, weight, slices=0),
            lambda: sliced_gather_matmul(x, weight.t(), slices=2),
            lambda: sliced_gather_matmul(x, [], slices=2),
            lambda: sliced_gather_matmul(x, weight.double(), slices=2),
            lambda: sliced_gather_matmul(x, weight, slices=2, exchange="gather"),
            lambda: sliced_matmul_scatter(x[:5], weight, slices=2),
        ]
        answers = []
        for call in wrong:
            with pytest.raises(InputError) as caught:
                call()
            answers.append(str(caught.value))
        return answers


def test_wrong_inputs_are_refused_before_anything_is_sent() -> None:
    """Each on one rank only: a collective would wait for the other for ever."""
    answers = run_ranks("test_decompose_slicing:refusals", 2, timeout_s=60)[0].value
    assert "not in the process group" in answers[0]
    assert "7 slices" in answers[1]
    assert "torch.nn.Linear" in answers[3]
    assert "unknown exchange 'gather'" in answers[6]
    assert "scattered equally over 2 ranks" in answers[7]
    assert all("hint: " in answer for answer in answers)
