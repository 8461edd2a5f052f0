"""Proves what `bench strands` makes of its measurements: rates, rows and tables."""

from typing import Any

import pytest

from interlace.bench.results import ResultRow
from interlace.bench.strand_rows import StrandCase, rows_of, summary_rows, tables
from interlace.bench.strands import FULL, QUICK, Point, rate_for

MIB = 2**20


def mode(step_ms: float, **other: Any) -> dict[str, Any]:
    """Results of one way; the first step is slow, and must not count."""
    return {
        "step_ms": [9999.0, step_ms, step_ms * 1.1],
        "graph_ms": [9999.0, step_ms - 10, step_ms - 8],
        "cpu_ms": [9999.0, 100.0, 100.0],
        "compute_ms": 200.0,
        "communication_ms": 100.0,
        "hidden_fraction": 0.25,
        "steady_hidden_fraction": 0.5,
        **other,
    }


def planned(step_ms: float, predicted_ms: float, values_mib: int, **other: Any) -> dict[str, Any]:
    return mode(
        step_ms,
        predicted_ms=predicted_ms,
        bound_ms=80.0,
        counted_bytes=values_mib * MIB,
        allocated_bytes=(values_mib + 1) * MIB,
        resident_bytes=None,
        **other,
    )


def case(**other: Any) -> StrandCase:
    modes = {
        "eager": mode(200.0),
        "1": planned(160.0, 150.0, 19),
        "segment_pairs": planned(130.0, 120.0, 20),
        "list": planned(120.0, 110.0, 20),
        "merge": planned(100.0, 88.0, 23, hidden_fraction=0.75, steady_hidden_fraction=0.95),
    }
    comparison = {"constant_bytes": 180 * MIB, "modes": modes | other}
    return StrandCase(target=0.5, rate="500mbit", micro_batches=8, comparison=comparison)


def by_metric(rows: list[ResultRow]) -> dict[str, ResultRow]:
    found = {row.metric: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_rows_compare_steps_that_ran_next_to_each_other() -> None:
    """Without the first step; more than 1 where ours is faster."""
    rows = by_metric(rows_of(case()))
    eager = rows["speedup_vs_eager"]
    assert (eager.ours, eager.baseline) == pytest.approx((105.0, 210.0))
    assert eager.ratio == pytest.approx(2.0)
    assert eager.spread == pytest.approx((2.0, 2.0))
    expected = {
        "speedup_vs_one_strand": 1.6,
        "speedup_vs_segment_pairs": 1.3,
        "speedup_vs_list": 1.2,
        "list_speedup_vs_segment_pairs": 130 / 120,
        "cpu_time_vs_eager": 1.0,
        "hidden_fraction": 3.0,
        "steady_hidden_fraction": 1.9,
        "communication_over_compute": 1.0,
        "gap_to_bound": 0.1,
    }
    assert {name: rows[name].ratio for name in expected} == pytest.approx(expected)
    assert {row.case for row in rows.values()} == {"comm 0.5x, 8 micro-batches"}


def test_predictions_are_compared_with_the_graphs_alone() -> None:
    """Not with the optimizer's part of a step; the summary is the median error over cases."""
    rows = by_metric(rows_of(case()))
    graph_ms = (90.0 + 92.0) / 2  # of the last two steps
    assert rows["predicted_over_measured"].ratio == pytest.approx(88.0 / graph_ms)
    worse = case(merge=planned(100.0, 2 * graph_ms, 23))
    best = case(merge=planned(100.0, graph_ms, 23))
    summary = by_metric(summary_rows([case(), worse, best]))
    error = summary["prediction_error"]
    assert error.ours == pytest.approx(1 - 88.0 / graph_ms)
    assert error.spread == pytest.approx((0.0, 1.0))
    assert set(summary) == {
        "prediction_error",
        *(f"prediction_error_{name}" for name in ("one_strand", "segment_pairs", "list")),
    }


def test_extra_memory_is_told_with_and_without_what_is_always_there() -> None:
    """Weights, gradients and optimizer state dilute it; both figures are given, and a figure
    that could not be measured is left out."""
    rows = by_metric(rows_of(case()))
    assert rows["extra_memory_fraction"].ratio == pytest.approx(204 / 200 - 1)
    assert rows["extra_value_memory_fraction"].ratio == pytest.approx(24 / 20 - 1)
    assert rows["extra_memory_fraction_counted"].ratio == pytest.approx(203 / 199 - 1)
    assert rows["extra_value_memory_fraction_counted"].ratio == pytest.approx(23 / 19 - 1)
    assert not any("resident" in name for name in rows)


def test_a_case_with_fewer_ways_has_fewer_rows() -> None:
    """The long step is run without the other searches."""
    few = {name: row for name, row in case().modes.items() if name in ("eager", "1", "merge")}
    short = StrandCase(
        target=1.0,
        rate="250mbit",
        micro_batches=16,
        comparison={"constant_bytes": 0, "modes": few},
    )
    metrics = by_metric(rows_of(short))
    assert {"speedup_vs_eager", "predicted_over_measured"} <= set(metrics)
    assert not any("segment_pairs" in name or "list" in name for name in metrics)
    text = tables([case(), short])
    assert "250mbit" in text
    assert "2.00x" in text
    assert all(len(line) <= 130 for line in text.splitlines())


def test_the_rate_follows_from_the_calibration() -> None:
    """At 300 Mbit/s, communication takes 100 ms and compute 200: half as fast makes them equal."""
    one = {"compute_ms": 200.0, "communication_ms": 100.0}
    assert rate_for(1.0, one, "300mbit") == "150mbit"
    assert rate_for(0.25, one, "300mbit") == "600mbit"
    nothing = one | {"communication_ms": 0.001}
    assert rate_for(2.0, nothing, "300mbit") == "1mbit"  # never 0, which would be no limit


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_every_point_has_what_its_rows_need(size: Any) -> None:
    """One strand gives the achieved ratio, `merge` is what all others are compared with."""
    assert all({"eager", "1", "merge"} <= set(point.modes) for point in size.points)
    assert any(isinstance(point, Point) and point.memory for point in size.points)
    assert size.steps >= 2
