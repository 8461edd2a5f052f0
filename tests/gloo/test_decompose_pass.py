"""Proves that decomposed graphs compute what the plain graphs compute, on two and on four ranks:
float64 for closeness, float32 for bits. Every collective of every graph is listed.

Wide are rings of four ranks, beside those of two and other variants on four."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import gloo_group, run_ranks

from wide import WIDE

BOUND = 1e-12
"""Relative, in float64: decomposition changes the order of additions only."""
LAYERS = 2
WAYS = {
    2: [("ring", 1), ("ring", 5), ("slicing", 2)],
    4: [("direct", 2), ("bidirectional", 1)],
}
RINGS = [("ring", 1), ("ring", 2)]
"""Variants and pieces; 5 does not divide the rows of a rank."""
REST = {
    "all_reduce": "no matmul makes its input",
    "reduce_scatter": "no matmul makes its input",
    "all_gather": "no matmul reads the gathered rows",
}
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def child(ranks: int, folder: str, ways: list[tuple[str, int]]) -> dict[str, Any]:
    """Everything that a rank finds out."""
    from decompose_world import asked, build_gpt, build_hugging_face, build_llama

    with gloo_group(timeout_s=200):
        double = torch.float64
        llama = build_llama(double, ranks, layers=LAYERS if ranks == 2 else 1)
        facts = closeness(llama, {f"llama {v} {p}": asked(v, p) for v, p in ways})
        if ranks == 2:
            hugging_face = build_hugging_face(folder, double, ranks)
            facts |= closeness(hugging_face, {"hugging face ring 2": asked("ring", 2)})
            facts |= closeness(build_gpt(double, ranks), {"gpt auto": asked("auto")})
            way = {"llama layer ring 2": asked("ring", 2)}
            facts |= closeness(llama, way, recompute="layer")
            facts |= closeness(hugging_face, {"hugging face slicing 2": asked("slicing", 2)})
        return {"facts": facts, "bits": bit_differences(ranks)}


def closeness(model: Any, ways: dict[str, Any], recompute: Any = "none") -> dict[str, Any]:
    """How far each way is from the plain graphs, and its listing, digest and operators."""
    from decompose_world import furthest

    wanted = model.step(model.strands(None, recompute))
    found = {}
    for name, decompose in ways.items():
        strands = model.strands(decompose, recompute)
        found[name] = {
            "error": furthest(model.step(strands), wanted),
            "listing": strands.listing.as_dict(),
            "lines": strands.listing.lines(),
            "digest": strands.digest,
            "left": dict(Counter(
                str(op.kind) for op in strands.pair.operators if op.is_collective
            )),
        }  # fmt: skip
    return found


def bit_differences(ranks: int) -> dict[str, list[str]]:
    """Names whose bits are not those of one strand, for two strands in several plans."""
    from decompose_world import asked, build_llama

    from interlace.hardware.computed_costs import MachineModel, analytic_costs
    from interlace.search.planner import make_plan

    model = build_llama(torch.float32, ranks, layers=1)
    different = {}
    for variant, pieces in {2: [("ring", 2)], 4: [("bidirectional", 1), ("direct", 1)]}[ranks]:
        strands = model.strands(asked(variant, pieces))
        machine = MachineModel(
            flops_per_s=1e10, bytes_per_s=1e10, link_bits_per_s=1e9, link_latency_ns=10_000
        )
        costs = analytic_costs(strands.op_graphs, machine, {"tp": ranks})
        plans = {"list": make_plan(strands.op_graphs, costs, "list")}
        plans |= {f"random {seed}": random_plan(strands, seed) for seed in range(3)}
        one = model.step(strands)
        for name, plan in plans.items():
            two = model.step(strands, plan)
            unequal = [key for key in one if not torch.equal(one[key], two[key])]
            different[f"{variant} {name}"] = unequal
    return different


def random_plan(strands: Any, seed: int) -> Any:
    """A valid order of both strands that no search would make, with a head that runs ahead."""
    from interlace.ir.plan import PhasePlan
    from orders import depth_first_order, random_order
    from phases import plan_by

    head = random.Random(seed).choice((0, 7, 20, 40))
    make = random_order if seed % 2 else depth_first_order
    return plan_by(strands.op_graphs, lambda graph: PhasePlan(make(graph, seed), 0, 0), head)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each rank found out."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return {ranks: run_child(ranks, folder, WAYS[ranks]) for ranks in (2, 4)}


def run_child(ranks: int, folder: Path, ways: list[tuple[str, int]]) -> list[dict[str, Any]]:
    args = [ranks, str(folder), ways]
    results = run_ranks("test_decompose_pass:child", ranks, args=args, timeout_s=240)
    return [result.value for result in results]


def test_decomposed_graphs_have_the_losses_and_gradients_of_plain_ones(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Every variant, m > 1, uneven pieces, recomputation, biases, all-reduces."""
    for ranks in found.values():
        check_closeness(ranks)


