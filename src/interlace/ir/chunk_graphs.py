"""A walk of a model as graphs of its chunks: what `graphs.chunk_parts` does, for planners."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from interlace.ir.graph import GraphInput, Operator, OpGraph


def chunk_graphs(
    graph: OpGraph, labels: Sequence[str], label_of: Mapping[str, str]
) -> dict[str, OpGraph]:
    """The graph of each of `labels`, which run in this order and may have no operator; `label_of`
    has the one of each operator, by name.

    What one hands to another is an output of it and an input of the other, of role `saved`. With a
    collective in flight go its inputs, which its work object holds. What several of them are given
    is an output of all but the last, so that it is counted as kept."""
    handed = {op.id: _handed(graph, op, label_of) for op in graph.operators}
    read_by: dict[str, set[str]] = {}
    for op in graph.operators:
        for name in (*handed[op.id], *op.reads):
            read_by.setdefault(name, set()).add(label_of[op.id])
    made = {label: [op for op in graph.operators if label_of[op.id] == label] for label in labels}
    kept = frozenset(graph.outputs)
    found = {}
    for place, label in enumerate(labels):
        operators = tuple(
            replace(
                op,
                inputs=tuple(name for name in op.inputs if label_of[name] == label),
                reads=(*op.reads, *sorted(handed[op.id])),
            )
            for op in made[label]
        )
        given = _given(graph, label, read_by)
        later = set(labels[place + 1 :])
        passing = [i.id for i in given if i.role == "saved" and read_by[i.id] & later]
        outputs = [
            op.id for op in made[label] if op.id in kept or read_by.get(op.id, set()) - {label}
        ]
        found[label] = OpGraph(label, operators, given, (*outputs, *passing))
    return found


def _handed(graph: OpGraph, op: Operator, label_of: Mapping[str, str]) -> set[str]:
    """What an operator reads of those with other labels."""
    found = {name for name in op.inputs if label_of[name] != label_of[op.id]}
    for name in tuple(found):
        if graph.by_id[name].is_collective and not _is_waited(graph, name, label_of):
            found.update(n for n in graph.by_id[name].inputs if label_of[n] != label_of[op.id])
    return found


def _is_waited(graph: OpGraph, name: str, label_of: Mapping[str, str]) -> bool:
    """Whether somebody with the same label waits for a collective."""
    return any(name in op.inputs and label_of[op.id] == label_of[name] for op in graph.operators)


def _given(graph: OpGraph, label: str, read_by: Mapping[str, set[str]]) -> tuple[GraphInput, ...]:
    """The inputs of one of the graphs: those of the whole one that it reads, then values."""
    own = [i for i in graph.inputs if label in read_by.get(i.id, ())]
    inputs = {i.id for i in graph.inputs}
    values = [
        GraphInput(op.id, "saved", op.bytes_out)
        for op in graph.operators
        if op.id not in inputs and label in read_by.get(op.id, ())
    ]
    return (*own, *values)
