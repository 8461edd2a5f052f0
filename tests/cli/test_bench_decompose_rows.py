"""Proves what `bench decompose` makes of its measurements: overheads, formulas, rows, tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlace.__main__ import main
from interlace.bench import decompose_train
from interlace.bench.decompose import FULL, QUICK
from interlace.bench.decompose_rows import (
    DecomposeCase,
    expected_overhead_ns,
    rows_of,
    summary_rows,
    tables,
)
from interlace.bench.decompose_shapes import (
    Job,
    Shape,
    hidden_under_ns,
    read_job,
    settled,
    write_job,
)
from interlace.bench.decompose_train import TrainCase
from interlace.bench.results import ResultRow

MS = 1_000_000


def times(*ms: float) -> dict[str, list[int]]:
    return {"ns": [round(each * MS) for each in ms], "cpu_ns": [50 * MS for _ in ms]}


def case(ratio: float = 0.8, **other: Any) -> DecomposeCase:
    """Two ranks, t_c = 100 ms at both sites of an MLP: compute alone is 400 ms."""
    transfer = ratio * 100
    whole = 400 + 2 * transfer
    fields: dict[str, Any] = {
        "ranks": 2,
        "shape": Shape(block="mlp", width=64, rows=8),
        "ratio": ratio,
        "backward": False,
        "calibration": {
            "rate_mbit": 100.0,
            "parts_ns": {"gather": 100 * MS, "scatter": 100 * MS},
            "transfer_ns": round(transfer * MS),
            "transfer_cpu_ns": 2 * MS,
        },
        "ways": {
            "compute": times(400, 410),
            "vanilla": times(whole, whole + 10),
            "slicing 2": times(whole - transfer, whole + 10 - transfer),
            "slicing 4": times(whole - 1.5 * transfer, whole + 10 - 1.5 * transfer),
            "slicing 8": times(whole, whole + 10),
            "ring": times(404, 414) if ratio <= 1 else times(500, 510),
        },
    }
    return DecomposeCase(**(fields | other))


def by_metric(rows: Any) -> dict[str, ResultRow]:
    found = {}
    for row in rows:
        assert row.metric not in found, f"two rows of {row.metric}"
        found[row.metric] = row
    return found


def test_overhead_is_what_the_fastest_step_takes_above_the_fastest_of_compute() -> None:
    """Vanilla's is 160 ms: 4 of them are left, slicing by 2 leaves a half. A slow turn only widens
    the spread."""
    rows = by_metric(rows_of(case()))
    removed = rows["overhead_removed"]
    assert (removed.ours, removed.baseline) == pytest.approx((4.0, 160.0))
    assert removed.ratio == pytest.approx(1 - 4 / 160)
    noisy = replace(case(), ways={**case().ways, "ring": times(404, 464)})
    removed = by_metric(rows_of(noisy))["overhead_removed"]
    assert removed.ratio == pytest.approx(1 - 4 / 160)
    assert removed.spread == pytest.approx((1 - 54 / 160, 1 - 4 / 160))
    assert rows["overhead_removed_slicing_2"].ratio == pytest.approx(0.5)
    assert rows["overhead_removed_slicing_4"].ratio == pytest.approx(0.75)
    assert rows["overhead_removed_slicing_8"].ratio == pytest.approx(0.0)
    assert rows["speedup_vs_vanilla"].ratio == pytest.approx(560 / 404)
    assert rows["speedup_vs_best_slicing"].ratio == pytest.approx(440 / 404)
    assert rows["speedup_vs_best_slicing"].spread == pytest.approx((450 / 414, 440 / 404))
    assert rows["transport_cpu_share"].ratio == pytest.approx(2 / 80)
    assert rows["transfer_over_slice_compute"].ratio == pytest.approx(1.0)
    assert not any("formula_slicing" in metric for metric in rows)


def test_the_formula_adds_up_the_sites() -> None:
    """At 1.5 t_c both sites expose 50 ms on 2 ranks; backward work of twice a slice, or weight
    gradients, covers it."""
    slow = case(1.5)
    assert expected_overhead_ns(slow, "ring") == 100 * MS
    assert by_metric(rows_of(slow))["over_formula"].ratio == pytest.approx(1.0)
    assert expected_overhead_ns(replace(slow, backward=True), "ring") == 100 * MS
    slower = replace(case(4.0), backward=True)
    assert expected_overhead_ns(slower, "ring") == (2 * 300 + 200 + 100) * MS
    assert expected_overhead_ns(replace(slow, ranks=4), "ring") == 300 * MS
    assert expected_overhead_ns(case(0.8), "ring") == 0


def test_query_split_hides_under_attention_as_well() -> None:
    """A slice of 20 ms and a query slice of 60 ms hide 80; under a mask the first one is short."""
    parts = {"gather": 100 * MS, "scatter": 20 * MS, "attention": 120 * MS}
    calibration = {**case().calibration, "parts_ns": parts, "transfer_ns": 80 * MS}
    shape = Shape(block="attention", width=64, rows=8)
    plain = case(1.0, shape=shape, calibration=calibration)
    assert hidden_under_ns(parts, 2) == 80 * MS
    assert expected_overhead_ns(plain, "query-split") == 0
    assert expected_overhead_ns(plain, "ring") == 60 * MS
    masked = replace(plain, shape=replace(shape, causal=True))
    assert expected_overhead_ns(masked, "query-split") == (80 - 20 - 30) * MS


def test_the_summary_takes_the_worst_of_each_group() -> None:
    """Hidden transfers by what they left, exposed ones by their distance from the formula."""
    better = case(0.5, ways={**case(0.5).ways, "ring": times(400, 410)})
    off = case(1.5, ways={**case(1.5).ways, "ring": times(450, 460)})
    rows = {
        (row.case, row.metric): row
        for row in summary_rows([case(), better, case(1.5), off, case(backward=True)])
    }
    group = "worst of TP 2, forward"
    assert rows[group, "overhead_removed"].ratio == pytest.approx(1 - 4 / 160)
    assert rows[group, "overhead_removed"].spread == pytest.approx((1 - 4 / 160, 1.0))
    assert rows[group, "over_formula"].ratio == pytest.approx(450 / 500)
    assert (f"{group} + backward", "overhead_removed") in rows
    assert (f"{group} + backward", "over_formula") not in rows


def test_tables_show_every_way_and_say_what_is_emulated() -> None:
    """Ways that were not run are dashes."""
    shape = Shape(block="mlp", width=64, rows=8, flops_per_s=1e9)
    text = tables([case(), case(shape=shape)])
    assert "TP 2, emulated compute, forward" in text
    wide = case(shape=replace(shape, inner=16))
    assert "mlp 16 D" in tables([wide])
    assert next(rows_of(wide)).case.startswith("mlp 16 D, TP 2, emulated compute, forward")
    first = next(line for line in text.splitlines() if line.startswith("mlp "))
    assert first.split()[-9:] == ["400", "560", "480", "440", "560", "404", "-", "-", "-"]
    assert "97.5 %" in text


@pytest.mark.parametrize(("ranks", "job"), [*FULL.blocks, *QUICK.blocks])
def test_every_shape_fits_its_ranks(ranks: int, job: Job) -> None:
    """Inner width and heads divide, slices of a rank's rows are whole, enough turns are counted;
    ranks that compute by a code path of their own do so in all shapes, and say it."""
    assert job.turns >= 1
    assert len({shape.compatible for shape in job.shapes}) == 1
    assert bool(job.environment) == job.shapes[0].compatible
    for shape in job.shapes:
        assert bool(shape.compute) == (ranks > 2 or shape.compatible or shape.paced)
        assert shape.rows % 8 == 0
        assert shape.width % (ranks * shape.head_size) == 0
        assert shape.inner * shape.width % ranks == 0
        assert all(ratio > 0 for ratio in shape.ratios)
        assert (shape.flops_per_s is None) == (ranks == 2 and not shape.paced)
        assert {"compute", "vanilla", "slicing 8", "ring"} <= set(shape.ways(ranks))
        assert ("bidirectional" in shape.ways(ranks)) == (ranks > 2)


@pytest.mark.parametrize(
    ("ms", "expected"),
    [((100,), False), ((100, 102), False), ((140, 100.9, 100), True), ((100, 100), True)],
)
def test_a_way_has_settled_when_its_two_fastest_steps_agree(
    ms: tuple[float, ...], expected: bool
) -> None:
    assert settled(times(*ms)["ns"]) is expected


def test_a_job_reaches_the_ranks_as_it_is(tmp_path: Path) -> None:
    """Through the file that they read."""
    write_job(FULL.blocks[0][1], tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == FULL.blocks[0][1]


def mode(step_ms: float, hidden: float) -> dict[str, Any]:
    """Results of one way; the first step is slow, and must not count."""
    return {
        "step_ms": [9999.0, step_ms, step_ms],
        "graph_ms": [9999.0, step_ms - 5, step_ms - 5],
        "compute_ms": 100.0,
        "communication_ms": 50.0,
        "hidden_fraction": hidden,
    }


def test_training_compares_both_with_the_better_of_the_two() -> None:
    """Decomposition alone took 120 ms, strands alone 125, both 100."""
    modes = {
        "eager": mode(180, 0.0),
        "plain-1": mode(150, 0.1),
        "decomposed-1": mode(120, 0.7),
        "plain-2": mode(125, 0.6),
        "2": mode(100, 0.95) | {"predicted_ms": 95.0},
    }
    modes["plain-2"]["predicted_ms"] = 126.0
    trained = TrainCase(target=0.5, rate="500mbit", micro_batches=2, comparison={"modes": modes})
    rows = by_metric(decompose_train.rows_of(trained))
    expected = {
        "communication_over_compute": 1.0,
        "decompose_vs_eager": 1.5,
        "decompose_vs_one_strand": 1.25,
        "strands_vs_one_strand": 1.2,
        "both_vs_eager": 1.8,
        "both_vs_one_strand": 1.5,
        "both_vs_better_of_two": 1.2,
        "predicted_over_measured": 1.0,  # of the graphs alone
        "predicted_over_measured_two_strands": 1.05,
    }
    assert {name: row.ratio for name, row in rows.items()} == pytest.approx(expected)
    text = decompose_train.tables([trained])
    assert "training, TP 2, 2 micro-batches" in text
    assert "95.0 %" in text


def test_jobs_of_a_case_are_put_together() -> None:
    """Each job's first step warms up, and each predicts from its own operators."""
    jobs = [
        {"2": mode(100, 0.9) | {"predicted_ms": 80.0, "search": "merge"}},
        {"2": mode(120, 0.7) | {"predicted_ms": 120.0, "search": "merge"}},
    ]
    found = {"eager": mode(180, 0.0)} | decompose_train.together(jobs)
    case = TrainCase(target=0.5, rate="500mbit", micro_batches=2, comparison={"modes": found})
    assert case.step_ms("2") == [100, 100, 120, 120]
    assert found["2"]["hidden_fraction"] == pytest.approx(0.8)
    assert found["2"]["predicted_ms"] == 100
    assert "search" not in found["2"]


@pytest.mark.parametrize("size", [decompose_train.FULL, decompose_train.QUICK])
def test_training_runs_what_its_rows_need(size: Any) -> None:
    """With few micro-batches too, where strands alone help least."""
    assert ("overlap.decompose", "auto") in size.layout
    assert 2 in {point.micro_batches for point in size.points}
    assert all(set(point.modes) == set(decompose_train.MODES) for point in size.points)
    assert size.steps >= 2


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert main(["bench", "decompose", "--part", "block"]) == 2
    error = capsys.readouterr().err
    assert "--part block" in error
    assert "blocks" in error
