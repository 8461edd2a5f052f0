"""What repeats of a measurement say: a typical value, its spread, and whether to measure again."""

from collections.abc import Callable, Sequence
from math import ceil, sqrt
from statistics import fmean, median, quantiles
from typing import TypeVar

T = TypeVar("T")

OUTLIERS = 0.1
"""Share of the samples that is dropped at either end; a choice."""
MOST_TRIES = 3
"""How often one thing is measured at most, before the least noisy result is taken; a choice."""


def least_noisy(measure: Callable[[], T], excess: Callable[[T], float]) -> T:
    """The first result of `measure` whose `excess` is 0, of `MOST_TRIES` the one with the least.

    Collective if `measure` is: ranks must have agreed on what `excess` looks at, so that they try
    equally often.
    """
    best = measure()
    for _ in range(MOST_TRIES - 1):
        if not excess(best):
            break
        best = min(best, measure(), key=excess)
    return best


def typical(samples: Sequence[float]) -> float:
    """Mean without the tenth at either end (at least one sample each, from three samples on).

    A step is a sum of times. Where times are skewed, as those of gloo's transfers are, the mean
    predicts the sum, and the median is too short (seen: mean 14.6 ms, median 13.9 ms).
    """
    ordered = sorted(samples)
    drop = ceil(OUTLIERS * len(ordered)) if len(ordered) > 2 else 0
    return fmean(ordered[drop : len(ordered) - drop])


def spread(samples: Sequence[float]) -> float:
    """Interquartile range."""
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return high - low


def of_places(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Typical value and spread of one thing that is done at several places of a step, given the
    repeats at each. Places may be unlike each other: a layer whose experts get more rows takes
    longer every time. So nothing is an outlier because of its place, and the spread is that over
    repeats, which is put right for its mean: n repeats lie sqrt((n - 1) / n) closer to their own.
    """
    middles = [median(repeats) for repeats in samples]
    rest = [each - m for repeats, m in zip(samples, middles, strict=True) for each in repeats]
    around = [
        (each - fmean(repeats)) * sqrt(len(repeats) / max(1, len(repeats) - 1))
        for repeats in samples
        for each in repeats
    ]
    return fmean(middles) + typical(rest), spread(around)
