"""Lower strands in a planned order to one executable graph.

The order of the graph is the schedule: at run time one thread executes it from top to bottom.
Collectives start where the plan puts them, each wait stands right before the first operator
that needs the result, and every value is dropped after its last use.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from interlace.errors import InputError
from interlace.graphs.collectives import is_collective, is_wait, known_row, wait
from interlace.graphs.op_graphs import is_free
from interlace.graphs.parts import GraphPart
from interlace.graphs.strides import copying_views, restrided
from interlace.graphs.trace import RESULTS, VIEWS, Binding, StrandGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class Lowered:
    """An executable graph. Call it as `module(inputs)` with a list, which it empties, so that
    inputs too are freed at their last use; it returns the outputs of all strands."""

    module: fx.GraphModule
    inputs: tuple[tuple[str, Binding], ...]
    """(strand, binding) of each element of the input list."""
    outputs: tuple[tuple[str, Binding], ...]
    """(strand, what it is) of each output."""


class _ListInputs(CodeGen):
    """Generates `def forward(self, inputs)` that unpacks and empties the list.

    With plain arguments the caller's frame would hold every saved activation until the end.
    """

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        names = [name.partition(":")[0].strip() for name in free_vars if name != "self"]
        unpack = f"    {', '.join(names)}, = inputs\n" if names else ""
        return f"def forward(self, inputs):\n{unpack}    inputs.clear()\n"


def lower(
    strands: Mapping[str, StrandGraph | GraphPart],
    order: Sequence[str],
    *,
    late_waits: bool = True,
    barriers: Collection[str] = (),
) -> Lowered:
    """One executable graph of the operators `order`: `name` for one strand, `strand.name` for more.

    `late_waits=False` puts each wait right after its collective (used to measure them alone);
    after each operator in `barriers` stand the waits for everything in flight.
    Raises InputError when the order is not a valid order of the graphs.
    """
    parts = {
        name: part if isinstance(part, GraphPart) else GraphPart.whole(part)
        for name, part in strands.items()
    }
    builder = _Builder(parts, late_waits)
    single = next(iter(strands)) if len(strands) == 1 else ""
    stops = frozenset(barriers)
    for full_name in order:
        strand, _, name = (single, "", full_name) if single else full_name.partition(".")
        builder.operator(strand, name)
        if full_name in stops:
            builder.barrier()
    return builder.finish()


class _Builder:
    def __init__(self, parts: Mapping[str, GraphPart], late_waits: bool) -> None:
        self.parts = parts
        self.late_waits = late_waits
        self.graph = fx.Graph()
        self.graph.set_codegen(_ListInputs())
        self.root = nn.Module()
        self.done: dict[tuple[str, fx.Node], fx.Node] = {}
        self.flying: list[tuple[str, fx.Node]] = []
        self.inputs: dict[fx.Node, tuple[str, Binding]] = {}
        self.copying = {name: copying_views(part.strand.graph) for name, part in parts.items()}
        for strand, part in parts.items():
            for node, binding in part.inputs.items():
                copy = self.graph.placeholder(f"{strand}_{node.name}")
                copy.meta = {"strand": strand, "name": node.name}
                self.done[strand, node] = copy
                self.inputs[copy] = (strand, binding)

    def operator(self, strand: str, name: str) -> None:
        """Append one operator and the free nodes (views, waits) that it needs."""
        node = self.parts[strand].operators.get(name) if strand in self.parts else None
        if node is None or (strand, node) in self.done:
            why = "is not in the graph" if node is None else "comes twice"
            raise InputError(f"plan: operator {strand}.{name} {why}", hint="plan again")
        self._require(strand, node)
        self._append(strand, node)
        if is_collective(node):
            self.flying.append((strand, node))
            if not self.late_waits:
                self.barrier()

    def barrier(self) -> None:
        """Append the waits of all collectives of this graph that nobody has waited for, except
        those that are handed to the next phase in flight, where they are waited for."""
        for strand, node in self.flying:
            if node in self.parts[strand].outputs:
                continue
            for user in node.users:
                if (strand, user) not in self.done:
                    self._append(strand, user)
        self.flying.clear()

    def _require(self, strand: str, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if (strand, source) in self.done:
                continue
            if not is_free(source):
                raise InputError(
                    f"plan: operator {strand}.{node.name} comes before its input {source.name}",
                    hint="plan again",
                )
            self._require(strand, source)
            self._append(strand, source)

    def _append(self, strand: str, node: fx.Node) -> None:
        def copied(source: fx.Node) -> fx.Node:
            return self.done[strand, source]

        if node.op == "get_attr":
            name = f"{strand}_{node.target}"
            setattr(self.root, name, getattr(self.parts[strand].strand.module, str(node.target)))
            copy = self.graph.get_attr(name)
        elif is_collective(node):
            row = known_row(node.target)
            args, options = fx.node.map_arg((node.args, node.kwargs), copied)
            if row.consumes and _sole_reader(node):
                options = {**options, "consume": True}
            copy = self.graph.call_function(row.call, args, options)
        elif is_wait(node):
            copy = self.graph.call_function(wait, (copied(node.all_input_nodes[0]),))
        elif node.target == aten.as_strided.default:
            copy = self._as_strided(node, copied)
        else:
            copy = self.graph.node_copy(node, copied)
            if node in self.copying[strand]:
                copy.target = aten.reshape.default
        copy.meta = {"strand": strand, "name": node.name}
        if is_collective(node):
            copy.meta["collective"] = known_row(node.target)
        self.done[strand, node] = copy

    def _as_strided(self, node: fx.Node, copied: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Strides given as numbers are meant for memory as it was traced."""
        source, *numbers = node.args
        assert isinstance(source, fx.Node)
        seen = tuple(source.meta["val"].stride())
        as_seen = self.graph.call_function(restrided, (copied(source), seen))
        as_seen.meta = {"strand": copied(source).meta["strand"], "name": f"{node.name}_source"}
        return self.graph.call_function(node.target, (as_seen, *numbers), node.kwargs)  # type: ignore[arg-type]

    def finish(self) -> Lowered:
        outputs, owners = [], []
        for strand, part in self.parts.items():
            missing = [
                name for name, node in part.operators.items() if (strand, node) not in self.done
            ]
            if missing:
                raise InputError(
                    f"plan: operator {strand}.{missing[0]} of the graph is missing",
                    hint="plan again",
                )
            for node, name in zip(part.outputs, part.names, strict=True):
                if (strand, node) not in self.done:
                    self._require(strand, node)
                    self._append(strand, node)
                outputs.append(self.done[strand, node])
                owners.append((strand, name))
        self.graph.output(tuple(outputs))
        module = fx.GraphModule(self.root, self.graph)
        return Lowered(module, tuple(self.inputs.values()), tuple(owners))


def _sole_reader(collective: fx.Node) -> bool:
    """Whether the collective is the only reader of a value that an operator made for it."""
    source = collective.all_input_nodes[0]
    while len(source.users) == 1 and RESULTS not in source.meta:
        if source.target not in VIEWS:
            return not is_free(source) and _makes_memory(source)
        source = source.all_input_nodes[0]
    return False


def _makes_memory(node: fx.Node) -> bool:
    """Whether a result is of the operator's own making: there are views beside `VIEWS`, such as
    `squeeze.dims`, and what they look at may have other readers."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not any(result.alias_info for result in schema.returns)
