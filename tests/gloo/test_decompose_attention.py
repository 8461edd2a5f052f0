"""Proves that query-split attention computes what attention, projection and reduce-scatter do.

Functions run on groups of 2 and 4 of one world of four ranks, against one process that has the
heads of all ranks. Passes run on a traced Llama, against the plain graphs.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import gloo_group, run_ranks
from torch import Tensor

from interlace.decompose.functions.attention_scatter import query_split_attention
from interlace.errors import InputError

RANKS = 4
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
CASES = [
    # positions of a rank, batch, heads, key/value heads, head size, causal, dtype, variant, pieces
    (6, 2, 4, 4, 8, True, torch.float64, "ring", 1),
    (6, 2, 4, 2, 8, True, torch.float64, "ring", 2),
    (7, 1, 4, 1, 4, True, torch.float64, "direct", 3),
    (5, 2, 2, 2, 4, True, torch.float64, "bidirectional", 1),
    (2, 1, 2, 1, 4, False, torch.float64, "direct", 4),
    (8, 2, 4, 2, 8, False, torch.float64, "bidirectional", 2),
    (16, 2, 4, 2, 16, True, torch.float32, "ring", 2),
    (16, 2, 4, 2, 16, True, torch.bfloat16, "ring", 2),
]
OUTPUTS = 12


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same numbers on every rank that asks; not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64)
    return whole[..., ::2].to(dtype)


def inputs(rank: int, ranks: int, case: tuple[Any, ...]) -> list[Tensor]:
    """q, k, v and the projection of one rank's heads."""
    rows, batch, heads, kv_heads, size, _, dtype, *_ = case
    shapes = [(ranks * rows, batch, n, size) for n in (heads, kv_heads, kv_heads)]
    shapes.append((OUTPUTS, heads * size))
    return [draw(*shape, seed=10 * rank + place, dtype=dtype) for place, shape in enumerate(shapes)]


