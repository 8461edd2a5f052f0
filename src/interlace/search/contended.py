"""Improve an order under contention: moves as in `polish`, judged by the simulation itself.

The other searches know contention only from a simulation that was made before: every operator takes
what it took there, and lanes of one link are one queue. By those times they find what is about the
best order. What is left is found here by moves that the simulation finds no longer, up to a
number of operators simulated, so that every rank finds the same order. With keys of a ring and
tensor collectives over one PCIe switch orders came out up to 8 % shorter, elsewhere 0 to 1 %.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from interlace.search.contended_length import ContendedLength
from interlace.search.evaluator import Evaluator
from interlace.search.memory import liveness, peak_of
from interlace.search.polish import WORTH, Moves, Ordered
from interlace.search.problem import Problem

SIMULATED = 100_000
"""Budget in operators simulated; a choice that bounds the time of a search."""
PATIENCE = 150
"""Moves within which an order must get shorter by `WORTH` for the search to go on; a choice."""


@dataclass(slots=True)
class _Current(Ordered):
    world: Evaluator
    order: list[int]


def polish_contended(problem: Problem, order: Sequence[str]) -> tuple[str, ...]:
    """An order that takes no longer than `order` under the problem's contention, and where that has
    a memory bound no more than it, or than `order` takes if that is more; the same one for the same
    order. Of two that take equally long the one with the lower peak is kept."""
    world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    contended = ContendedLength(world, problem)
    values = liveness(problem.graph)
    current = _Current(world, world.numbers(order))
    length, waits = contended.of(current.order)
    peak = peak_of(values, current.order)
    most = max(problem.memory_bytes, peak) if problem.memory_bytes else inf
    moves = Moves(current, random.Random(0), lambda: waits)
    left, tried, was = SIMULATED, 0, length
    while left > 0 and moves.hot:
        low, window = moves.draw()
        left -= 4 + len(window)
        if not window:
            continue
        changed = [*current.order[:low], *window, *current.order[low + len(window) :]]
        found, waited = contended.of(changed)
        left, tried = left - len(changed), tried + 1
        if found <= length:
            takes = peak_of(values, changed)
            if takes <= (most if found < length else peak):
                current.order, length, waits, peak = changed, found, waited, takes
                moves.note_change()
        if tried % PATIENCE == 0:
            if was - length < WORTH * was:
                break
            was = length
    return world.order(current.order)
