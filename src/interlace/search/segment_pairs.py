"""The published baseline: segment pairing with barriers (DHelix, arXiv 2411.15871, section 4).

Each strand is cut into segments; a block runs one segment of either strand or one of both and ends
with a barrier, at which everything has finished. With P(i, j) the time of a block,

    T(i, j) = min(T(i-1, j) + P(i, -), T(i, j-1) + P(-, j), T(i-1, j-1) + P(i, j) if legal)

A pair is illegal when both segments hold a collective of the same link. Inside a block collectives
are launched as early as possible and the strand that does not wait for one goes first. The paper
groups a layer's operators by hand; here a traced graph is cut at its collectives, so that each
segment is a stretch of compute or one collective, and long stretches are cut further. The paper
plans one layer and repeats it; here the recurrence runs over the whole graph.

Their program also runs operators of one strand beside its own collective where they do not read
it: the gradient of a weight beside the scattered sum of that of its input, a block of attention
beside the hop that brings the keys of the next. `beside` makes a segment of such a collective and
what follows it; without it, as plans of this package have it, nothing shares a block within a
strand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.search.chains import jobs
from interlace.search.problem import Problem

CUTS = (1, 2, 4)
"""Parts into which a stretch of compute is cut, of which the best result is taken; a choice."""
_NEVER = np.iinfo(np.int64).max // 4
"""Time, in ns, of a pair that is not allowed: longer than any phase, and sums still fit int64."""

Segment = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """An order with barriers."""

    order: tuple[str, ...]
    barriers: tuple[str, ...]
    """Operators after which the rank waits for everything in flight."""
    length_ns: int


def order_segment_pairs(
    problem: Problem, *, beside: bool = False, barrier_ns: int = 0, cuts: Sequence[int] = CUTS
) -> Blocks:
    """The best pairing over the segmentations in `cuts`, if a barrier takes so long by itself."""
    found = [
        pair_segments(problem, *segments(problem, parts, beside=beside), barrier_ns)
        for parts in cuts
    ]
    return min(found, key=lambda blocks: blocks.length_ns)


def segments(
    problem: Problem, parts: int, *, beside: bool = False
) -> tuple[list[Segment], list[Segment]]:
    """Segments of the first job, and of all others: stretches of compute, each in `parts` of about
    equal time, and collectives; with `beside`, a collective and what follows without reading it."""
    found: list[list[Segment]] = []
    for operators in jobs(problem.graph).values():
        groups: list[list[str]] = [[]]
        closed: list[bool] = [False]
        after: set[str] = set()
        """What reads the last collective, or something that does."""
        for op in operators:
            if op.is_collective:
                groups += [[op.id], []]
                closed += [True, False]
                after = {op.id}
                continue
            if after.intersection(op.inputs):
                after.add(op.id)
            if beside and not groups[-1] and len(groups) > 1 and op.id not in after:
                groups[-2].append(op.id)
            else:
                groups[-1].append(op.id)
        found.append(
            [
                part
                for group, whole in zip(groups, closed, strict=True)
                if group
                for part in _parts(problem, group, 1 if whole else parts)
            ]
        )
    first, *others = found or [[]]
    return first, [segment for other in others for segment in other]


def _parts(problem: Problem, group: Sequence[str], parts: int) -> list[Segment]:
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
    problem: Problem, first: Sequence[Segment], second: Sequence[Segment], barrier_ns: int = 0
) -> Blocks:
    """The recurrence for one segmentation, row by row."""
    alone = [
        np.array([block_ns(problem, [s]) + barrier_ns for s in side], dtype=np.int64)
        for side in (first, second)
    ]
    done = np.concatenate([[0], np.cumsum(alone[1], dtype=np.int64)])
    times = np.zeros((len(first) + 1, len(second) + 1), dtype=np.int64)
    times[0] = done
    pairs = _pairs(problem, first, second) + barrier_ns
    for i in range(1, len(first) + 1):
        reached = times[i - 1] + alone[0][i - 1]
        both = times[i - 1, :-1] + pairs[i - 1]
        np.minimum(reached[1:], both, out=reached[1:])
        # From there on the second strand may go on alone.
        times[i] = np.minimum.accumulate(reached - done) + done
    blocks = []
    i, j = len(first), len(second)
    while i or j:
        if i and times[i, j] == times[i - 1, j] + alone[0][i - 1]:
            pair, i = [first[i - 1]], i - 1
        elif i and j and times[i, j] == times[i - 1, j - 1] + pairs[i - 1, j - 1]:
            pair, i, j = [first[i - 1], second[j - 1]], i - 1, j - 1
        else:
            pair, j = [second[j - 1]], j - 1
        blocks.append(block_order(problem, pair))
    blocks.reverse()
    order = tuple(name for block in blocks for name in block)
    return Blocks(order, tuple(block[-1] for block in blocks), int(times[-1, -1]))


def _pairs(problem: Problem, first: Sequence[Segment], second: Sequence[Segment]) -> np.ndarray:
    """Times of all blocks of two; segments that look alike are timed once."""
    by_id = problem.graph.by_id

    def look(segment: Segment) -> tuple[tuple[str, int], ...]:
        busy: dict[str, int] = {}
        for name in segment:
            lane = by_id[name].lane
            busy[lane] = busy.get(lane, 0) + problem.solo_ns[name]
        return tuple(sorted(busy.items()))

    looks = [[look(segment) for segment in side] for side in (first, second)]
    kinds = [list(dict.fromkeys(side)) for side in looks]
    samples = [dict(zip(looks[k], side, strict=True)) for k, side in enumerate((first, second))]
    table = np.full([max(1, len(side)) for side in kinds], _NEVER, dtype=np.int64)
    for i, x in enumerate(kinds[0]):
        for j, y in enumerate(kinds[1]):
            pair = [samples[0][x], samples[1][y]]
            if legal(problem, *pair):
                table[i, j] = block_ns(problem, pair)
    places = [[kinds[k].index(own) for own in side] for k, side in enumerate(looks)]
    rows, columns = (np.array(place, dtype=np.int64) for place in places)
    return table[rows[:, None], columns[None, :]]


def legal(problem: Problem, first: Segment, second: Segment) -> bool:
    """Whether two segments may share a block: not if both use the same link."""
    by_id = problem.graph.by_id
    links = [{by_id[n].lane for n in part if by_id[n].is_collective} for part in (first, second)]
    return not links[0] & links[1]


def block_order(problem: Problem, parts: Sequence[Segment]) -> Segment:
    """Collectives first; of a segment with one, no other operator reads it."""
    by_id = problem.graph.by_id
    names = [name for part in parts for name in part]
    return tuple(sorted(names, key=lambda name: not by_id[name].is_collective))


def block_ns(problem: Problem, parts: Sequence[Segment]) -> int:
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
