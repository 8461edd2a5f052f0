"""Improve an order by moving operators: seeded hill climbing.

A move brings an operator, with what it needs, before another one, or puts an operator off, with
what needs it. Most moves start where there is something to gain: at waits, or where memory is
above its bound. The number of operators simulated, not the clock, limits the search, so that
every rank finds the same order.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from interlace.search.evaluator import Evaluator
from interlace.search.memory import Liveness
from interlace.search.window import Windowed
from interlace.search.window_memory import WindowedMemory

NEAR = 25
"""Mean distance, in operators, between the ends of a move; a choice."""
PEAK_STEP = 0.01
"""Share by which `lower_peak` asks for less each time; a choice."""


WORTH = 0.001
"""Share by which an order must be about to get shorter for polishing to go on, where it may give
up; a choice: times vary by more than that from step to step."""


class _Pace:
    """How fast something falls, by parts of the budget."""

    def __init__(self, part: int) -> None:
        self.part = part
        """Operators simulated after which to look; 0 for never."""
        self.begin(0, 0)

    def begin(self, left: int, now: int) -> None:
        """From here on, with so much budget left."""
        self.left, self.was = left, now

    def too_slow(self, left: int, now: int, wanted: float) -> bool:
        """Whether `now` would not fall by `wanted` with what is left, if it fell as in the last
        part."""
        spent = self.left - left
        if not self.part or spent < self.part:
            return False
        gained = self.was - now
        self.begin(left, now)
        return gained * left < wanted * spent


def polish(
    world: Evaluator,
    order: Sequence[int],
    *,
    evaluations: int,
    seed: int = 0,
    values: Liveness | None = None,
    bound: int = 0,
    part: int = 0,
) -> list[int]:
    """An order at most as long as `order`; the same one for the same arguments.

    With `values` and a memory `bound` in bytes, first the bytes above the bound, summed over
    positions, are made fewer, at the price of length if need be, and never more again. Once it is
    within the bound, it gives up after `part` evaluations whose pace would not make it shorter by
    `WORTH`; never if that is 0.
    """
    current = Windowed(world, order)
    memory = WindowedMemory(values, current, bound) if values else None
    chooser = random.Random(seed)

    def hot() -> list[int]:
        return memory.over() if memory and memory.excess else current.waits()

    moves = Moves(current, chooser, hot)
    left, pace = evaluations, _Pace(part)
    pace.begin(left, current.length)
    while left > 0 and moves.hot:
        left -= _try(current, memory, moves, longest=0)
        if memory and memory.excess:
            pace.begin(left, current.length)
        elif pace.too_slow(left, current.length, WORTH * current.length):
            break
    return current.order


def lower_peak(
    world: Evaluator,
    order: Sequence[int],
    values: Liveness,
    *,
    evaluations: int,
    longest_ns: int,
    part: int = 0,
) -> list[int]:
    """An order with a lower peak if one is found. It is no longer than `longest_ns` if `order` is
    not. Gives up after `part` evaluations whose pace would not make the peak lower by `PEAK_STEP`;
    never if that is 0."""
    current = Windowed(world, order)
    memory = WindowedMemory(values, current, 0)
    best, peak = current.order.copy(), memory.peak
    moves = Moves(current, random.Random(0), memory.over)
    left, pace = evaluations, _Pace(part)
    while left > 0:
        memory.set_bound(int(peak * (1 - PEAK_STEP)))
        moves.look()
        pace.begin(left, memory.excess)
        while left > 0 and memory.excess and moves.hot:
            left -= _try(current, memory, moves, longest=longest_ns)
            if pace.too_slow(left, memory.excess, memory.excess):
                left = 0
        left -= len(best)
        if memory.peak < peak:
            best, peak = current.order.copy(), memory.peak
        elif not moves.hot or not memory.excess:
            break
    return best


def _try(current: Windowed, memory: WindowedMemory | None, moves: "Moves", *, longest: int) -> int:
    """Draw a move and make it if it is no step back; the operators that were looked at.

    Less memory above the bound counts first, as long as the order stays within `longest` ns (0 for
    no limit); at equal memory it may get no longer than it is, or than `longest`.
    """
    low, window = moves.draw()
    spent = 4 + len(window)
    if not window:
        return spent
    change = memory.attempt(low, window) if memory and memory.excess else None
    if change and change.excess > 0:
        return spent + len(window)
    attempt = current.attempt(low, window)
    spent += attempt.stop - low
    limit = max(longest, current.length)
    if change and change.excess < 0 and not longest:
        limit = attempt.length
    if attempt.length <= limit and memory and not change:
        change = memory.attempt(low, window)
        spent += len(window)
    if attempt.length > limit or (change and change.excess > 0):
        current.drop(attempt)
        return spent
    if memory and change:
        memory.keep(change)
    current.keep(attempt)
    moves.note_change()
    return spent


class Ordered(Protocol):
    """An order that moves change."""

    world: Evaluator
    order: list[int]


class Moves:
    """Draws changes of an order that respect dependencies."""

    def __init__(
        self, current: "Ordered", chooser: random.Random, find_hot: Callable[[], list[int]]
    ) -> None:
        self.current = current
        self.chooser = chooser
        self.find_hot = find_hot
        self.look()

    def look(self) -> None:
        """Find anew the positions at which there is something to gain."""
        self.hot = self.find_hot()
        self.changes = self.draws = 0

    def note_change(self) -> None:
        """Take note that the order is another one now."""
        self.changes += 1

    def draw(self) -> tuple[int, list[int]]:
        """(first position, operators from there on in their new sequence); may be empty."""
        self.draws += 1
        patience = 20 + len(self.current.order) // 16
        if self.changes >= patience or (self.changes and self.draws >= 20 * patience):
            self.look()
            if not self.hot:
                return 0, []
        chance = self.chooser.random()
        last = len(self.current.order) - 1
        distance = 1 + int(self.chooser.expovariate(1 / NEAR))
        position = self.chooser.choice(self.hot) if chance < 0.7 else self.chooser.randint(0, last)
        if chance < 0.5:
            return self.pull(position, min(last, position + distance))
        if chance < 0.55:
            return self.push(max(0, position - distance), position)
        return self.push(position, min(last, position + distance))

    def pull(self, target: int, source: int) -> tuple[int, list[int]]:
        """The operator at `source`, after what it needs, goes before the one at `target`."""
        order, inputs = self.current.order, self.current.world.inputs
        taken, left = [order[source]], []
        needed = set(inputs[order[source]])
        for position in range(source - 1, target - 1, -1):
            i = order[position]
            if i in needed:
                taken.append(i)
                needed.update(inputs[i])
            else:
                left.append(i)
        return (target, taken[::-1] + left[::-1]) if left else (target, [])

    def push(self, source: int, target: int) -> tuple[int, list[int]]:
        """The operator at `source`, before what needs it, goes after the one at `target`."""
        order, users = self.current.order, self.current.world.users
        taken, left = [order[source]], []
        needing = set(users[order[source]])
        for position in range(source + 1, target + 1):
            i = order[position]
            if i in needing:
                taken.append(i)
                needing.update(users[i])
            else:
                left.append(i)
        return (source, left + taken) if left else (source, [])
