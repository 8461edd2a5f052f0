"""Event-driven list scheduling of one or two strands on one compute lane and several links.

Time advances with the compute lane. Whenever a collective's inputs are ready it is issued at
once; otherwise the ready compute operator with the highest priority runs; if none is ready
the lane idles until the next collective ends. Priority is the longest remaining path, collectives
included, so weight gradients, on which nothing depends, fill the gaps.

Longest paths of two strands differ in length (backward is about twice forward), and no single
rule is best for how far one strand may run ahead, so the forward strand's priorities are scaled
by a few factors and the shortest simulated schedule wins. The sequential order competes too, so
the result is never predicted to be slower than running the strands one after the other.
"""

import heapq
from collections.abc import Sequence

from interlace.ir.actions import Direction, label_of, strand
from interlace.search.bounds import longest_paths
from interlace.search.evaluator import Evaluator
from interlace.search.problem import Problem

SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Factors of the forward strand's priorities that are tried, of which the best result is taken; a
choice, from half to three times."""


def order_list(problem: Problem) -> tuple[str, ...]:
    """The shortest list schedule, forward strands scaled if there are others."""
    world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    found = list_orders(problem, world)
    return world.order(min(found, key=lambda order: world.length(order)[0]))


def list_orders(problem: Problem, world: Evaluator) -> list[list[int]]:
    """The sequential order and one list schedule for each scale."""
    strands = [label_of(op.id) for op in problem.graph.operators]
    return [list(range(len(world.names))), *_schedules(world, strands)]


def _schedules(world: Evaluator, strands: Sequence[str]) -> list[list[int]]:
    by_name = longest_paths(world.graph, dict(zip(world.names, world.time, strict=True)))
    paths = [by_name[name] for name in world.names]
    faster = [bool(each) and strand(each).direction == Direction.FORWARD for each in strands]
    scales = SCALES if any(faster) and not all(faster) else (1.0,)
    found = []
    for scale in scales:
        factors = [scale if f else 1.0 for f in faster]
        found.append(_schedule(world, [-path * f for path, f in zip(paths, factors, strict=True)]))
    return found


def _schedule(world: Evaluator, rank: Sequence[float]) -> list[int]:
    """One list schedule; of the operators that are ready the one of lowest rank runs."""
    missing = [len(sources) for sources in world.inputs]
    now = 0
    finish = [0] * len(rank)
    free = [0] * world.lanes
    waiting = [(0, i) for i in range(len(rank)) if not missing[i]]  # (ready time, operator)
    transfers: list[tuple[float, int]] = []
    computes: list[tuple[float, int]] = []
    order: list[int] = []
    while waiting or transfers or computes:
        while waiting and waiting[0][0] <= now:
            i = heapq.heappop(waiting)[1]
            heapq.heappush(transfers if world.lane[i] else computes, (rank[i], i))
        heap = transfers or computes
        if not heap:
            now = waiting[0][0]
            continue
        i = heapq.heappop(heap)[1]
        lane = world.lane[i]
        if lane:
            finish[i] = free[lane] = max(now, free[lane]) + world.time[i]
            now += world.issue_ns
        else:
            now = finish[i] = now + world.time[i]
        order.append(i)
        for user in world.users[i]:
            missing[user] -= 1
            if not missing[user]:
                at = max(finish[source] for source in world.inputs[user])
                heapq.heappush(waiting, (at, user))
    return order
