"""An order that can be changed a window at a time without simulating all of it again.

The state of the simulation before every position is kept: time of the compute lane, times at
which links are free, ends of collectives. A changed window is simulated from its first position
until the state equals the old one again, up to a shift in time of everything that still matters;
the rest of the order then takes as long as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.search.evaluator import Evaluator


@dataclass(slots=True)
class Attempt:
    """A window of the order in another sequence, simulated."""

    low: int
    window: Sequence[int]
    length: int
    """Length of the whole order with the window changed, in ns."""
    stop: int
    """First position from which everything only shifts."""
    shift: int
    now_at: list[int]
    free_at: list[list[int]]
    ended: list[tuple[int, int]]
    """Collectives simulated again, with the ends that they had before."""


class Windowed:
    """An order of operator numbers; `attempt` a change, then `keep` or `drop` it."""

    def __init__(self, world: Evaluator, order: Sequence[int]) -> None:
        self.world = world
        self.order = list(order)
        self.place = [0] * len(world.names)
        self.finish = [0] * len(world.names)
        self.now_at: list[int] = []
        self.free_at: list[list[int]] = [[] for _ in range(world.lanes)]
        self.free_at[0] = [0] * len(self.order)  # compute: in `now_at`
        self.length = 0
        self.keep(self.attempt(0, self.order))

    def attempt(self, low: int, window: Sequence[int]) -> Attempt:
        """Simulate with the operators from position `low` on replaced by `window`, the same
        operators in another sequence that respects dependencies. `keep` or `drop` must follow."""
        world, order, finish = self.world, self.order, self.finish
        slow, lanes, time, issue_ns = world.slow_inputs, world.lane, world.time, world.issue_ns
        known = bool(self.now_at)
        now = self.now_at[low] if known else 0
        free = [lane[low] for lane in self.free_at] if known else [0] * world.lanes
        begin_free = tuple(free)
        now_at: list[int] = []
        free_at: list[list[int]] = [[] for _ in free]
        links = range(1, world.lanes)
        ended: list[tuple[int, int]] = []
        high = low + len(window)
        position = low
        while position < len(order):
            if position < high:
                i = window[position - low]
            elif self._rejoined(position, now, free, begin_free, ended):
                break
            else:
                i = order[position]
            now_at.append(now)
            for link in links:
                free_at[link].append(free[link])
            for source in slow[i]:
                if finish[source] > now:  # noqa: PLR1730  a call takes longer
                    now = finish[source]
            lane = lanes[i]
            if lane:
                start = free[lane] if free[lane] > now else now
                ended.append((i, finish[i]))
                finish[i] = free[lane] = start + time[i]
                now += issue_ns
            else:
                now += time[i]
            position += 1
        if position < len(order):
            shift = now - self.now_at[position]
            length = self.length + shift
        else:
            shift, length = 0, max(now, *free)
        return Attempt(low, window, length, position, shift, now_at, free_at, ended)

    def _rejoined(
        self,
        position: int,
        now: int,
        free: list[int],
        begin_free: tuple[int, ...],
        ended: list[tuple[int, int]],
    ) -> bool:
        """Whether all times that still matter differ from the old ones by the same shift."""
        before = self.now_at[position]
        shift = now - before
        earlier = before if shift > 0 else now
        for link in range(1, len(free)):
            is_free, was_free = free[link], self.free_at[link][position]
            if (is_free > now or was_free > before) and is_free - was_free != shift:
                return False
            if shift and begin_free[link] > earlier:  # issued before the window, so not shifted
                return False
        finish = self.finish
        for i, was in reversed(ended):
            end = finish[i]
            if (end > now or was > before) and end - was != shift:
                return False
        return True

    def keep(self, attempt: Attempt) -> None:
        """Make the attempt the current order."""
        low, stop, shift = attempt.low, attempt.stop, attempt.shift
        for position, i in enumerate(attempt.window, low):
            self.order[position] = i
            self.place[i] = position
        self.now_at[low:stop] = attempt.now_at
        for own, new in zip(self.free_at[1:], attempt.free_at[1:], strict=True):
            own[low:stop] = new
        if shift:
            self.now_at[stop:] = [now + shift for now in self.now_at[stop:]]
            for own in self.free_at[1:]:
                own[stop:] = [free + shift for free in own[stop:]]
            for i in self.order[stop:]:
                if self.world.lane[i]:
                    self.finish[i] += shift
        self.length = attempt.length

    def drop(self, attempt: Attempt) -> None:
        """Forget the attempt."""
        for i, was in attempt.ended:
            self.finish[i] = was

    def waits(self) -> list[int]:
        """Positions at which the compute lane waits."""
        return [position for position in range(len(self.order)) if self.waits_at(position)]

    def waits_at(self, position: int) -> bool:
        """Whether the compute lane waits before the operator at `position`."""
        i = self.order[position]
        now = self.now_at[position]
        return any(self.finish[source] > now for source in self.world.slow_inputs[i])
