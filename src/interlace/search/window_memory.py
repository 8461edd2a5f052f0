"""Memory of an order that is changed a window at a time.

Which operator frees a value (its last reader, or the first to wait for a collective that reads it)
can only change between operators of the window, so only the window is counted again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.search.memory import Liveness
from interlace.search.window import Windowed


@dataclass(slots=True)
class MemoryChange:
    """What another sequence of a window means for memory."""

    low: int
    window: Sequence[int]
    during: list[int]
    """Bytes alive while each operator of the window runs."""
    kills: dict[int, list[int]]
    """Values freed after each operator of the window."""
    excess: int
    """By how much the bytes above the bound, summed over positions, would change."""


class WindowedMemory:
    """Bytes alive at every position of `current`, against a bound."""

    def __init__(self, values: Liveness, current: Windowed, bound: int) -> None:
        self.values = values
        self.current = current
        self.bound = bound
        self.readers = [
            (*values.users[v], v) if v < values.count else tuple(values.users[v])
            for v in range(len(values.size))
        ]
        """Operators that need each value, the one that makes it among them."""
        self.holders = [self._collectives_that_hold(v) for v in range(len(values.size))]
        self.kills: list[list[int]] = [[] for _ in range(values.count)]
        for value in range(len(values.size)):
            if not values.kept[value] and (value < values.count or values.users[value]):
                self.kills[current.order[self._freed_at(value)]].append(value)
        self.during = self._count(values.start, current.order, dict(enumerate(self.kills)))
        self.excess = sum(max(0, used - bound) for used in self.during)

    @property
    def peak(self) -> int:
        """Largest number of bytes alive."""
        return max([self.values.start, *self.during])

    def set_bound(self, bound: int) -> None:
        """Count against another bound."""
        self.bound = bound
        self.excess = sum(max(0, used - bound) for used in self.during)

    def over(self) -> list[int]:
        """Positions at which more than the bound is alive."""
        return [position for position, used in enumerate(self.during) if used > self.bound]

    def attempt(self, low: int, window: Sequence[int]) -> MemoryChange:
        """The change if the operators from position `low` on were replaced by `window`."""
        place, order = self.current.place, self.current.order
        high = low + len(window)
        for position, i in enumerate(window, low):
            place[i] = position
        kills: dict[int, list[int]] = {i: [] for i in window}
        for i in window:
            for value in self.kills[i]:
                kills[window[self._freed_at(value) - low]].append(value)
        for position in range(low, high):
            place[order[position]] = position
        before = self.during[low] - self.values.size[self.current.order[low]]
        during = self._count(before, window, kills)
        old = self.during[low:high]
        bound = self.bound
        excess = sum([used - bound for used in during if used > bound])
        excess -= sum([used - bound for used in old if used > bound])
        return MemoryChange(low, window, during, kills, excess)

    def keep(self, change: MemoryChange) -> None:
        """Count on with the window changed; `current` must be changed too."""
        self.during[change.low : change.low + len(change.window)] = change.during
        for i, values in change.kills.items():
            self.kills[i] = values
        self.excess += change.excess

    def _count(
        self, before: int, operators: Sequence[int], kills: dict[int, list[int]]
    ) -> list[int]:
        size = self.values.size
        found = []
        alive = before
        for i in operators:
            alive += size[i]
            found.append(alive)
            for value in kills[i]:
                alive -= size[value]
        return found

    def _collectives_that_hold(self, value: int) -> list[list[int]]:
        """Users of each collective that reads the value."""
        values = self.values
        readers = [c for c in values.users[value] if values.collectives[c]]
        return [values.users[c] for c in readers if values.users[c]]

    def _freed_at(self, value: int) -> int:
        """Position of the operator after which a value is freed."""
        place = self.current.place
        last = max([place[reader] for reader in self.readers[value]], default=-1)
        for users in self.holders[value]:
            last = max(last, min([place[user] for user in users]))
        return last
