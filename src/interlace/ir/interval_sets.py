"""Sets of moments as sorted lists of (start, end) that do not touch each other."""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in at least one of `intervals`; empty ones count for nothing."""
    found: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[1] > each[0]):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """How long a set is."""
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments in both of two sets."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments of the first set that are not in the second."""
    found: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > at:
                found.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found
