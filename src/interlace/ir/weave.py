"""Join strands that work in the same memory: a weight that `gather` fills and `forward` reads, a
gradient sum that `backward` adds to and `reduce` sends.

Strands name shared memory alike: an operator depends on the last one of an earlier strand that
writes the input of the same name.
"""

from dataclasses import replace

from interlace.ir.actions import Direction, Share, strand
from interlace.ir.graph import Operator, OpGraph

SHARED = ("parameter", "gradient")
"""Roles of graph inputs that several strands work in."""


def weave(merged: OpGraph) -> OpGraph:
    """`merged` with dependencies through shared memory, every operator of `gather` just before it
    is needed (and its collective one bucket earlier), and every one of `reduce` as soon as it can
    run, except what follows its collectives, which comes last."""
    operators = _with_dependencies(merged)
    order = _Order(operators)
    early = [op for op in operators if _once(op.id, Direction.FORWARD)]
    late = [op for op in operators if _once(op.id, Direction.BACKWARD)]
    both = {op.id for op in (*early, *late)}
    collectives = [op.id for op in early if op.is_collective]
    for op in operators:
        if op.id in both:
            continue
        order.emit(op.id, collectives)
        if late:
            order.emit_ready(late)
    for op in operators:
        order.emit(op.id, collectives)
    return OpGraph(merged.name, tuple(order.found), merged.inputs, merged.outputs)


def _with_dependencies(merged: OpGraph) -> list[Operator]:
    roles = {given.id: given.role for given in merged.inputs}
    writers: dict[str, list[str]] = {}
    for op in merged.operators:
        for written in op.writes:
            if roles[written] in SHARED:
                writers.setdefault(_local(written), []).append(op.id)
    found = []
    for op in merged.operators:
        names = {_local(read) for read in (*op.reads, *op.writes) if roles[read] in SHARED}
        others = {
            writer
            for name in names
            for writer in writers.get(name, ())
            if _strand(writer) != _strand(op.id) and _comes_first(writer, op.id)
        }
        found.append(replace(op, inputs=tuple(dict.fromkeys((*op.inputs, *sorted(others))))))
    return found


def _comes_first(writer: str, reader: str) -> bool:
    return _once(writer, Direction.FORWARD) or _once(reader, Direction.BACKWARD)


class _Order:
    """Operators in the order in which they were emitted, each after its inputs."""

    def __init__(self, operators: list[Operator]) -> None:
        self.by_id = {op.id: op for op in operators}
        self.found: list[Operator] = []
        self.done: set[str] = set()

    def emit(self, name: str, collectives: list[str]) -> None:
        """Append an operator behind what it needs; a gathered bucket brings the next one along."""
        if name in self.done:
            return
        op = self.by_id[name]
        for source in op.inputs:
            self.emit(source, collectives)
            if source in collectives:
                following = collectives[collectives.index(source) + 1 :][:1]
                for collective in following:
                    self.emit(collective, collectives)
        self._append(op)

    def emit_ready(self, late: list[Operator]) -> None:
        """Append what can run now and waits for no collective of its own strand."""
        for op in late:
            if op.id in self.done or not set(op.inputs) <= self.done:
                continue
            if not any(self.by_id[source].is_collective for source in op.inputs):
                self._append(op)

    def _append(self, op: Operator) -> None:
        if op.id not in self.done:
            self.done.add(op.id)
            self.found.append(op)


def _once(name: str, direction: Direction) -> bool:
    """Whether an operator is of what data-parallel ranks exchange once a step, at its start
    (forward) or at its end (backward)."""
    found = strand(_strand(name))
    return found.share == Share.ONCE and found.direction == direction


def _strand(name: str) -> str:
    return name.partition(".")[0]


def _local(name: str) -> str:
    return name.partition(".")[2]