def check_closeness(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, facts in rank["facts"].items():
            assert facts["error"] < BOUND, name
            assert facts["listing"]["decomposed"] == len(facts["listing"]["sites"]), name


@WIDE
def test_rings_of_four_ranks(tmp_path: Path) -> None:
    found = run_child(4, tmp_path, RINGS)
    assert len(found[0]["facts"]) == len(RINGS)
    check_closeness(found)


def test_two_strands_have_the_bits_of_one(found: dict[int, list[dict[str, Any]]]) -> None:
    """In float32, in a planned order and in random ones."""
    for ranks in found.values():
        for rank in ranks:
            assert len(rank["bits"]) >= 4
            assert not any(rank["bits"].values()), rank["bits"]


def test_ranks_have_the_same_program(found: dict[int, list[dict[str, Any]]]) -> None:
    """Digests and listings do not depend on the rank."""
    for first, *others in found.values():
        for other in others:
            for name, facts in first["facts"].items():
                assert facts["digest"] == other["facts"][name]["digest"], name
                assert facts["lines"] == other["facts"][name]["lines"], name


@pytest.mark.parametrize("name", ["llama ring 1", "gpt auto"])
def test_every_site_of_our_models_is_found(
    name: str, found: dict[int, list[dict[str, Any]]]
) -> None:
    """Two gathers and two scatters per layer and the head's, in both directions; what is left are
    the embedding's and the loss's collectives, which no matmul is next to."""
    facts = found[2][0]["facts"][name]
    kinds = Counter((s["site"]["strand"], s["site"]["kind"]) for s in facts["listing"]["sites"])
    each = 2 * LAYERS
    assert kinds == {
        ("forward", "gather_matmul"): each + 1,
        ("forward", "matmul_scatter"): each,
        ("backward", "gather_matmul"): each,
        ("backward", "matmul_scatter"): each + 1,
    }
    left = Counter((m["strand"], m["kind"]) for m in facts["listing"]["missed"])
    assert left == {
        ("forward", "reduce_scatter"): 1,
        ("forward", "all_reduce"): 3,
        ("backward", "all_gather"): 1,
    }
    for missed in facts["listing"]["missed"]:
        assert missed["reason"].startswith(REST[missed["kind"]])
    assert facts["left"]["send"] > 0
    assert {k: n for k, n in facts["left"].items() if k != "send"} == {
        "reduce_scatter": 1, "all_reduce": 3, "all_gather": 1,
    }  # fmt: skip


def test_every_site_of_an_unmodified_hugging_face_model_is_found(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Its published plan sums over all ranks: two all-reduces per layer forward, two backward and
    the head's."""
    facts = found[2][0]["facts"]["hugging face ring 2"]
    kinds = Counter((s["site"]["strand"], s["site"]["kind"]) for s in facts["listing"]["sites"])
    assert kinds == {
        ("forward", "matmul_reduce"): 2 * LAYERS,
        ("backward", "matmul_reduce"): 2 * LAYERS + 1,
    }
    for missed in facts["listing"]["missed"]:
        assert missed["reason"].startswith("no matmul makes its input")


def test_the_listing_says_what_and_why(found: dict[int, list[dict[str, Any]]]) -> None:
    """Layers are listed together, with modules, shapes, variant and pieces, or the reason."""
    lines = found[2][0]["facts"]["llama ring 1"]["lines"]
    sites = 8 * LAYERS + 2
    assert lines[0] == (
        f"decomposed {sites} of {sites} sites (ring {sites}); 5 of {sites + 5} collectives are no "
        "sites"
    )
    assert any("forward gather_matmul" in line and "2 ranks x 24 rows" in line for line in lines)
    assert any("ring, pieces 1" in line and f"   {LAYERS} x " in line for line in lines)
    assert sum(" x not " in line for line in lines) >= 3
