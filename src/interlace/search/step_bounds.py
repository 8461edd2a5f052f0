"""A time that no order of a whole step can beat, with any number of strands in flight."""

from collections.abc import Mapping

from interlace.ir.costs import CostTable
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.phases import BACKWARD, FORWARD, GATHER, REDUCE
from interlace.search.bounds import longest_paths


def step_bound_ns(graphs: Mapping[str, OpGraph], costs: CostTable, micro_batches: int) -> int:
    """The largest of

    * one micro-batch alone: the longest path to the end of its forward's compute, then that of
      its backward;
    * for each lane, its work for all micro-batches, after the earliest moment at which a forward
      can use it and before what must follow its last use in a backward;
    * for each link, the work of all lanes that share it, with what is exchanged once a step.

    A rank issues the backward of a micro-batch after its forward, and contention only adds time.
    """
    forward, backward = graphs[FORWARD], graphs[BACKWARD]
    first_ns, last_ns = costs.of(forward), costs.of(backward)
    starts, tails = _earliest_starts(forward, first_ns), longest_paths(backward, last_ns)
    computed = [op.id for op in forward.operators if not op.is_collective]
    forward_ns = max((starts[name] + first_ns[name] for name in computed), default=0)
    bounds = [forward_ns + max(tails.values(), default=0)]
    shared: dict[str, int] = {}
    for lane in {*forward.lanes, *backward.lanes}:
        first = _held(forward, lane, first_ns, costs.issue_ns)
        last = _held(backward, lane, last_ns, costs.issue_ns)
        work = micro_batches * (sum(first.values()) + sum(last.values()))
        before = min((starts[name] for name in first), default=forward_ns)
        after = min((max(0, tails[name] - ns) for name, ns in last.items()), default=0)
        bounds.append(min(before, forward_ns) + work + after)
        link = costs.contention.links.get(lane, lane)
        shared[link] = shared.get(link, 0) + work
    for once in (graphs[name] for name in (GATHER, REDUCE) if name in graphs):
        solo_ns = costs.of(once)
        for lane in once.lanes:
            link = costs.contention.links.get(lane, lane)
            held = _held(once, lane, solo_ns, costs.issue_ns)
            shared[link] = shared.get(link, 0) + sum(held.values())
    return max(*bounds, *shared.values())


def _held(graph: OpGraph, lane: str, solo_ns: Mapping[str, int], issue_ns: int) -> dict[str, int]:
    """For how long each operator holds `lane`; collectives hold the compute lane to be issued."""
    return {
        op.id: solo_ns[op.id] if op.lane == lane else issue_ns
        for op in graph.operators
        if lane in (op.lane, COMPUTE_LANE)
    }


def _earliest_starts(graph: OpGraph, solo_ns: Mapping[str, int]) -> dict[str, int]:
    """When each operator could start if nothing queued."""
    starts: dict[str, int] = {}
    for op in graph.operators:
        starts[op.id] = max((starts[i] + solo_ns[i] for i in op.inputs), default=0)
    return starts
