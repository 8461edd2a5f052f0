"""The published baseline: segment pairing with barriers (DHelix, arXiv 2411.15871, section 4).

Each strand is cut into segments; a block runs one segment of either strand or one of both and ends
with a barrier, at which everything has finished. With P(i, j) the time of a block,

    T(i, j) = min(T(i-1, j) + P(i, -), T(i, j-1) + P(-, j), T(i-1, j-1) + P(i, j) if legal)

A pair is illegal when both segments hold a collective of the same link. Inside a block collectives
are launched as early as possible and the strand that does not wait for one goes first. The paper
groups a layer's operators by hand; here a traced graph is cut at its collectives, so that each
segment is a stretch of compute or one collective, and long stretches are cut further. The paper
plans one layer and repeats it; here the recurrence runs over the whole graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.search.chains import strand_of
from interlace.search.problem import Problem

CUTS = (1, 2, 4)
"""Parts into which a stretch of compute is cut; the best result is taken."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """An order with barriers."""

    order: tuple[str, ...]
    barriers: tuple[str, ...]
    """Operators after which the rank waits for everything in flight."""
    length_ns: int


def order_paper(problem: Problem) -> Blocks:
    """The best pairing over the segmentations in `CUTS`."""
    found = [pair_segments(problem, *segments(problem, parts)) for parts in CUTS]
    return min(found, key=lambda blocks: blocks.length_ns)


def segments(problem: Problem, parts: int) -> list[list[tuple[str, ...]]]:
    """Per strand: stretches of compute, each in `parts` of about equal time, and collectives."""
    strands: dict[str, list[list[str]]] = {}
    for op in problem.graph.operators:
        groups = strands.setdefault(strand_of(op.id), [[]])
        if op.is_collective:
            groups += [[op.id], []]
        else:
            groups[-1].append(op.id)
    found = []
    for groups in strands.values():
        cut = [part for group in groups if group for part in _parts(problem, group, parts)]
        found.append(cut)
    return found if len(found) > 1 else [*found, []]


def _parts(problem: Problem, group: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    total = sum(problem.solo_ns[name] for name in group)
    found: list[list[str]] = [[]]
    spent = 0
    for name in group:
        if found[-1] and spent >= total * len(found) / parts:
            found.append([])
        found[-1].append(name)
        spent += problem.solo_ns[name]
    return [tuple(part) for part in found]


def pair_segments(
    problem: Problem, first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]]
) -> Blocks:
    """The recurrence for one segmentation."""
    rows, columns = len(first), len(second)
    best: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {(0, 0): (0, (0, 0))}
    alone = [[block_ns(problem, [s]) for s in side] for side in (first, second)]
    for i in range(rows + 1):
        for j in range(columns + 1):
            options = []
            if i:
                options.append((best[i - 1, j][0] + alone[0][i - 1], (i - 1, j)))
            if j:
                options.append((best[i, j - 1][0] + alone[1][j - 1], (i, j - 1)))
            if i and j and legal(problem, first[i - 1], second[j - 1]):
                both = block_ns(problem, [first[i - 1], second[j - 1]])
                options.append((best[i - 1, j - 1][0] + both, (i - 1, j - 1)))
            if options:
                best[i, j] = min(options)
    blocks = []
    at = (rows, columns)
    while at != (0, 0):
        previous = best[at][1]
        pair = [*first[previous[0] : at[0]], *second[previous[1] : at[1]]]
        blocks.append(block_order(problem, pair))
        at = previous
    blocks.reverse()
    order = tuple(name for block in blocks for name in block)
    return Blocks(order, tuple(block[-1] for block in blocks), best[rows, columns][0])


def legal(problem: Problem, first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two segments may share a block: not if both use the same link."""
    by_id = problem.graph.by_id
    links = [{by_id[n].lane for n in part if by_id[n].is_collective} for part in (first, second)]
    return not links[0] & links[1]


def block_order(problem: Problem, parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Collectives first; segments hold either compute or one collective."""
    by_id = problem.graph.by_id
    ordered = sorted(parts, key=lambda part: not by_id[part[0]].is_collective)
    return tuple(name for part in ordered for name in part)


def block_ns(problem: Problem, parts: Sequence[Sequence[str]]) -> int:
    """Time of one block from barrier to barrier."""
    by_id = problem.graph.by_id
    now = 0
    free: dict[str, int] = {}
    for name in block_order(problem, parts):
        op = by_id[name]
        if op.is_collective:
            free[op.lane] = max(now, free.get(op.lane, 0)) + problem.solo_ns[name]
            now += problem.issue_ns
        else:
            now += problem.solo_ns[name]
    return max(now, *free.values()) if free else now


def busy_ns(problem: Problem) -> int:
    """Time for which the compute lane has work, issuing included."""
    graph = problem.graph
    computed = sum(problem.solo_ns[op.id] for op in graph.operators if not op.is_collective)
    return computed + problem.issue_ns * len(graph.collectives)
