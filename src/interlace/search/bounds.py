"""Lower bounds on the length of any order: what no search can beat.

1. The busiest lane, issuing included, and the longest path.
2. For two strands: take from each a chain of collectives of which each depends on the one before,
   with the compute that must run between them (descendants of the one, ancestors of the next), and
   drop everything else. What is left is a two-job shop, relaxed further by letting both lanes
   be preempted and rounding all times down to a grid. Its optimum is a shortest path in the plane
   of both jobs' progress (Akers 1956): a step along one axis or, where the jobs do not want the
   same lane, along the diagonal, costs one. With integer times all turns lie on the grid.
"""

from collections.abc import Mapping

import numpy as np

from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.search.chains import strand_of
from interlace.search.problem import Problem

GRID = 3000
"""Steps along each job: the bound loses at most one step per task, some tenths of a per cent."""


def lower_bound_ns(problem: Problem) -> int:
    """The best bound known here."""
    bounds = [_lanes_ns(problem), max(longest_paths(problem.graph, problem.solo_ns).values())]
    strands = sorted({strand_of(op.id) for op in problem.graph.operators})
    if len(strands) == 2:
        first, second = (_chain(problem, strand) for strand in strands)
        bounds.append(_two_jobs_ns(first, second, problem.graph.lanes))
    return max(bounds)


def _lanes_ns(problem: Problem) -> int:
    busy: dict[str, int] = {}
    for op in problem.graph.operators:
        busy[op.lane] = busy.get(op.lane, 0) + problem.solo_ns[op.id]
    issuing = problem.issue_ns * len(problem.graph.collectives)
    busy[COMPUTE_LANE] = busy.get(COMPUTE_LANE, 0) + issuing
    return max(busy.values())


def longest_paths(graph: OpGraph, solo_ns: Mapping[str, int]) -> dict[str, int]:
    """Time from the start of each operator to the end of the graph if nothing queued."""
    tail: dict[str, int] = {op.id: 0 for op in graph.operators}
    longest: dict[str, int] = {}
    for op in reversed(graph.operators):
        longest[op.id] = solo_ns[op.id] + tail[op.id]
        for source in op.inputs:
            tail[source] = max(tail[source], longest[op.id])
    return longest


def _chain(problem: Problem, strand: str) -> list[tuple[str, int]]:
    """[(lane, ns), ...]: tasks of one strand that can only run one after the other."""
    graph = problem.graph
    mine = [op for op in graph.operators if strand_of(op.id) == strand]
    collectives = [op.id for op in mine if op.is_collective]
    if not collectives:
        return []
    before = _reach({op.id: op.inputs for op in mine})
    chain = _heaviest_chain(collectives, before, problem.solo_ns)
    tasks: list[tuple[str, int]] = []
    for index, name in enumerate(chain):
        previous = chain[index - 1] if index else ""
        between = [
            op
            for op in mine
            if op.lane == COMPUTE_LANE
            and op.id in before[name]
            and (not previous or previous in before[op.id])
        ]
        compute = sum(problem.solo_ns[op.id] for op in between)  # issuing runs beside the transfer
        tasks += [(COMPUTE_LANE, compute), (graph.by_id[name].lane, problem.solo_ns[name])]
    last = chain[-1]
    after = [op for op in mine if op.lane == COMPUTE_LANE and last in before[op.id]]
    tasks.append((COMPUTE_LANE, sum(problem.solo_ns[op.id] for op in after)))
    return tasks


def _heaviest_chain(
    collectives: list[str], before: Mapping[str, frozenset[str]], solo_ns: Mapping[str, int]
) -> list[str]:
    """The collectives, each depending on the one before, with the largest total time."""
    weight: dict[str, int] = {}
    previous: dict[str, str] = {}
    for index, name in enumerate(collectives):  # in topological order
        earlier = [other for other in collectives[:index] if other in before[name]]
        best = max(earlier, key=lambda other: weight[other], default="")
        weight[name] = solo_ns[name] + (weight[best] if best else 0)
        previous[name] = best
    chain = [max(collectives, key=lambda name: weight[name])]
    while previous[chain[-1]]:
        chain.append(previous[chain[-1]])
    return chain[::-1]


def _reach(inputs: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    """All ancestors of each operator; keys must come in topological order."""
    found: dict[str, frozenset[str]] = {}
    for name, sources in inputs.items():
        found[name] = frozenset(sources).union(*(found[source] for source in sources))
    return found


def _two_jobs_ns(
    first: list[tuple[str, int]], second: list[tuple[str, int]], lanes: tuple[str, ...]
) -> int:
    total = max(sum(ns for _, ns in first), sum(ns for _, ns in second))
    if not first or not second or not total:
        return total
    step = max(1, total // GRID)
    x, y = (_on_grid(tasks, lanes, step) for tasks in (first, second))
    columns = np.arange(len(y) + 1)
    cost = columns.copy()  # row 0: only the second job moves
    for lane in x:
        reach = cost + 1
        diagonal = np.where(y != lane, cost[:-1] + 1, np.iinfo(np.int64).max // 2)
        reach[1:] = np.minimum(reach[1:], diagonal)
        # A step of the second job costs one more than the cell to its left.
        cost = np.minimum.accumulate(reach - columns) + columns
    return int(cost[-1]) * step


def _on_grid(tasks: list[tuple[str, int]], lanes: tuple[str, ...], step: int) -> np.ndarray:
    """The lane that a job wants in each step of its own time, rounded down task by task."""
    counts = [ns // step for _, ns in tasks]
    return np.repeat([lanes.index(lane) for lane, _ in tasks], counts)
