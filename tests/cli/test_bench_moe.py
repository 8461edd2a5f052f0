"""The bench of experts: its data, the order fixed by hand, what rows say, and that it runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interlace.__main__ import main
from interlace.bench.moe_model import ROUTINGS, MoeSize, imbalance, micro_batches
from interlace.bench.moe_order import EXCHANGE, fixed_plan
from interlace.bench.moe_strands import (
    BOTH,
    EAGER,
    FIXED,
    GROUPS,
    ONE,
    TWO,
    case_of,
    rate_for,
    rows_of,
)
from interlace.errors import InputError
from interlace.ir.graph import Kind, Operator, OpGraph
from interlace.lab import hosts

SIZE = MoeSize(
    layers=2, width=8, ffn_width=8, heads=2, experts=8, words=16, batch=2, length=64,
    micro_batches=2, repeats=1, recorded=1,
)  # fmt: skip
MS = 1_000_000
_REASON = hosts.available()


def test_balanced_routing_gives_every_expert_as_many_rows() -> None:
    """Exactly, of every rank, layer and micro-batch; and no token takes an expert twice."""
    for rank in range(2):
        for *_, ids in micro_batches(SIZE, rank, "balanced"):
            for layer in ids:
                assert layer.flatten().bincount().tolist() == [32] * 8
                assert (layer[:, 0] != layer[:, 1]).all()


def test_skewed_routing_follows_zipf_and_is_reproducible() -> None:
    """The most popular expert gets several times its share; the same again every time."""
    first, again = (micro_batches(SIZE, 0, "skewed") for _ in range(2))
    assert all(torch.equal(a[2], b[2]) for a, b in zip(first, again, strict=True))
    rows = torch.cat([ids.flatten() for *_, ids in first]).bincount(minlength=8)
    assert imbalance(rows) > 2
    assert rows[0] > rows[3] > rows[7] > 0
    assert not torch.equal(first[0][2], micro_batches(SIZE, 1, "skewed")[0][2])


def graph_of(name: str, chain: list[str], apart: dict[str, str]) -> OpGraph:
    """Operators of which each waits for the one before, and those in `apart` for another one only;
    names in capitals are exchanges."""
    operators = []
    before: tuple[str, ...] = ()
    for each in chain:
        is_apart = each in apart
        moves = each.isupper()
        operators.append(
            Operator(
                id=each,
                kind=Kind.ALL_TO_ALL if moves else Kind.MATMUL,
                target=EXCHANGE if moves else "aten.mm.default",
                lane="ep" if moves else "compute",
                inputs=(apart[each],) if is_apart else before,
                reads=(), key=each, bytes_in=4, bytes_out=4, flops=1,
            )
        )  # fmt: skip
        before = before if is_apart else (each,)
    return OpGraph(name, tuple(operators), (), (chain[-1],))


def test_the_hand_order_is_that_of_megatron() -> None:
    """Exchanges begin as soon as they can, and gradients of weights fill the time behind them."""
    graphs = {
        "forward": graph_of("forward", ["attention", "DISPATCH", "mlp", "COMBINE", "loss"], {}),
        "backward": graph_of(
            "backward",
            ["head", "w_head", "COMBINE", "mlp", "w_mlp", "DISPATCH", "attention", "w_attention"],
            {"w_head": "head", "w_mlp": "mlp"},
        ),
    }
    plan = fixed_plan(graphs)
    plan.validate(graphs, "test")
    assert plan.phases["forward"].order == graphs["forward"].order
    assert plan.phases["forward+backward"].order == (
        "backward.head", "backward.COMBINE", "backward.w_head",
        "forward.attention", "forward.DISPATCH",
        "backward.mlp", "backward.DISPATCH", "backward.w_mlp",
        "forward.mlp", "forward.COMBINE",
        "backward.attention", "backward.w_attention",
        "forward.loss",
    )  # fmt: skip


def test_a_model_without_experts_in_every_layer_has_no_hand_order() -> None:
    """It is refused."""
    forward = graph_of("forward", ["attention", "DISPATCH", "mlp"], {})
    backward = graph_of("backward", ["head", "COMBINE", "mlp"], {})
    with pytest.raises(InputError, match="exchanges of rows"):
        fixed_plan({"forward": forward, "backward": backward})


def found_of(two: list[int]) -> dict[str, object]:
    """What ranks might find, with these times of two strands."""
    record = {
        "compute": 50 * MS, "busy": 40 * MS, "exposed": 10 * MS,
        "steady_busy": 30 * MS, "steady_exposed": 3 * MS, "counts": 2 * MS,
        "rows_busy": 30 * MS, "rows_exposed": 3 * MS, "counts_busy": 10 * MS,
        "counts_exposed": 7 * MS, "steady_rows_busy": 24 * MS, "steady_rows_exposed": 3 * MS,
        "steady_counts_busy": 6 * MS, "steady_counts_exposed": 0,
    }  # fmt: skip
    times = {EAGER: [100 * MS, 110 * MS], ONE: [90 * MS, 99 * MS], FIXED: [60 * MS, 66 * MS]}
    times |= {GROUPS: [75 * MS, 75 * MS], BOTH: [40 * MS, 44 * MS]}
    return {
        "times": {**times, TWO: two},
        "records": {name: [record] for name in (ONE, TWO, FIXED, GROUPS)},
        "predicted_ns": {ONE: 90 * MS, TWO: 45 * MS, FIXED: 60 * MS, GROUPS: 75 * MS},
        "load": {"expert": 2.5, "rank": 1.5},
    }


def test_rows_are_ratios_of_what_was_found() -> None:
    """Also where two strands are the slower ones."""
    rows = {(row.case, row.metric): row for row in rows_of("skewed", found_of([50 * MS, 55 * MS]))}
    assert rows["skewed", "speedup_vs_eager"].ratio == pytest.approx(2)
    assert rows["skewed", "speedup_vs_one_strand"].ratio == pytest.approx(1.8)
    assert rows["skewed", "speedup_vs_fixed_order"].ratio == pytest.approx(1.2)
    assert rows["skewed", "groups_vs_one_strand"].ratio == pytest.approx(94.5 / 75)
    assert rows["skewed", "both_vs_two_strands"].ratio == pytest.approx(1.25)
    assert rows["skewed", "both_vs_eager"].ratio == pytest.approx(2.5)
    assert rows["skewed", "largest_over_mean_rows_of_rank"].ratio == 1.5
    assert rows["skewed", "all_to_all_over_compute"].ratio == pytest.approx(0.8)
    assert rows["skewed", "counts_of_two_strands_ms"].ours == pytest.approx(2)
    assert rows[f"skewed, {TWO}", "hidden_fraction"].ratio == pytest.approx(0.75)
    assert rows[f"skewed, {TWO}", "steady_hidden_fraction"].ratio == pytest.approx(0.9)
    assert rows[f"skewed, {TWO}", "hidden_fraction_of_rows"].ratio == pytest.approx(0.9)
    assert rows[f"skewed, {TWO}", "hidden_fraction_of_counts"].ratio == pytest.approx(0.3)
    assert rows[f"skewed, {TWO}", "steady_hidden_fraction_of_counts"].ratio == pytest.approx(1)
    assert ("skewed, one strand", "steady_hidden_fraction") not in rows
    assert rows[f"skewed, {TWO}", "predicted_over_measured"].ratio == pytest.approx(45 / 52.5)
    slow = {(row.case, row.metric): row for row in rows_of("skewed", found_of([120 * MS] * 2))}
    assert slow["skewed", "speedup_vs_fixed_order"].ratio == pytest.approx(63 / 120)


def test_cases_are_named_by_routing_and_ranks_that_emulate() -> None:
    """The full form measures four."""
    assert SIZE.routings == ROUTINGS
    names = [case_of(routing, SIZE) for routing in ROUTINGS]
    emulated = replace(SIZE, ranks=4, flops_per_s=1.0)
    names += [case_of(routing, emulated) for routing in ROUTINGS]
    assert names == [
        "balanced", "skewed", "balanced, 4 ranks, emulated compute",
        "skewed, 4 ranks, emulated compute",
    ]  # fmt: skip


def test_the_rate_makes_both_equally_long() -> None:
    """Half the time of compute asks for half the rate."""
    assert rate_for([{"busy": 5, "compute": 10}], "300mbit") == "150mbit"


@pytest.mark.skipif(bool(_REASON), reason=f"no lab can be made here: {_REASON}")
def test_all_ways_run_and_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks compare gradients before they time anything; times are not looked at here."""
    path = tmp_path / "moe.json"
    assert main(["bench", "moe_strands", "--quick", "--json", str(path)]) == 0
    assert "speedup_vs_fixed_order" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    found = {(row["case"], row["metric"]) for row in rows}
    case = "skewed, 2 ranks, emulated compute"
    assert (case, "speedup_vs_eager") in found
    assert {
        (f"{case}, {way}", "predicted_over_measured") for way in (ONE, GROUPS, TWO, FIXED, BOTH)
    } <= found
