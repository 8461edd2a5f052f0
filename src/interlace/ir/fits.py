"""A straight line through measured times: fixed cost plus cost per unit of work."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """at_zero + slope * work."""

    at_zero: float
    slope: float

    def at(self, work: float) -> float:
        """The line's value at `work`."""
        return self.at_zero + self.slope * work


def fit_line(samples: Sequence[tuple[float, float]]) -> Line | None:
    """The line through (work, time) with the least squared *relative* error, neither part
    negative. One size alone gives a time in proportion to the work; no samples give None.

    Relative, because times span three orders of magnitude: plain least squares would fit the
    largest and get latencies wrong by any factor.
    """
    samples = [(work, max(time, 1.0)) for work, time in samples]
    if not samples:
        return None
    # Weighted normal equations with weights 1 / time^2.
    ones = sum(1 / time**2 for _, time in samples)
    works = sum(work / time**2 for work, time in samples)
    squares = sum(work**2 / time**2 for work, time in samples)
    times = sum(1 / time for _, time in samples)
    products = sum(work / time for work, time in samples)
    proportional = Line(0.0, products / squares) if squares else Line(times / ones, 0.0)
    if len({work for work, _ in samples}) == 1:
        return proportional
    determinant = ones * squares - works**2
    line = Line(
        (times * squares - products * works) / determinant,
        (ones * products - works * times) / determinant,
    )
    if line.at_zero < 0:
        return proportional
    return line if line.slope >= 0 else Line(times / ones, 0.0)