def plain(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool) -> Tensor:
    """Attention and projection of one rank's heads by PyTorch's own functions."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return F.linear(mixed.permute(2, 0, 1, 3).flatten(2), weight)


def error(group: dist.ProcessGroup, case: tuple[Any, ...]) -> float:
    """The largest difference of output and gradients, each relative to its largest element."""
    rows, batch, *_, causal, dtype, variant, pieces = case
    ranks, rank = group.size(), group.rank()
    own = slice(rank * rows, (rank + 1) * rows)
    upstream = draw(ranks * rows, batch, OUTPUTS, seed=99, dtype=dtype)
    mine = [x.requires_grad_() for x in inputs(rank, ranks, case)]
    found = query_split_attention(*mine, group, variant=variant, pieces=pieces, causal=causal)
    found.backward(upstream[own])

    theirs = [[x.double().requires_grad_() for x in inputs(r, ranks, case)] for r in range(ranks)]
    total = torch.stack([plain(*leaves, causal=causal) for leaves in theirs]).sum(0)
    total.backward(upstream.double())
    ours = [found, *(x.grad for x in mine)]
    expected = [total[own], *(x.grad for x in theirs[rank])]
    return max(
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(ours, expected, strict=True)
    )


def functions() -> dict[str, float]:
    """A child: the error of every case over its bound, per group."""
    with gloo_group():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
        return {
            f"{ranks} ranks {case}": error(group, case) / BOUND[case[6]]
            for ranks, group in groups.items()
            for case in CASES
        }


def test_function_equals_one_process() -> None:
    """Output and gradients of q, k, v and the projection, within 1e-12 in float64, 1e-5 in float32
    and 4e-2 in bfloat16 of the largest element: every variant, pieces, grouped heads, no mask."""
    for result in run_ranks("test_decompose_attention:functions", RANKS, timeout_s=60):
        assert len(result.value) == 2 * len(CASES)
        over = {name: error for name, error in result.value.items() if not error <= 1}
        assert not over


def refusals() -> list[str]:
    """A child: what each wrong input is answered, on one rank only."""
    with gloo_group():
        if dist.get_rank():
            return []
        q, k, weight = torch.zeros(8, 1, 4, 2), torch.zeros(8, 1, 2, 2), torch.zeros(3, 8)
        wrong = [
            (q[0], k, k, weight, {}),
            (q, k, k[:4], weight, {}),
            (q, k[:4], k[:4], weight, {}),
            (q[:, :, :3], k, k, weight, {}),
            (q, k, k, weight.t(), {}),
            (q, k, k, weight.double(), {}),
            (q[:7], k[:7], k[:7], weight, {}),
            (q, k, k, weight, {"variant": "rings"}),
            (q, k, k, weight, {"pieces": 0}),
        ]
        answers = []
        for *tensors, options in wrong:
            with pytest.raises(InputError) as caught:
                query_split_attention(*tensors, **options)
            answers.append(str(caught.value))
        return answers


def test_wrong_inputs_are_refused_before_anything_is_sent() -> None:
    """Each on one rank only: a transfer would wait for the other for ever."""
    answers = run_ranks("test_decompose_attention:refusals", 2, timeout_s=60)[0].value
    assert "as many keys as queries, not 4 and 8" in answers[2]
    assert "torch.nn.Linear" in answers[4]
    assert "rings" in answers[7]
    assert all("hint: " in answer for answer in answers)


WAYS = {2: [("ring", 3)], 4: [("direct", 2), ("bidirectional", 1)]}
LAYERS = {2: 2, 4: 1}


def graphs(ranks: int) -> dict[str, Any]:
    """A child: how far graphs with split attention are from plain ones, and what they look like."""
    from decompose_world import build_gpt, build_llama, furthest

    with gloo_group(timeout_s=60):
        model = build_llama(torch.float64, ranks, layers=LAYERS[ranks], kv_heads=max(2, ranks))
        wanted_strands, _ = split_strands(model, None)
        wanted = model.step(wanted_strands)
        facts: dict[str, Any] = {"plain": facts_of(wanted_strands), "ways": {}}
        for way in WAYS[ranks]:
            strands, found = split_strands(model, way)
            facts["ways"][str(way)] = {
                "error": furthest(model.step(strands), wanted),
                "sites": [site.kind for site in found],
                **facts_of(strands),
            }
        single = build_llama(torch.float32, ranks, layers=1)
        strands, _ = split_strands(single, WAYS[ranks][-1])
        one = single.step(strands)
        facts["different bits"] = {
            name: [key for key, value in single.step(strands, plan).items()
                   if not torch.equal(value, one[key])]
            for name, plan in plans(strands, ranks).items()
        }  # fmt: skip
        if ranks == 2:
            gpt = build_gpt(torch.float64, ranks)
            plain_gpt, _ = split_strands(gpt, None)
            strands, _ = split_strands(gpt, ("ring", 1))
            facts["gpt"] = furthest(gpt.step(strands), gpt.step(plain_gpt))
            with pytest.raises(InputError) as caught:
                split_strands(single, ("ring", 5))
            facts["refusal"] = str(caught.value)
        return facts


def split_strands(model: Any, way: tuple[str, int] | None) -> tuple[Any, Any]:
    """The strands of a model with all its attention split in one way, and the sites."""
    from decompose_world import batches

    from interlace.decompose.rewrite.query_split import find_attention, rewrite_attention
    from interlace.graphs.trace import trace_chunk
    from interlace.parallel.tensor import loss_context
    from interlace.runtime.traced_strands import share

    axes = model.meshes.axis_of_group
    with loss_context(model.meshes.tensor):
        chunk = trace_chunk(model.module, batches()[0])
    sites, _ = find_attention(chunk.forward, axes)
    for site in sites if way else []:
        assert rewrite_attention(chunk.forward, site, *way, dist.get_rank()).bindings
    return share(model.module, chunk, axes, None, model.dtype), sites


def facts_of(strands: Any) -> dict[str, Any]:
    """The program's digest, bytes kept for backward, attention operators and sends."""
    forward, backward = strands.op_graphs["forward"], strands.op_graphs["backward"]
    attention = [op for op in forward.operators if op.kind == "attention"]
    return {
        "digest": strands.digest,
        "saved bytes": sum(x.bytes for x in backward.inputs if x.role == "saved"),
        "attention": len(attention),
        "flops": sum(op.flops for op in attention),
        "sends": sum(op.kind == "send" for op in forward.operators),
        "whole": sum(op.kind == "reduce_scatter" for op in forward.operators),
    }


def plans(strands: Any, ranks: int) -> dict[str, Any]:
    """Two strands in a planned order and in random ones."""
    from interlace.hardware.computed_costs import MachineModel, analytic_costs
    from interlace.ir.plan import PhasePlan
    from interlace.search.planner import make_plan
    from orders import random_order
    from phases import plan_by

    machine = MachineModel(
        flops_per_s=1e10, bytes_per_s=1e10, link_bits_per_s=1e9, link_latency_ns=10_000
    )
    costs = analytic_costs(strands.op_graphs, machine, {"tp": ranks})
    found = {"list": make_plan(strands.op_graphs, costs, "list")}
    for seed, head in ((1, 0), (2, 30)):
        found[f"random {seed}"] = plan_by(
            strands.op_graphs, lambda graph, s=seed: PhasePlan(random_order(graph, s), 0, 0), head
        )
    return found


