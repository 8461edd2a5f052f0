"""A time that no order of a whole step can beat, with any number of strands in flight."""

from collections import Counter
from collections.abc import Mapping

from interlace.ir.costs import CostTable
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.phases import BACKWARD, FORWARD, GATHER, REDUCE, end_strands
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
    first, final = end_strands(graphs)
    passes = Counter((first, final))
    passes.update({FORWARD: micro_batches - 1, BACKWARD: micro_batches - 1})
    passes = +passes  # a step of one micro-batch has no others
    solo_ns = {name: costs.of(graphs[name]) for name in passes}
    starts = {n: _earliest_starts(graphs[n], solo_ns[n]) for n in passes if n in (first, FORWARD)}
    tails = {n: longest_paths(graphs[n], solo_ns[n]) for n in passes if n in (final, BACKWARD)}
    forward_ns = {name: _computed_ns(graphs[name], starts[name], solo_ns[name]) for name in starts}
    alone = [(first, final)] if micro_batches == 1 else [(first, BACKWARD), (FORWARD, final)]
    bounds = [forward_ns[there] + max(tails[back].values(), default=0) for there, back in alone]
    earliest_ns = min(forward_ns.values())
    shared: dict[str, int] = {}
    for lane in {lane for name in passes for lane in graphs[name].lanes}:
        held = {n: _held(graphs[n], lane, solo_ns[n], costs.issue_ns) for n in passes}
        work = sum(count * sum(held[name].values()) for name, count in passes.items())
        before = min((starts[n][op] for n in starts for op in held[n]), default=earliest_ns)
        ends = [max(0, tails[n][op] - ns) for n in tails for op, ns in held[n].items()]
        bounds.append(min(before, earliest_ns) + work + min(ends, default=0))
        link = costs.contention.links.get(lane, lane)
        shared[link] = shared.get(link, 0) + work
    for once in (graphs[name] for name in (GATHER, REDUCE) if name in graphs):
        once_ns = costs.of(once)
        for lane in once.lanes:
            link = costs.contention.links.get(lane, lane)
            holds = _held(once, lane, once_ns, costs.issue_ns)
            shared[link] = shared.get(link, 0) + sum(holds.values())
    return max(*bounds, *shared.values())


def _computed_ns(graph: OpGraph, starts: Mapping[str, int], solo_ns: Mapping[str, int]) -> int:
    """The earliest moment at which all computing of `graph` could be over."""
    ends = [starts[op.id] + solo_ns[op.id] for op in graph.operators if not op.is_collective]
    return max(ends, default=0)


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
