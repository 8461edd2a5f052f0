"""Published factors of two strands are read, and simulated ones are those of a possible step."""

from dataclasses import replace

import pytest

from interlace.bench.simulator_strands import (
    factor_error,
    published_factors,
    strand_rows,
    strand_scores,
    within,
)
from interlace.strategy.expected_error import FACTOR_POINTS


def test_rows_are_the_papers() -> None:
    """Fourteen of dense models and one of experts; ratios are those that the figures print."""
    rows = published_factors()
    assert [row.expert for row in rows] == [1] * 14 + [8]
    assert all(row.data * row.tensor * row.context * row.pipeline == 64 for row in rows)
    printed = [
        1.31,
        1.40,
        1.27,
        1.26,
        1.40,
        1.36,
        1.30,
        1.30,
        1.39,
        1.31,
        1.22,
        1.23,
        1.07,
        1.24,
        1.15,
    ]
    assert [row.factor for row in rows] == pytest.approx(printed, abs=0.006)
    assert rows[0].name == "Llama 8B, A40, 8K: dp 16, tp 4"
    assert rows[13].name == "Llama 66B, A800, 32K: tp 8, cp 4, pp 2"


def test_simulated_factors_are_possible() -> None:
    """Two strands gain at most what one exposes, and no device does more than its data sheet."""
    scores = strand_scores(every=6)
    assert [score.row.context for score in scores] == [1, 2, 2]
    for score in scores:
        one, two = score.exposed
        assert 0 < two < one < 1
        assert 1 < score.factor < 1 / (1 - one)
        assert 0.2 < score.tflops / (149.7 if score.row.cluster == "a40" else 312) < 0.8
    assert ("cp" in scores[1].lanes) > ("cp" in scores[0].lanes)


def test_the_error_is_the_one_that_is_told() -> None:
    """In `interlace plan` and `simulate`, and in the documentation; 13 of 15 are within 6 points,
    12 of the 14 dense ones. Our order is better than theirs in every row."""
    scores = strand_scores()
    assert factor_error(scores) == pytest.approx(FACTOR_POINTS, abs=0.05)
    assert (within(scores), len(scores)) == (13, 15)
    assert (within(scores[:-1]), scores[-1].row.expert) == (12, 8)
    assert all(score.own_factor > score.factor for score in scores)


def test_the_link_of_sockets_is_that_of_every_third_row() -> None:
    """The fraction of it in preset `a40` was fitted to gains of every third row, of which those
    hang on it whose rings cross between sockets; one strand of both then runs as fast as
    measured, to which nothing was fitted."""
    third = [score for score in strand_scores(every=3) if score.row.cluster == "a40"]
    crossing = [score for score in third if "cp" in score.lanes]
    assert [score.row.model for score in crossing] == ["llama-8b", "gpt-6.7b"]
    for score in crossing:
        assert score.row.tensor == 4
        assert score.tflops == pytest.approx(score.row.tflops, rel=0.03)
    assert sum(score.points**2 for score in crossing) < 54


def test_rows_of_experts_are_gathered_whole() -> None:
    """As the published program's Megatron does: each rank those of all, and results are summed
    back; that is most of what a step waits for."""
    score = strand_scores(every=14)[-1]
    assert score.row.expert == 8
    assert 0.5 * score.exposed[0] < score.lanes["ep"] < score.exposed[0]
    assert score.exposed[1] < 0.3 * score.exposed[0]


def test_scores_are_means_of_points() -> None:
    """By hand: off by 0, by 5 and by 10 points."""
    (score,) = strand_scores(every=15)
    published = score.row.factor
    three = [replace(score, factor=published + by) for by in (0, -0.05, 0.1)]
    assert factor_error(three) == pytest.approx(5)
    assert within(three) == 2
    rows = {row.metric: row for row in strand_rows(three)}
    assert rows["factor_error"].ours == pytest.approx(5)
    assert (rows["within_6_points"].ours, rows["within_6_points"].baseline) == (2, 3)
