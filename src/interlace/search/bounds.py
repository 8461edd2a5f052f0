"""Lower bounds on the length of any order: what no search can beat.

1. The longest path.
2. Each lane by itself: an operator can start no earlier than the longest path to it, nor before
   the compute lane has run all that it depends on; the same holds for what follows it. The
   best preemptive schedule of one lane with such heads and tails is Jackson's.
3. A job by itself: its heaviest chain of dependent collectives, with the compute between them.
4. Two jobs: take such a chain from each and drop everything else. What is left is a two-job shop,
   relaxed further by letting both lanes be preempted and rounding all times down to a grid. Its
   optimum is a shortest path in the plane of both jobs' progress (Akers 1956): a step along one
   axis or, where the jobs do not want the same lane, along the diagonal, costs one. With
   integer times all turns lie on the grid.
5. Contention: compute and transfers slow each other down.

Lanes that share a link count as one: however they share it, it does no more work than one lane.

For the fifth let W_k be the work of compute kind k, W their sum, I the time spent issuing, C_c the
work of one link in collectives of kind c, C their sum, and y_kc the part of W_k that is done while
a transfer of kind c is under way. That takes a_kc times as long as alone, or longer, and the link
meanwhile does at most 1/b_kc of what it could. So the length T of any order obeys

    T >= W + I + sum of y_kc (a_kc - 1)                 the compute lane is busy for so long,
    T >= C + sum of y_kc a_kc (1 - 1/b_kc)              the link is busy for so long,
    T >= W + C + sum of y_kc (a_kc - 1 - a_kc / b_kc)   both together, less what coincides,
    sum over c of y_kc <= W_k.

Weights p, q, r >= 0 that add up to 1 combine the first three lines into one, whose minimum over y
is a sum over kinds. The same holds with z_kc, the part of C_c that is done beside kind k, for y_kc:
a and b change places in the sums. Any weights give a valid bound, so a grid of weights is tried.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.search.chains import jobs
from interlace.search.problem import Problem

GRID = 3000
"""Steps along each job; a choice. The bound loses at most one step per task, some tenths of a per
cent."""

_KEPT = 8
"""Problems of which the bound is kept for who asks again; a choice, the phases of two steps."""

JobTask = tuple[str, int]
"""(link or compute lane, ns)."""


class _Bounded:
    """What the bound of a problem depends on, as the key of a cache."""

    __slots__ = ("problem",)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Bounded) or self.problem.graph is not other.problem.graph:
            return False
        own, given = self.problem, other.problem
        alike = own.issue_ns == given.issue_ns and own.slowed == given.slowed
        return alike and own.solo_ns == given.solo_ns

    def __hash__(self) -> int:
        return id(self.problem.graph)


def lower_bound_ns(problem: Problem) -> int:
    """The best bound known here."""
    return _lower_bound_ns(_Bounded(replace(problem, memory_bytes=0)))


@lru_cache(maxsize=_KEPT)
def _lower_bound_ns(bounded: _Bounded) -> int:
    problem = bounded.problem
    reach = _Reach(problem)
    found = [reach.chain(job) for job in jobs(problem.graph).values()]
    chains = sorted(filter(None, found), key=lambda chain: -sum(ns for _, ns in chain))
    bounds = [*reach.lane_bounds_ns(), contention_bound_ns(problem)]
    if len(chains) > 1:
        bounds.append(_two_jobs_ns(chains[0], chains[1]))
    elif chains:
        bounds.append(sum(ns for _, ns in chains[0]))
    return max(bounds, default=0)


def longest_paths(graph: OpGraph, solo_ns: Mapping[str, int]) -> dict[str, int]:
    """Time from the start of each operator to the end of the graph if nothing queued."""
    tail: dict[str, int] = {op.id: 0 for op in graph.operators}
    longest: dict[str, int] = {}
    for op in reversed(graph.operators):
        longest[op.id] = solo_ns[op.id] + tail[op.id]
        for source in op.inputs:
            tail[source] = max(tail[source], longest[op.id])
    return longest


class _Reach:
    """Which operators come before and after each collective, and for how long they take."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.operators = graph.operators
        given = problem.contention
        self.lane = [given.link_of(op.lane) if given else op.lane for op in graph.operators]
        self.number = {op.id: i for i, op in enumerate(graph.operators)}
        self.inputs = [[self.number[i] for i in op.inputs] for op in graph.operators]
        self.time = np.array([problem.solo_ns[op.id] for op in graph.operators], dtype=np.int64)
        self.issue_ns = problem.issue_ns
        self.collectives = [i for i, op in enumerate(graph.operators) if op.is_collective]
        self.column = {i: k for k, i in enumerate(self.collectives)}
        self._walk()
        computes = np.array([op.lane == COMPUTE_LANE for op in graph.operators], dtype=bool)
        self.on_compute = np.where(computes, self.time, problem.issue_ns)
        """Time for which each operator holds the compute lane."""
        self.computed = np.where(computes, self.time, 0)

    def _walk(self) -> None:
        count, times = len(self.inputs), self.time.tolist()
        before, after = [0] * count, [0] * count  # sets of collectives, a bit for each
        head, tail = [0] * count, [0] * count
        for i, sources in enumerate(self.inputs):
            for source in sources:
                before[i] |= before[source]
                if source in self.column:
                    before[i] |= 1 << self.column[source]
                head[i] = max(head[i], head[source] + times[source])
        for i in range(count - 1, -1, -1):
            own = after[i] | (1 << self.column[i] if i in self.column else 0)
            reach = tail[i] + times[i]
            for source in self.inputs[i]:
                after[source] |= own
                tail[source] = max(tail[source], reach)
        width = len(self.collectives)
        self.before = _matrix(before, width)
        """[i, k]: operator i depends on the k-th collective."""
        self.after = _matrix(after, width)
        """[i, k]: the k-th collective depends on operator i."""
        self.head, self.tail = (np.array(each, dtype=np.int64) for each in (head, tail))

    def lane_bounds_ns(self) -> list[int]:
        """Jackson's bound of each lane, which is at least its work, and the longest path."""
        heads, tails = self.head.copy(), self.tail.copy()
        if self.collectives:
            work_before = [self.on_compute[column].sum() for column in self.after.T]
            work_after = [self.on_compute[column].sum() for column in self.before.T]
            heads[self.collectives] = np.maximum(heads[self.collectives], work_before)
            tails[self.collectives] = np.maximum(tails[self.collectives], work_after)
        bounds = [int((self.head + self.time + self.tail).max(initial=0))]
        for lane in sorted({*self.lane, COMPUTE_LANE}):
            own = [i for i, used in enumerate(self.lane) if used == lane]
            tasks = [(int(heads[i]), int(self.time[i]), int(tails[i])) for i in own]
            if lane == COMPUTE_LANE:  # issuing: an operator of its own, beside the transfer
                tasks += [(int(heads[i]), self.issue_ns, 0) for i in self.collectives]
            bounds.append(_jackson_ns(tasks))
        return bounds

    def chain(self, job: Sequence[Operator]) -> list[JobTask]:
        """Tasks of one job that can only run one after the other."""
        own = {self.number[op.id] for op in job}
        collectives = [i for i in self.collectives if i in own]
        if not collectives:
            return []
        chain = self._heaviest_chain(collectives)
        tasks: list[JobTask] = []
        for index, i in enumerate(chain):
            between = self.after[:, self.column[i]]
            if index:
                between = between & self.before[:, self.column[chain[index - 1]]]
            # Issuing is left out: it runs beside the transfer.
            compute = int(self.computed[between].sum())
            tasks += [(COMPUTE_LANE, compute), (self.lane[i], int(self.time[i]))]
        last = self.before[:, self.column[chain[-1]]]
        return [*tasks, (COMPUTE_LANE, int(self.computed[last].sum()))]

    def _heaviest_chain(self, collectives: list[int]) -> list[int]:
        """Collectives, each depending on the one before, with the largest total time."""
        columns = [self.column[i] for i in collectives]
        weights = np.full(len(collectives), -1, dtype=np.int64)
        previous: dict[int, int] = {}
        for index, i in enumerate(collectives):  # in topological order
            earlier = np.where(self.before[i, columns], weights, -1)
            best = int(earlier.argmax())
            before = int(earlier[best])
            weights[index] = int(self.time[i]) + max(before, 0)
            previous[i] = collectives[best] if before >= 0 else -1
        weight = dict(zip(collectives, weights.tolist(), strict=True))
        chain = [max(collectives, key=lambda i: weight[i])]
        while previous[chain[-1]] >= 0:
            chain.append(previous[chain[-1]])
        return chain[::-1]


