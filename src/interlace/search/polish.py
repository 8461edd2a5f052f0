"""Improve an order by moving single operators: seeded hill climbing on simulated length.

A move takes one operator to another place between its last input and its first user. Moves start
at operators near waits, where there is something to gain. The number of evaluations, not the clock,
limits the search, so that every rank finds the same order.
"""

import random
from collections.abc import Mapping, Sequence

from interlace.ir.graph import OpGraph


class Evaluator:
    """Length of an order of operator numbers; `sim.strands.simulate` without the spans."""

    def __init__(self, graph: OpGraph, solo_ns: Mapping[str, int], issue_ns: int) -> None:
        number = {op.id: i for i, op in enumerate(graph.operators)}
        lanes = {lane: i for i, lane in enumerate(graph.lanes)}
        self.names = [op.id for op in graph.operators]
        self.number = number
        self.issue_ns = issue_ns
        self.inputs = [tuple(number[i] for i in op.inputs) for op in graph.operators]
        self.slow_inputs = [
            tuple(number[i] for i in op.inputs if graph.by_id[i].is_collective)
            for op in graph.operators
        ]
        self.lane = [lanes[op.lane] for op in graph.operators]
        self.time = [solo_ns[op.id] for op in graph.operators]
        self.lanes = len(lanes)
        self.users: list[list[int]] = [[] for _ in self.names]
        for i, sources in enumerate(self.inputs):
            for source in sources:
                self.users[source].append(i)

    def length(self, order: Sequence[int]) -> tuple[int, list[int]]:
        """(length in ns, positions in the order at which the compute lane waited)."""
        now = 0
        finish = [0] * len(self.names)
        free = [0] * self.lanes
        waits = []
        for position, i in enumerate(order):
            for source in self.slow_inputs[i]:
                if finish[source] > now:
                    now = finish[source]
                    if not waits or waits[-1] != position:
                        waits.append(position)
            lane = self.lane[i]
            if lane:
                begin = free[lane] if free[lane] > now else now
                finish[i] = free[lane] = begin + self.time[i]
                now += self.issue_ns
            else:
                now += self.time[i]
        return max(now, *free), waits


def polish(
    graph: OpGraph,
    order: Sequence[str],
    solo_ns: Mapping[str, int],
    *,
    issue_ns: int,
    evaluations: int,
    seed: int = 0,
) -> tuple[str, ...]:
    """An order at most as long as `order`; the same one for the same arguments."""
    evaluator = Evaluator(graph, solo_ns, issue_ns)
    chooser = random.Random(seed)
    current = [evaluator.number[name] for name in order]
    best, waits = evaluator.length(current)
    for _ in range(evaluations):
        if not waits:
            break
        moved = _neighbour(evaluator, current, waits, chooser)
        if moved is None:
            continue
        length, moved_waits = evaluator.length(moved)
        if length <= best:
            current, best, waits = moved, length, moved_waits
    return tuple(evaluator.names[i] for i in current)


def _neighbour(
    evaluator: Evaluator, order: list[int], waits: list[int], chooser: random.Random
) -> list[int] | None:
    """`order` with an operator moved before a wait, or a random one moved anywhere it may go."""
    place = {i: position for position, i in enumerate(order)}
    if chooser.random() < 0.6:
        target = chooser.choice(waits)
        source = min(len(order) - 1, target + 1 + int(chooser.expovariate(1 / 25)))
    else:
        source = chooser.randrange(len(order))
        target = -1
    i = order[source]
    low = max((place[j] + 1 for j in evaluator.inputs[i]), default=0)
    high = min((place[j] - 1 for j in evaluator.users[i]), default=len(order) - 1)
    if target < 0:
        target = chooser.randint(low, high)
    if not low <= target <= high or target == source:
        return None
    moved = order.copy()
    moved.pop(source)
    moved.insert(target, i)
    return moved
