"""Goodput against a simulation of the same failures, against the short formula, and at its ends."""

import math
import random

import pytest

from interlace.errors import InputError
from interlace.strategy.goodput import Failures, best_interval_s, goodput


def _simulated(mean_s: float, failures: Failures, interval_s: float, count: int) -> float:
    """Progress over time until so many failures: draw when each comes, count saved intervals."""
    draw, saved, clock = random.Random(5), 0, 0.0
    whole = interval_s + failures.save_s
    for _ in range(count):
        runs = draw.expovariate(1 / mean_s)
        saved += math.floor(runs / whole)
        clock += runs + failures.detect_s + failures.restart_s
    return saved * interval_s / clock


@pytest.mark.parametrize("devices", [1024, 16384, 98304])
@pytest.mark.parametrize("slow", [False, True])
def test_formula_is_within_one_percent_of_drawn_failures(devices: int, slow: bool) -> None:
    """For seconds and for half an hour until a job runs again, and for a given interval."""
    failures = Failures(detect_s=1800, restart_s=300) if slow else Failures(save_s=30)
    for interval in (None, 900.0):
        found = goodput(devices, failures, interval)
        drawn = _simulated(found.mean_time_s, failures, found.interval_s, 40_000)
        assert found.share == pytest.approx(drawn, rel=0.01)


def test_short_formula_is_its_limit() -> None:
    """A failure in 3 h, saves of 5 s: 81.2 % if it runs after 35 minutes, 96.4 % after 65 s."""
    rate = 1 / 3 / 16384
    for detect, restart, share in ((1800.0, 300.0, 0.812), (5.0, 60.0, 0.964)):
        found = goodput(16384, Failures(per_device_hour=rate, detect_s=detect, restart_s=restart))
        assert found.share == pytest.approx(share, abs=0.002)
        assert found.interval_s == pytest.approx(math.sqrt(2 * 5 * 3 * 3600), rel=0.02)


def test_no_interval_is_better_than_the_best() -> None:
    """And more devices, longer saves and later restarts leave less."""
    failures = Failures(save_s=60)
    best = goodput(50_000, failures)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert goodput(50_000, failures, best.interval_s * factor).share < best.share
    assert goodput(100_000, failures).share < best.share < goodput(100, failures).share < 1
    assert goodput(10**7, Failures(save_s=3600), 1e6).share == 0
    assert best_interval_s(1e4, 1e4) > 0


def test_what_is_not_possible_is_refused() -> None:
    """By name."""
    for name, wrong in (("per_device_hour", 0.0), ("save_s", -1.0), ("restart_s", math.nan)):
        with pytest.raises(InputError, match=name):
            Failures(**{name: wrong})
    with pytest.raises(InputError, match="interval_s"):
        goodput(8, Failures(), 0.0)
    with pytest.raises(InputError, match="devices"):
        goodput(0, Failures())
