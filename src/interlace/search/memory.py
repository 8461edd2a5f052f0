"""Peak memory of an order, counted exactly from liveness.

A value lives from the issue of its operator to its last reader, as in the lowered graph, which
drops every name after its last use. Two rules follow the runtime: what a collective reads lives
until somebody waits for it (its work object holds it), and outputs live to the end. Saved values
that the graph is given (role `saved`) live from the start to their last reader; parameters,
gradient buffers and batches are there anyway and are not counted.
"""

from collections.abc import Mapping, Sequence

from interlace.ir.graph import OpGraph


def peak_bytes(graph: OpGraph, order: Sequence[str]) -> int:
    """Largest number of bytes alive at any moment of `order`."""
    alive = sum(i.bytes for i in graph.inputs if i.role == "saved")
    dies = deaths(graph, order)
    peak = alive
    for name in order:
        alive += graph.by_id[name].bytes_out
        peak = max(peak, alive)
        alive -= dies.get(name, 0)
    return peak


def deaths(graph: OpGraph, order: Sequence[str]) -> Mapping[str, int]:
    """Bytes that are freed right after each operator of `order`."""
    place = {name: position for position, name in enumerate(order)}
    last: dict[str, int] = {}
    waited: dict[str, int] = {}
    saved = {i.id: i.bytes for i in graph.inputs if i.role == "saved"}
    for position, name in enumerate(order):
        op = graph.by_id[name]
        for source in (*op.inputs, *(r for r in op.reads if r in saved)):
            last[source] = position
            waited.setdefault(source, position)
        last.setdefault(name, position)
    for op in graph.collectives:
        until = waited.get(op.id, place[op.id])
        for source in (*op.inputs, *(r for r in op.reads if r in saved)):
            last[source] = max(last[source], until)
    kept = set(graph.outputs)
    freed: dict[str, int] = {}
    for value, position in last.items():
        if value in kept:
            continue
        size = saved[value] if value in saved else graph.by_id[value].bytes_out
        freed[order[position]] = freed.get(order[position], 0) + size
    return freed
