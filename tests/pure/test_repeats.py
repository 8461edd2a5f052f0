"""Typical values and spreads of things that are done at several places of a step."""

from random import Random
from statistics import NormalDist, fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.measure.repeats import of_places

QUARTILES = 2 * NormalDist().inv_cdf(0.75)


@given(
    st.lists(st.floats(1, 1e9), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_places_that_are_unlike_but_steady(times: list[float], repeats: int) -> None:
    """Their mean counts, none is an outlier, and nothing varies."""
    found, spread = of_places([[time] * repeats for time in times])
    assert found == pytest.approx(fmean(times))
    assert spread == pytest.approx(0, abs=1e-6 * max(times))


def test_three_repeats_that_vary_say_by_how_much() -> None:
    """Normal times with a standard deviation of 2 around a place's own mean, which is drawn from
    a much wider range."""
    draw = Random(0)
    places = [draw.uniform(100, 1000) for _ in range(2000)]
    found, spread = of_places([[draw.gauss(each, 2) for _ in range(3)] for each in places])
    assert found == pytest.approx(fmean(places), abs=0.1)
    assert spread == pytest.approx(2 * QUARTILES, rel=0.05)


def test_an_interruption_of_one_repeat_does_not_count() -> None:
    """One of thirty times is ten times as long."""
    found, spread = of_places([*[[10.0] * 3] * 9, [10.0, 110.0, 10.0]])
    assert (found, spread) == (10, 0)
