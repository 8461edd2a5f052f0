"""The phases of a step, and the graph that each of them runs.

With two strands, a step of M micro-batches runs

    phase      forward strand                          backward strand
    forward    all of 1, then `next`: the head of 2
    pair       the rest of k + 1, the head of k + 2     all of k          k = 1 ... M - 2
    last       the rest of M                            all of M - 1
    backward                                            all of M

The head is the first `ahead` operators of the forward graph. Running it one phase ahead means
that no phase starts with both strands waiting for their first collective: a phase begins in the
middle of a forward pass. With `ahead` = 0 there is no head, and `last` is `pair`.

What data-parallel ranks exchange once a step has strands of its own: `gather` (weights) runs
inside `forward`, `reduce` (gradients) inside `backward`. The first forward and the last backward,
which have no other strand beside them, may have graphs of their own, `first` and `final`, that
compute the same. With one strand the other micro-batches then run `again` (a plain forward) and
`before` (a plain backward).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from interlace.ir.graph import GraphInput, Operator, OpGraph, merge
from interlace.ir.weave import weave

PHASES = ("forward", "pair", "backward")
"""Phases with an order of their own; that of the others is a part of one of these."""
FORWARD, NEXT, BACKWARD, LAST = "forward", "next", "backward", "last"
GATHER, REDUCE, AGAIN, BEFORE = "gather", "reduce", "again", "before"
FIRST, FINAL = "first", "final"
STRANDS = (GATHER, FIRST, FORWARD, BACKWARD, FINAL, REDUCE)
"""Strands that a step may have, in the order in which they read and write the same memory."""
BASE_STRAND = {NEXT: FORWARD}
"""Strands that run a part of another strand's graph, for a later micro-batch."""
PASS = {NEXT: FORWARD, FIRST: FORWARD, FINAL: BACKWARD}
"""What timelines call the strands that are a forward or a backward pass under another name."""


def pair_graph(graphs: Mapping[str, OpGraph]) -> OpGraph:
    """All strands of a step in one graph; its digest names what a plan or a cost table is for."""
    return merge("pair", {name: graphs[name] for name in STRANDS if name in graphs})


def phase_graphs(graphs: Mapping[str, OpGraph], ahead: int) -> dict[str, OpGraph]:
    """The graph of each phase, from those of the strands. Ids are `strand.name`, or plain names
    where one strand is alone."""
    forward, backward = graphs[FORWARD], graphs[BACKWARD]
    head = {}
    rest = forward
    if ahead:
        head[NEXT], rest = _split(forward, ahead)
    first, last = end_strands(graphs)
    gather = {GATHER: graphs[GATHER]} if GATHER in graphs else {}
    reduce = {REDUCE: graphs[REDUCE]} if REDUCE in graphs else {}
    found = {
        FORWARD: _joined(FORWARD, {**gather, first: graphs[first], **head}),
        "pair": merge("pair", {FORWARD: rest, **head, BACKWARD: backward}),
        LAST: merge(LAST if ahead else "pair", {FORWARD: rest, BACKWARD: backward}),
        BACKWARD: _joined(BACKWARD, {last: graphs[last], **reduce}),
    }
    if gather or first != FORWARD:
        found[AGAIN] = forward
    if reduce or last != BACKWARD:
        found[BEFORE] = backward
    return found


def end_strands(graphs: Container[str]) -> tuple[str, str]:
    """The strands of the first forward and of the last backward, given the names of all."""
    return FIRST if FIRST in graphs else FORWARD, FINAL if FINAL in graphs else BACKWARD


def derived_orders(orders: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The order of `last` from that of `pair`, where it differs from it."""
    pair = orders.get("pair", ())
    rest = tuple(name for name in pair if not name.startswith(f"{NEXT}."))
    return {LAST: rest} if len(rest) < len(pair) else {}


def phases_of_step(phases: Mapping[str, object], micro_batches: int) -> list[tuple[str, int, int]]:
    """(phase, forward micro-batch, backward micro-batch) in the order in which a step runs them;
    micro-batches count from 1, and 0 is none. `phases` has the planned and the derived ones."""
    steps: list[tuple[str, int, int]] = []
    for index in range(1, micro_batches + 1):
        if "pair" not in phases:
            again = AGAIN if index > 1 and AGAIN in phases else FORWARD
            before = BEFORE if index < micro_batches and BEFORE in phases else BACKWARD
            steps += [(again, index, 0), (before, 0, index)]
        elif index == 1:
            steps.append((FORWARD, 1, 0))
        else:
            last = LAST if index == micro_batches and LAST in phases else "pair"
            steps.append((last, index, index - 1))
    return steps if "pair" not in phases else [*steps, (BACKWARD, 0, micro_batches)]


def _joined(name: str, strands: dict[str, OpGraph]) -> OpGraph:
    if len(strands) == 1:
        return next(iter(strands.values()))
    merged = merge(name, strands)
    if GATHER not in strands and REDUCE not in strands:
        return merged
    return weave(merged)


def _split(forward: OpGraph, ahead: int) -> tuple[OpGraph, OpGraph]:
    """(head, rest). What the head hands over is an output of the one and an input of the other;
    with a collective in flight go its inputs, which its work object holds."""
    first = {op.id for op in forward.operators[:ahead]}
    bytes_of = {op.id: op.bytes_out for op in forward.operators}
    waited = {source for name in first for source in forward.by_id[name].inputs}
    carried = {name for name in forward.outputs if name in first}
    rest: list[Operator] = []
    for op in forward.operators[ahead:]:
        handed = {name for name in op.inputs if name in first}
        flying = {n for n in handed - waited if forward.by_id[n].is_collective}
        handed |= {source for name in flying for source in forward.by_id[name].inputs}
        carried |= handed
        inputs = tuple(name for name in op.inputs if name not in first)
        rest.append(replace(op, inputs=inputs, reads=(*op.reads, *sorted(handed))))
    names = tuple(op.id for op in forward.operators if op.id in carried)
    values = tuple(GraphInput(name, "saved", bytes_of[name]) for name in names)
    return (
        OpGraph(NEXT, forward.operators[:ahead], forward.inputs, names),
        OpGraph(FORWARD, tuple(rest), (*forward.inputs, *values), forward.outputs),
    )
