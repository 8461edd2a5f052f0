"""Measure again what other work on the machine has spoilt."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST_TRIES = 3
"""So often one thing is measured before it is taken as it is."""


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
