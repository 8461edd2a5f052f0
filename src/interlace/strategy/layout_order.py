"""Layouts in the order of their bounds, found as far as a search asks for them.

What a rank of a pipeline keeps, and how many of its actions run two strands, follows from all of
its actions, of up to 64 stages and hundreds of micro-batches. So layouts of a pipeline that differ
only in how replicas share weights are a group with a bound of its own, that needs the actions of
few micro-batches. A group is looked into when a layout of it may be the next.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from interlace.errors import InputError
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.lower_bounds import Bounds, bound_or_none


class LayoutOrder:
    """Iterates over (bound in ns, layout) of those that fit into `room` bytes, as often as asked
    for, the shortest bound first."""

    def __init__(self, layouts: Iterable[JobLayout], bounds: Bounds, room: float) -> None:
        self._bounds, self._room = bounds, room
        self.able: list[JobLayout] = []
        """Those looked into whose schedule runs on so many ranks and layers."""
        self.too_large = 0
        """How many of those looked into need more memory."""
        self.count = 0
        """Of all layouts."""
        self._found: list[tuple[float, JobLayout]] = []
        self._next: list[tuple[float, int, JobLayout]] = []
        groups: dict[JobLayout, list[tuple[int, JobLayout]]] = {}
        for layout in layouts:
            groups.setdefault(_alike(layout), []).append((self.count, layout))
            self.count += 1
        self._groups = sorted(
            ((bounds.of_group_ns(own[0][1]), own[0][0], own) for own in groups.values()),
            reverse=True,
        )

    def __iter__(self) -> Iterator[tuple[float, JobLayout]]:
        at = 0
        while at < len(self._found) or self._advance():
            yield self._found[at]
            at += 1

    def _advance(self) -> bool:
        """Find one more; False if there is none."""
        while self._groups and (not self._next or self._groups[-1][0] <= self._next[0][0]):
            self._look_into(self._groups.pop()[-1])
        if not self._next:
            return False
        bound, _, layout = heapq.heappop(self._next)
        self._found.append((bound, layout))
        return True

    def _look_into(self, group: list[tuple[int, JobLayout]]) -> None:
        for number, layout in group:
            try:
                needed = self._bounds.least_bytes(layout, self._room)
            except InputError:  # the schedule does not run on so many ranks or layers
                continue
            self.able.append(layout)
            if needed > self._room:
                self.too_large += 1
            elif (bound := bound_or_none(self._bounds, layout)) is not None:
                heapq.heappush(self._next, (bound, number, layout))


def _alike(layout: JobLayout) -> JobLayout:
    """What layouts of a group have in common; without a pipeline, each is one of its own."""
    if layout.pipeline == 1:
        return layout
    return replace(layout, data_replicate=1, data_shard=1, zero=1, reduce="step")
