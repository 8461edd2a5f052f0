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
"""

from collections.abc import Sequence
from dataclasses import replace

from interlace.ir.graph import GraphInput, Operator, OpGraph, merge

PHASES = ("forward", "pair", "backward")
"""Phases with an order of their own; that of `last` is `pair` without the head."""
FORWARD, NEXT, BACKWARD, LAST = "forward", "next", "backward", "last"
BASE_STRAND = {NEXT: FORWARD}
"""Strands that run a part of another strand's graph, for a later micro-batch."""


def phase_graphs(forward: OpGraph, backward: OpGraph, ahead: int) -> dict[str, OpGraph]:
    """The graph of each phase. Ids are `strand.name`, or plain names where one strand is alone."""
    if not ahead:
        pair = merge("pair", {FORWARD: forward, BACKWARD: backward})
        return {FORWARD: forward, "pair": pair, LAST: pair, BACKWARD: backward}
    head, rest = _split(forward, ahead)
    return {
        FORWARD: merge(FORWARD, {FORWARD: forward, NEXT: head}),
        "pair": merge("pair", {FORWARD: rest, NEXT: head, BACKWARD: backward}),
        LAST: merge(LAST, {FORWARD: rest, BACKWARD: backward}),
        BACKWARD: backward,
    }


def without_head(order: Sequence[str]) -> tuple[str, ...]:
    """The order of `last`, from that of `pair`."""
    return tuple(name for name in order if not name.startswith(f"{NEXT}."))


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