def _matrix(sets: Sequence[int], width: int) -> np.ndarray:
    """[set, bit]: whether it is in the set. Column by column in memory, as it is read."""
    size = -(-width // 8)
    packed = np.frombuffer(b"".join(each.to_bytes(size, "little") for each in sets), np.uint8)
    bits = np.unpackbits(packed.reshape(len(sets), size), axis=1, bitorder="little")
    return np.asfortranarray(bits[:, :width]).view(bool)


def _jackson_ns(tasks: list[tuple[int, int, int]]) -> int:
    """Length of the best preemptive schedule of tasks (head, time, tail) on one lane: always the
    task with the longest tail (Jackson 1955)."""
    tasks = sorted(tasks)
    ready: list[tuple[int, int]] = []
    now = length = index = 0
    while ready or index < len(tasks):
        if not ready:
            now = max(now, tasks[index][0])
        while index < len(tasks) and tasks[index][0] <= now:
            _, time, tail = tasks[index]
            heapq.heappush(ready, (-tail, time))
            index += 1
        tail, time = heapq.heappop(ready)
        until = tasks[index][0] if index < len(tasks) else now + time
        run = min(time, until - now)
        now += run
        if run < time:
            heapq.heappush(ready, (tail, time - run))
        else:
            length = max(length, now - tail)
    return length


def _two_jobs_ns(first: list[JobTask], second: list[JobTask]) -> int:
    total = max(sum(ns for _, ns in first), sum(ns for _, ns in second))
    if not total:
        return total
    step = max(1, total // GRID)
    lanes = sorted({lane for lane, _ in (*first, *second)})
    x, y = (_on_grid(tasks, lanes, step) for tasks in (first, second))
    columns = np.arange(len(y) + 1)
    free = np.array([y != lane for lane in range(len(lanes))])
    cost = columns.copy()  # row 0: only the second job moves
    far = np.iinfo(np.int64).max // 2
    for lane in x:
        reach = cost + 1
        np.minimum(reach[1:], np.where(free[lane], cost[:-1] + 1, far), out=reach[1:])
        # A step of the second job costs one more than the cell to its left.
        cost = np.minimum.accumulate(reach - columns) + columns
    return max(total, int(cost[-1]) * step)


def _on_grid(tasks: list[JobTask], lanes: list[str], step: int) -> np.ndarray:
    """The lane that a job wants in each step of its own time, rounded down task by task."""
    counts = [ns // step for _, ns in tasks]
    return np.repeat([lanes.index(lane) for lane, _ in tasks], counts)


PARTS = 40
"""Weights are multiples of 1 / PARTS; a choice: any weights give a valid bound, finer ones a
better."""
ROUNDING_NS = 2e-3
"""Time, in ns, that a simulated operator may lose to rounding."""


def contention_bound_ns(problem: Problem) -> int:
    """The largest such bound over links; 0 without contention."""
    contention = problem.contention
    if contention is None or not contention.factors:
        return 0
    links: dict[str, list[Operator]] = {}
    for op in problem.graph.collectives:
        links.setdefault(contention.link_of(op.lane), []).append(op)
    compute = [op for op in problem.graph.operators if op.lane == COMPUTE_LANE]
    bounds = [_link_bound_ns(problem, compute, own) for own in links.values()]
    lost = 1 + ROUNDING_NS * len(problem.graph.operators)
    return max(0, int(max(bounds, default=0) - lost))


def _link_bound_ns(problem: Problem, compute: list[Operator], collectives: list[Operator]) -> float:
    contention = problem.contention
    assert contention is not None
    work, transfer = _by_kind(problem, compute), _by_kind(problem, collectives)
    if not work or not transfer:
        return 0
    pairs = [contention.factors.get(pair, (1.0, 1.0)) for pair in product(work, transfer)]
    shape = (len(work), len(transfer))
    a = np.array([factors[0] for factors in pairs]).reshape(shape)
    b = np.array([factors[1] for factors in pairs]).reshape(shape)
    of_kind, of_link = np.array(list(work.values())), np.array(list(transfer.values()))
    total, link = of_kind.sum(), of_link.sum()
    issuing = problem.issue_ns * len(problem.graph.collectives)
    weights = np.array(
        [(p, q, PARTS - p - q) for p in range(PARTS + 1) for q in range(PARTS + 1 - p)]
    )
    p, q, r = (weights / PARTS).T
    fixed = p * (total + issuing) + q * link + r * (total + link)
    slope = p[:, None, None] * (1 - 1 / a) + q[:, None, None] * (1 - 1 / b)
    slope = slope + r[:, None, None] * (1 - 1 / a - 1 / b)
    by_compute = (np.minimum(0, (slope * a).min(axis=2)) * of_kind).sum(axis=1)
    by_link = (np.minimum(0, (slope * b).min(axis=1)) * of_link).sum(axis=1)
    return float((fixed + np.maximum(by_compute, by_link)).max())


def _by_kind(problem: Problem, operators: Iterable[Operator]) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for op in operators:
        found[op.kind] = found.get(op.kind, 0) + problem.solo_ns[op.id]
    return {kind: ns for kind, ns in found.items() if ns}
