"""Orders for little memory: the lowest peak there is, and merges in which one strand waits."""

import sys
from collections.abc import Iterator
from itertools import permutations

from interlace.search.chains import jobs
from interlace.search.evaluator import Evaluator
from interlace.search.memory import Alive, Liveness, peak_of
from interlace.search.optimal import smallest_peak_order
from interlace.search.polish import lower_peak
from interlace.search.problem import Problem

EVALUATIONS = 1_500_000
"""Most operators that the search for the lowest peak looks at; a choice: half a second at most."""
PER_OPERATOR = 1_200
"""The same budget of a small problem, for each of its operators; a choice."""
MAX_JOBS = 4
"""Jobs up to which all sequences are tried; a choice: four have 24."""


def smallest_peak(problem: Problem) -> tuple[tuple[str, ...], int]:
    """(order with the lowest peak found, its peak in bytes); the lowest of all for small problems.

    Its length plays no part."""
    world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    values = Liveness(problem.graph)
    order = lowest(problem, world, values)
    return world.order(order), peak_of(values, order)


def lowest(problem: Problem, world: Evaluator, values: Liveness) -> list[int]:
    """The order of `smallest_peak`, as numbers."""
    proven = smallest_peak_order(world, values)
    if proven is not None:
        return proven
    candidates = [*sequential(problem, world), _greedy(world, values)]
    best = min(candidates, key=lambda order: peak_of(values, order))
    if not best:
        return best
    budget = min(EVALUATIONS, PER_OPERATOR * len(best))
    return lower_peak(world, best, values, evaluations=budget, longest_ns=sys.maxsize)


def sequential(problem: Problem, world: Evaluator) -> Iterator[list[int]]:
    """One job after the other, in every sequence of up to `MAX_JOBS` jobs."""
    of_job = [world.numbers(op.id for op in own) for own in jobs(problem.graph).values()]
    sequences = permutations(of_job) if len(of_job) <= MAX_JOBS else [of_job]
    for sequence in sequences:
        yield [i for job in sequence for i in job]


def _greedy(world: Evaluator, values: Liveness) -> list[int]:
    """Always the ready operator that adds the least memory, or frees the most."""
    alive = Alive(values)
    missing = [len(set(sources)) for sources in world.inputs]
    ready = [i for i, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        i = min(ready, key=lambda i: (alive.growth(i), i))
        ready.remove(i)
        alive.issue(i)
        order.append(i)
        for user in set(world.users[i]):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order
