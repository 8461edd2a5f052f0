"""The graph that a phase runs, from the graphs of a rank's strands (`ir.actions`).

`graphs` maps the names of strands to their graphs: `forward` and `backward`, or `forward_0`,
`forward_1`, ... where a rank has several chunks; `gather`, `reduce`, `first` and `final` if a step
has them. `head` is the number of operators of `forward` that run one action ahead.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from interlace.errors import InputError
from interlace.ir.actions import Share, Strand, sorted_labels, strands_of
from interlace.ir.graph import GraphInput, Operator, OpGraph, SameGraph, merge
from interlace.ir.weave import weave

_WHOLE = "pair"
"""The name of a rank's graphs in one; it is part of their digest, so plans and tables of costs
that were saved stay valid."""
_KEPT = 8
"""Graphs of phases that are kept for who asks again; a choice, two steps' phases."""


def whole_graph(graphs: Mapping[str, OpGraph]) -> OpGraph:
    """All strands of a rank in one graph; its digest names what a plan or a cost table is for."""
    return _whole_graph(tuple((name, SameGraph(each)) for name, each in graphs.items()))


@lru_cache(maxsize=_KEPT)
def _whole_graph(named: tuple[tuple[str, SameGraph], ...]) -> OpGraph:
    graphs = {name: each.graph for name, each in named}
    return merge(_WHOLE, {name: graphs[name] for name in sorted_labels(graphs)})


def phase_graph(phase: str, graphs: Mapping[str, OpGraph], head: int) -> OpGraph:
    """The graph of a phase. Ids are `strand.name`, or plain names where a strand is alone.

    Raises InputError if the phase needs a strand that this rank has not."""
    return _phase_graph(
        phase, tuple((name, SameGraph(each)) for name, each in graphs.items()), head
    )


@lru_cache(maxsize=_KEPT)
def _phase_graph(phase: str, named: tuple[tuple[str, SameGraph], ...], head: int) -> OpGraph:
    graphs = {name: each.graph for name, each in named}
    strands = strands_of(phase)
    found = {each.label: _share(phase, each, graphs, head) for each in strands}
    if len(found) == 1:
        return next(iter(found.values()))
    merged = merge(phase, found)
    return weave(merged) if any(each.share == Share.ONCE for each in strands) else merged


def _share(phase: str, strand: Strand, graphs: Mapping[str, OpGraph], head: int) -> OpGraph:
    if strand.graph not in graphs:
        raise InputError(
            f"phase {phase!r} runs {strand.graph!r}, and this rank has "
            f"{', '.join(sorted_labels(graphs))}",
            hint="the plan or schedule is for another layout; plan again",
        )
    graph = graphs[strand.graph]
    if strand.share == Share.HEAD:
        return replace(cut(graph, head)[0], name=strand.label)
    return cut(graph, head)[1] if strand.share == Share.REST else graph


def cut(graph: OpGraph, at: int) -> tuple[OpGraph, OpGraph]:
    """The first `at` operators, and the others.

    What the one hands over is an output of it and an input of the other; with a collective in
    flight go its inputs, which its work object holds. Values saved by a forward that only the
    second part reads pass through the first."""
    first = {op.id for op in graph.operators[:at]}
    bytes_of = {op.id: op.bytes_out for op in graph.operators}
    waited = {source for name in first for source in graph.by_id[name].inputs}
    carried = {name for name in graph.outputs if name in first}
    rest: list[Operator] = []
    for op in graph.operators[at:]:
        handed = {name for name in op.inputs if name in first}
        flying = {n for n in handed - waited if graph.by_id[n].is_collective}
        handed |= {source for name in flying for source in graph.by_id[name].inputs}
        carried |= handed
        inputs = tuple(name for name in op.inputs if name not in first)
        rest.append(replace(op, inputs=inputs, reads=(*op.reads, *sorted(handed))))
    read_later = {name for op in rest for name in op.reads}
    passing = tuple(i.id for i in graph.inputs if i.role == "saved" and i.id in read_later)
    kept = [i for i in graph.inputs if i.role != "saved" or i.id in read_later]
    names = tuple(op.id for op in graph.operators if op.id in carried)
    values = tuple(GraphInput(name, "saved", bytes_of[name]) for name in names)
    return (
        OpGraph(graph.name, graph.operators[:at], graph.inputs, (*names, *passing)),
        OpGraph(graph.name, tuple(rest), (*kept, *values), graph.outputs),
    )