class Other(torch.nn.Module):
    """Attention that the pass does not know."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if self.kind == "mask":
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.kind == "scale":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
        elif self.kind == "twice":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed + mixed.mean()
        else:
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return mixed.permute(2, 0, 1, 3)


def reasons() -> dict[str, list[str]]:
    """Why attention that is not PyTorch's causal one is not split."""
    from decompose_world import batches, build_llama

    from interlace.decompose.rewrite.query_split import find_attention
    from interlace.graphs.torch_private import init_fake_world
    from interlace.graphs.trace import trace_chunk
    from interlace.parallel.tensor import loss_context

    init_fake_world(2)
    found = {}
    for kind in ("mask", "scale", "twice", "spelled out"):
        model = build_llama(torch.float64, 2, layers=1)
        model.module.model.blocks[0].attention.core = Other(kind)
        with loss_context(model.meshes.tensor):
            chunk = trace_chunk(model.module, batches()[0])
        sites, missed = find_attention(chunk.forward, model.meshes.axis_of_group)
        assert not sites
        found[kind] = [each.reason for each in missed]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each rank found out."""
    target = "test_decompose_attention:graphs"
    return {
        ranks: [r.value for r in run_ranks(target, ranks, args=[ranks], timeout_s=150)]
        for ranks in (2, 4)
    }


def test_split_graphs_have_the_losses_and_gradients_of_plain_ones(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Within 1e-12 in float64, with grouped heads and pieces, for Llama and GPT: the backward reads
    what the slices wrote."""
    for ranks in found.values():
        for rank in ranks:
            for name, facts in rank["ways"].items():
                assert facts["error"] < 1e-12, name
    assert found[2][0]["gpt"] < 1e-12


def test_each_slice_has_its_attention(found: dict[int, list[dict[str, Any]]]) -> None:
    """One attention operator per slice, which together do the work of the whole, and one send per
    slice of another rank; the embedding's reduce-scatter is left. Nothing more is kept."""
    for ranks, (rank, *_) in found.items():
        for variant, pieces in WAYS[ranks]:
            facts = rank["ways"][str((variant, pieces))]
            slices = pieces * (2 if variant == "bidirectional" else 1)
            assert facts["sites"] == ["attention_scatter"] * LAYERS[ranks]
            assert facts["attention"] == LAYERS[ranks] * slices * ranks
            assert facts["sends"] == LAYERS[ranks] * slices * (ranks - 1)
            assert facts["whole"] == rank["plain"]["whole"] - LAYERS[ranks]
            assert facts["flops"] == rank["plain"]["flops"]
            assert facts["saved bytes"] <= rank["plain"]["saved bytes"]


def test_ranks_have_the_same_program(found: dict[int, list[dict[str, Any]]]) -> None:
    """Though they compute other rows, and see other numbers of keys, in each step."""
    for first, *others in found.values():
        for other in others:
            for name, facts in first["ways"].items():
                assert facts["digest"] == other["ways"][name]["digest"], name


def test_two_strands_have_the_bits_of_one(found: dict[int, list[dict[str, Any]]]) -> None:
    """In float32, in a planned order and in random ones."""
    for ranks in found.values():
        for rank in ranks:
            assert rank["different bits"] == {"list": [], "random 1": [], "random 2": []}


def test_slices_of_parts_of_a_position_are_refused(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """12 positions of two samples in 5 pieces; the message says what would fit."""
    refusal = found[2][0]["refusal"]
    assert "12 positions of a rank cannot be cut" in refusal
    assert "hint: set overlap.pieces to a divisor" in refusal


def test_other_attention_is_left_with_a_reason() -> None:
    """Masks, other scales, outputs that others read, and attention that is no single operator."""
    reasons = run_ranks("test_decompose_attention:reasons", 1, timeout_s=60)[0].value
    other = "its matmul does not read attention's output"
    assert reasons["mask"] == ["it takes a mask tensor", other]
    assert reasons["scale"] == ["it scales scores by 0.5, not by 1 / sqrt(head size)", other]
    assert reasons["twice"] == [other, other]
    assert reasons["spelled out"] == [other, other]
