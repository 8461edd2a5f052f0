"""Lower strands in a planned order to one executable graph.

The order of the graph is the schedule: at run time one thread executes it from top to bottom.
Collectives start where the plan puts them, each wait stands right before the first operator
that needs the result, and every value is dropped after its last use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.graph import CodeGen

from interlace.errors import InputError
from interlace.graphs.collectives import CONSUMERS, ISSUE, is_collective, is_wait, wait
from interlace.graphs.export import is_free
from interlace.graphs.trace import VIEWS, Binding, StrandGraph


@dataclass(frozen=True)
class Lowered:
    """An executable graph. Call it as `module(inputs)` with a list, which it empties, so that
    inputs too are freed at their last use; it returns the outputs of all strands."""

    module: fx.GraphModule
    inputs: tuple[tuple[str, Binding], ...]
    """(strand, binding) of each element of the input list."""
    outputs: tuple[str, ...]
    """Strand of each output."""


class _ListInputs(CodeGen):
    """Generates `def forward(self, inputs)` that unpacks and empties the list.

    With plain arguments the caller's frame would hold every saved activation until the end.
    """

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        names = [name.partition(":")[0].strip() for name in free_vars if name != "self"]
        unpack = f"    {', '.join(names)}, = inputs\n" if names else ""
        return f"def forward(self, inputs):\n{unpack}    inputs.clear()\n"


def lower(
    strands: Mapping[str, StrandGraph], order: Sequence[str], *, late_waits: bool = True
) -> Lowered:
    """One executable graph of the operators `order`: `name` for one strand, `strand.name` for two.

    `late_waits=False` puts each wait right after its collective (used to measure them alone).
    Raises InputError when the order is not a valid order of the graphs.
    """
    builder = _Builder(strands, late_waits)
    single = next(iter(strands)) if len(strands) == 1 else ""
    for name in order:
        strand, _, node = (single, "", name) if single else name.partition(".")
        builder.operator(strand, node)
    return builder.finish()


class _Builder:
    def __init__(self, strands: Mapping[str, StrandGraph], late_waits: bool) -> None:
        self.strands = strands
        self.late_waits = late_waits
        self.graph = fx.Graph()
        self.graph.set_codegen(_ListInputs())
        self.root = nn.Module()
        self.nodes = {
            (name, node.name): node
            for name, strand in strands.items()
            for node in strand.graph.nodes
        }
        self.done: dict[fx.Node, fx.Node] = {}
        self.inputs: list[tuple[str, Binding]] = []
        for name, strand in strands.items():
            for node in strand.graph.nodes:
                if node.op == "placeholder":
                    copy = self.graph.placeholder(f"{name}_{node.name}")
                    self.done[node] = copy
                    self.inputs.append((name, strand.bindings[node.name]))

    def operator(self, strand: str, name: str) -> None:
        """Append one operator and the free nodes (views, waits) that it needs."""
        node = self.nodes.get((strand, name))
        if node is None or node in self.done:
            why = "is not in the graph" if node is None else "comes twice"
            raise InputError(f"plan: operator {strand}.{name} {why}", hint="plan again")
        self._require(strand, node)
        self._append(strand, node)
        if is_collective(node) and not self.late_waits:
            for user in node.users:
                self._append(strand, user)

    def _require(self, strand: str, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.done:
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
            return self.done[source]

        if node.op == "get_attr":
            name = f"{strand}_{node.target}"
            setattr(self.root, name, getattr(self.strands[strand].module, str(node.target)))
            copy = self.graph.get_attr(name)
        elif is_collective(node):
            issue, _ = ISSUE[node.target]  # type: ignore[index]
            options: dict[str, Any] = (
                {"consume": True} if issue in CONSUMERS and _sole_reader(node) else {}
            )
            copy = self.graph.call_function(issue, fx.node.map_arg(node.args, copied), options)
        elif is_wait(node):
            copy = self.graph.call_function(wait, (copied(node.all_input_nodes[0]),))
        else:
            copy = self.graph.node_copy(node, copied)
        copy.meta = {"strand": strand, "name": node.name}
        self.done[node] = copy

    def finish(self) -> Lowered:
        outputs, owners = [], []
        for name, strand in self.strands.items():
            missing = [
                n
                for n in strand.graph.nodes
                if n not in self.done and n.op == "call_function" and not is_free(n)
            ]
            if missing:
                raise InputError(
                    f"plan: operator {name}.{missing[0].name} of the graph is missing",
                    hint="plan again",
                )
            for node in strand.outputs:
                if node not in self.done:
                    self._require(name, node)
                    self._append(name, node)
                outputs.append(self.done[node])
                owners.append(name)
        self.graph.output(tuple(outputs))
        module = fx.GraphModule(self.root, self.graph)
        return Lowered(module, tuple(self.inputs), tuple(owners))


def _sole_reader(collective: fx.Node) -> bool:
    """Whether the collective is the only reader of a value that an operator made for it."""
    source = collective.all_input_nodes[0]
    while len(source.users) == 1:
        if source.target not in VIEWS:
            return not is_free(source)
        source = source.all_input_nodes[0]
    return False
