"""Improve an order under contention: moves as in `polish`, judged by the simulation itself.

The other searches know contention only from a simulation that was made before: every operator takes
what it took there, and lanes of one link are one queue. By those times they find what is about the
best order. What is left is found here by moves that `sim.lanes.simulate` finds no longer, up to a
number of operators simulated, so that every rank finds the same order. With keys of a ring and
tensor collectives over one PCIe switch orders came out up to 8 % shorter, elsewhere 0 to 1 %.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from interlace.ir.timeline import WAIT, Timeline
from interlace.search.evaluator import Evaluator
from interlace.search.memory import liveness, peak_of
from interlace.search.polish import WORTH, Moves, Ordered
from interlace.search.problem import Problem
from interlace.sim.lanes import simulate

SIMULATED = 100_000
"""Budget in operators simulated; a choice, about a second of one core."""
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
    values = liveness(problem.graph)
    current = _Current(world, world.numbers(order))
    best, peak = _simulated(problem, order), peak_of(values, current.order)
    most = max(problem.memory_bytes, peak) if problem.memory_bytes else inf

    def waits() -> list[int]:
        return _waits(best, world.order(current.order))

    moves = Moves(current, random.Random(0), waits)
    left, tried, was = SIMULATED, 0, best.length_ns
    while left > 0 and moves.hot:
        low, window = moves.draw()
        left -= 4 + len(window)
        if not window:
            continue
        changed = [*current.order[:low], *window, *current.order[low + len(window) :]]
        timeline = _simulated(problem, world.order(changed))
        left, tried = left - len(changed), tried + 1
        if timeline.length_ns <= best.length_ns:
            takes = peak_of(values, changed)
            if takes <= (most if timeline.length_ns < best.length_ns else peak):
                current.order, best, peak = changed, timeline, takes
                moves.note_change()
        if tried % PATIENCE == 0:
            if was - best.length_ns < WORTH * was:
                break
            was = best.length_ns
    return world.order(current.order)


def _simulated(problem: Problem, order: Sequence[str]) -> Timeline:
    return simulate(
        problem.graph,
        order,
        problem.solo_ns,
        issue_ns=problem.issue_ns,
        contention=problem.contention,
    )


def _waits(timeline: Timeline, order: Sequence[str]) -> list[int]:
    """Positions of the operators before which the rank waited; the last one if it waited at the
    end."""
    place = {name: position for position, name in enumerate(order)}
    waits, waited = [], False
    for span in timeline.spans:
        if span.kind == WAIT:
            waited = True
        elif waited:
            waits.append(place[span.name])
            waited = False
    return [*waits, len(order) - 1] if waited else waits
