"""A time that no order of a whole step can beat, with any number of strands in flight."""

from collections import Counter
from collections.abc import Iterator, Mapping

from interlace.ir.actions import Direction, Share, labels_of
from interlace.ir.costs import CostTable
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.search.bounds import longest_paths

_Walk = tuple[str, ...]
"""The graphs of one pass through the model, chunk by chunk."""


def step_bound_ns(graphs: Mapping[str, OpGraph], costs: CostTable, micro_batches: int) -> int:
    """The largest of

    * one micro-batch alone: the longest path to the end of its forward's compute, then that of
      its backward;
    * for each lane, its work for all micro-batches, after the earliest moment at which a forward
      can use it and before what must follow its last use in a backward;
    * for each link, the work of all lanes that share it, with what is exchanged once a step.

    A rank issues the backward of a micro-batch after its forward, and contention only adds time.
    """
    forward, backward = (_walk(graphs, direction, Share.WHOLE) for direction in Direction)
    first, final = (_walk(graphs, direction, Share.END) for direction in Direction)
    first, final = first or forward, final or backward
    walks = Counter((first, final))
    walks.update({forward: micro_batches - 1, backward: micro_batches - 1})
    walks = +walks  # a step of one micro-batch has no others
    passes = {name: count for walk, count in walks.items() for name in walk}
    solo_ns = {name: costs.of(graphs[name]) for name in passes}
    starts, forward_ns = {}, {}
    for walk in {first, forward} & walks.keys():
        forward_ns[walk] = 0
        for name in walk:
            own = _earliest_starts(graphs[name], solo_ns[name])
            starts[name] = {op: forward_ns[walk] + start for op, start in own.items()}
            computed_ns = _computed_ns(graphs[name], starts[name], solo_ns[name])
            forward_ns[walk] = max(forward_ns[walk], computed_ns)
    tails = {n: longest_paths(graphs[n], solo_ns[n]) for walk in {final, backward} & walks.keys()
             for n in walk}  # fmt: skip
    alone = [(first, final)] if micro_batches == 1 else [(first, backward), (forward, final)]
    bounds = [forward_ns[there] + _longest_ns(tails, back) for there, back in alone]
    earliest_ns = min(forward_ns.values())
    shared: Counter[str] = Counter()
    for lane in {lane for name in passes for lane in graphs[name].lanes}:
        held = {n: _held(graphs[n], lane, solo_ns[n], costs.issue_ns) for n in passes}
        work = sum(count * sum(held[name].values()) for name, count in passes.items())
        before = min((starts[n][op] for n in starts for op in held[n]), default=earliest_ns)
        ends = [max(0, tails[n][op] - ns) for n in tails for op, ns in held[n].items()]
        bounds.append(min(before, earliest_ns) + work + min(ends, default=0))
        shared[costs.contention.link_of(lane)] += work
    for link, held_ns in _once_a_step(graphs, costs):
        shared[link] += held_ns
    return max(*bounds, *shared.values())


def _walk(graphs: Mapping[str, OpGraph], direction: Direction, share: Share) -> _Walk:
    return tuple(labels_of(graphs, direction, share))


def _longest_ns(tails: Mapping[str, Mapping[str, int]], walk: _Walk) -> int:
    """The longest path through the last chunk that a backward reaches; those before it only add."""
    return max(max(tails[name].values(), default=0) for name in walk)


def _once_a_step(graphs: Mapping[str, OpGraph], costs: CostTable) -> Iterator[tuple[str, int]]:
    """(link, time for which it is held) of what data-parallel ranks exchange."""
    for direction in Direction:
        for name in labels_of(graphs, direction, Share.ONCE):
            graph, once_ns = graphs[name], costs.of(graphs[name])
            for lane in graph.lanes:
                held = _held(graph, lane, once_ns, costs.issue_ns)
                yield costs.contention.link_of(lane), sum(held.values())


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
