"""Merges spans that are too short to see, so that a picture of 10^4 spans stays small and true.

A span at least `wide` columns long is kept as it is. Shorter ones are spread over the columns
they cover; each column then shows one group, and what the others lost there is carried to the
next columns. So every group keeps its share of the lane's length, which showing the largest group
per column would not (waits of 0.4 columns between computations of 0.6 would vanish).
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from interlace.ir.timeline import Span

G = TypeVar("G", bound=Hashable)
_TINY = 1e-9
"""Parts of a column below this count as nothing: rounding errors of sums of fractions. A choice."""


@dataclass(frozen=True, slots=True)
class DrawnPiece(Generic[G]):
    """A rectangle of a lane: one wide span, or a run of columns that show one group."""

    group: G
    start_ns: float
    end_ns: float
    is_whole: bool
    """Whether it is one span, wide enough to be drawn by itself."""


def pieces(
    spans: Iterable[tuple[Span, G]],
    *,
    start_ns: int,
    end_ns: int,
    columns: int,
    wide: float = 4.0,
) -> list[DrawnPiece[G]]:
    """Rectangles for one lane's spans (each with its group) between two times."""
    width_ns = (end_ns - start_ns) / columns
    found: list[DrawnPiece[G]] = []
    coverage: dict[G | None, NDArray[np.float64]] = {None: np.zeros(columns)}
    covered_by_wide = np.zeros(columns)
    for span, group in spans:
        low, high = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
        if low >= high:
            continue
        is_wide = high - low >= wide * width_ns
        if is_wide:
            found.append(DrawnPiece(group, low, high, True))
        target = covered_by_wide if is_wide else coverage.setdefault(group, np.zeros(columns))
        _cover(target, (low - start_ns) / width_ns, (high - start_ns) / width_ns)
    narrow = sum(coverage.values())
    coverage[None] = np.clip(1.0 - narrow - covered_by_wide, 0.0, 1.0)
    shown = _diffuse(coverage, np.flatnonzero(narrow > _TINY))
    for group, first, last in _runs(shown):
        low, high = start_ns + first * width_ns, start_ns + last * width_ns
        found.append(DrawnPiece(group, low, high, False))
    return found


def _cover(target: NDArray[np.float64], low: float, high: float) -> None:
    """Add to each column the part of it that lies between two positions in columns."""
    first, last = int(low), min(int(high), len(target) - 1)
    if first == last:
        target[first] += high - low
        return
    target[first] += first + 1 - low
    target[first + 1 : last] += 1.0
    target[last] += high - last


def _diffuse(
    coverage: dict[G | None, NDArray[np.float64]], columns: NDArray[np.intp]
) -> dict[int, G]:
    """The group that each column shows, chosen so that shares are kept along the lane."""
    groups = list(coverage)
    parts = np.stack([coverage[group] for group in groups])
    owed = np.zeros(len(groups))
    shown: dict[int, G] = {}
    for column in columns:
        part = parts[:, column]
        owed += part
        chosen = int(np.argmax(np.where(part > _TINY, owed, -np.inf)))
        owed[chosen] -= part.sum()
        group = groups[chosen]
        if group is not None:
            shown[int(column)] = group
    return shown


def _runs(shown: dict[int, G]) -> list[tuple[G, int, int]]:
    """Neighbouring columns that show the same group, as (group, first, last + 1)."""
    runs: list[tuple[G, int, int]] = []
    for column, group in sorted(shown.items()):
        if runs and runs[-1][0] == group and runs[-1][2] == column:
            runs[-1] = (group, runs[-1][1], column + 1)
        else:
            runs.append((group, column, column + 1))
    return runs
