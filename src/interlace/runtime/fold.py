"""Fold the graphs of a rank into chunks: each walk is cut in two, and one half runs at a time.

The front half is what comes first in a forward, and last in a backward. Both graphs are cut where
half of their arithmetic is done. A cut changes no operator and no order within a graph, so bits
stay what they are.
"""

from dataclasses import replace

from interlace.errors import InputError
from interlace.graphs.parts import Part
from interlace.ir.actions import Direction, Share, strand
from interlace.ir.graph import OpGraph
from interlace.ir.phases import cut
from interlace.runtime.traced_strands import Strands

HALVES = 2
"""Chunks of a folded model."""


def in_chunks(strands: Strands, chunks: int) -> Strands:
    """`strands` as so many chunks, 1 or 2. Raises InputError for another number, for graphs too
    small to cut, and where the ends of a step have graphs of their own."""
    if chunks == 1:
        return strands
    if chunks != HALVES:
        raise InputError(
            f"the graphs of a rank can be folded into {HALVES} chunks, not {chunks}",
            hint="give the schedule's parameter chunks the default 1 or 2",
        )
    parts: dict[str, Part] = {}
    op_graphs: dict[str, OpGraph] = {}
    for name, graph in strands.op_graphs.items():
        found = strand(name)
        if found.share == Share.ONCE:
            parts[name], op_graphs[name] = strands.parts[name], graph
            continue
        if found.share != Share.WHOLE or found.chunk is not None:
            raise InputError(
                f"the graph {name!r} cannot be folded",
                hint='set overlap.passes to "all", or overlap.decompose to "off"',
            )
        numbers = (0, 1) if found.direction == Direction.FORWARD else (1, 0)
        at = half(graph)
        labels = [replace(found, chunk=number).label for number in numbers]
        parts.update(zip(labels, strands.parts[name].split(at), strict=True))
        for label, part in zip(labels, cut(graph, at), strict=True):
            op_graphs[label] = replace(part, name=label)
    return replace(strands, parts=parts, op_graphs=op_graphs)


def half(graph: OpGraph) -> int:
    """How many operators, in their order, do half of the arithmetic of `graph`.

    Raises InputError if it has fewer than two operators."""
    count = len(graph.operators)
    if count < HALVES:
        raise InputError(
            f"the graph {graph.name!r} has {count} operators, too few to fold",
            hint="use schedule two_strand or one_strand",
        )
    total, done = sum(op.flops for op in graph.operators), 0
    for index, op in enumerate(graph.operators[:-1], 1):
        done += op.flops
        if total and HALVES * done >= total:
            return index
    return count // HALVES
