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
from collections.abc import Mapping

from interlace.ir.graph import OpGraph
from interlace.ir.plan import PhasePlan
from interlace.search.bounds import longest_paths
from interlace.sim.strands import simulate

SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def list_schedule(
    graph: OpGraph, solo_ns: Mapping[str, int], *, issue_ns: int = 0, scaled_strand: str = ""
) -> PhasePlan:
    """The best order found for `graph`. With `scaled_strand` (`forward`) its priorities are tried
    at several scales against those of the other strand."""
    paths = longest_paths(graph, solo_ns)
    candidates = [graph.order]
    for scale in SCALES if scaled_strand else (1.0,):
        priority = {
            name: path * scale if name.startswith(f"{scaled_strand}.") else float(path)
            for name, path in paths.items()
        }
        candidates.append(_schedule(graph, solo_ns, priority, issue_ns))
    timelines = [simulate(graph, order, solo_ns, issue_ns=issue_ns) for order in candidates]
    best = min(range(len(candidates)), key=lambda i: (timelines[i].length_ns, i))
    return PhasePlan(
        tuple(candidates[best]), timelines[best].length_ns, timelines[best].exposed_ns()
    )


def _schedule(
    graph: OpGraph, solo_ns: Mapping[str, int], priority: Mapping[str, float], issue_ns: int
) -> tuple[str, ...]:
    position = {op.id: i for i, op in enumerate(graph.operators)}
    users: dict[str, list[str]] = {op.id: [] for op in graph.operators}
    missing = {op.id: len(op.inputs) for op in graph.operators}
    for op in graph.operators:
        for source in op.inputs:
            users[source].append(op.id)

    now = 0
    finish: dict[str, int] = {}
    lane_free: dict[str, int] = {}
    waiting: list[tuple[int, int, str]] = []  # (ready time, position, id)
    ready: dict[bool, list[tuple[float, int, str]]] = {True: [], False: []}  # by is_collective
    order: list[str] = []

    def announce(name: str) -> None:
        at = max((finish[source] for source in graph.by_id[name].inputs), default=0)
        heapq.heappush(waiting, (at, position[name], name))

    for op in graph.operators:
        if not op.inputs:
            announce(op.id)
    while waiting or ready[True] or ready[False]:
        while waiting and waiting[0][0] <= now:
            _, place, name = heapq.heappop(waiting)
            heap = ready[graph.by_id[name].is_collective]
            heapq.heappush(heap, (-priority[name], place, name))
        heap = ready[True] or ready[False]
        if not heap:
            now = waiting[0][0]
            continue
        _, _, name = heapq.heappop(heap)
        op = graph.by_id[name]
        if op.is_collective:
            finish[name] = max(now, lane_free.get(op.lane, 0)) + solo_ns[name]
            lane_free[op.lane] = finish[name]
            now += issue_ns
        else:
            now = finish[name] = now + solo_ns[name]
        order.append(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                announce(user)
    return tuple(order)
