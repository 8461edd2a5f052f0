"""Room for delays: an order that stays short where operators take other times than planned.

In a run each operator takes a little more or less than its mean, and an exchange ends when the last
rank has come to it. Of orders that are equally long by the mean times, those lose least in which
transfers end well before they are needed. So an order is judged in a few worlds, in each of which
every time is drawn from around its mean, and a move is made if it lets the sum of their lengths get
no larger. By the mean times the order gets no longer, and it never needs more memory.
"""

import random
from collections.abc import Sequence
from copy import copy

from interlace.search.evaluator import Evaluator
from interlace.search.memory import Liveness
from interlace.search.polish import Moves
from interlace.search.window import Windowed
from interlace.search.window_memory import WindowedMemory

WORLDS = 4
"""Beside that of the mean times; a choice. With eight the same budget allows half as many moves,
and orders were as good."""
SPREAD = 0.35
"""Times are drawn evenly from 1 - SPREAD to 1 + SPREAD of their mean: a standard deviation of a
fifth. With a tenth orders of the bench of experts lost as much as without."""


def with_room(
    world: Evaluator, order: Sequence[int], values: Liveness, *, evaluations: int
) -> list[int]:
    """An order that is no longer than `order` and needs no more memory, and that loses less where
    times differ from those of `world`; the same one for the same arguments. `evaluations` are
    operators simulated, in all worlds together."""
    worlds = [world, *(_drawn(world, seed) for seed in range(WORLDS))]
    all_of_it = [Windowed(each, order) for each in worlds]
    mean = all_of_it[0]
    memory = WindowedMemory(values, mean, 0)
    memory.set_bound(memory.peak)
    moves = Moves(mean, random.Random(0), lambda: [p for each in all_of_it for p in each.waits()])
    longest = mean.length
    left = evaluations
    while left > 0 and moves.hot:
        low, window = moves.draw()
        left -= 4 + 2 * len(window)
        change = memory.attempt(low, window) if window else None
        if change is None or change.excess > 0:
            continue
        before = sum(each.length for each in all_of_it)
        attempts = [each.attempt(low, window) for each in all_of_it]
        left -= sum(attempt.stop - low for attempt in attempts)
        is_longer = attempts[0].length > longest
        if is_longer or sum(attempt.length for attempt in attempts) > before:
            for each, attempt in zip(all_of_it, attempts, strict=True):
                each.drop(attempt)
            continue
        memory.keep(change)
        for each, attempt in zip(all_of_it, attempts, strict=True):
            each.keep(attempt)
        moves.note_change()
    return mean.order


def _drawn(world: Evaluator, seed: int) -> Evaluator:
    """The same world with times that were drawn."""
    draw = random.Random(seed)
    found = copy(world)
    found.time = [int(ns * (1 + SPREAD * (2 * draw.random() - 1))) for ns in world.time]
    return found
