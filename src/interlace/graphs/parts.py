"""Parts of a graph: what one strand runs, with a name for each value that goes in or comes out.

A graph that is cut in two hands values over: what operators of the head made
and the rest, or the strand's outputs, need. A collective that nobody in the head waits for is
handed over in flight (`collectives.Pending`), and the rest waits for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from interlace.graphs.collectives import is_wait
from interlace.graphs.op_graphs import is_free
from interlace.graphs.trace import VIEWS, Binding, StrandGraph

CARRIED = "carried"
"""Role of a value that one part of a graph hands to the other."""
SAVED = "saved"
"""Role of a value that a forward keeps for its backward."""
HANDED = (SAVED, CARRIED)
"""Roles of what one strand of a micro-batch hands to another."""
RESULT = "result"
"""Role of an output that a step hands to its caller beside the loss, by number."""
LOSS = Binding("loss", "loss")
"""The output that a micro-batch is judged by."""


@dataclass(frozen=True)
class GraphPart:
    """Some operators of a strand, with what goes in and what comes out."""

    strand: StrandGraph
    operators: Mapping[str, fx.Node]
    """By name; free nodes (views, waits) are appended where they are needed."""
    inputs: Mapping[fx.Node, Binding]
    outputs: tuple[fx.Node, ...]
    names: tuple[Binding, ...]
    """What each output is."""

    @classmethod
    def whole(cls, strand: StrandGraph, names: Sequence[Binding] = ()) -> "GraphPart":
        """All of it. Outputs without names go by those of their nodes."""
        outputs = strand.outputs
        names = tuple(names) or tuple(Binding("output", node.name) for node in outputs)
        return cls(strand, _operators(strand), _placeholders(strand), outputs, names)

    def split(self, at: int) -> "tuple[GraphPart, GraphPart]":
        """(head, rest): the first `at` operators, whose outputs are what is handed over, and the
        others, which have it as inputs of role `carried` and give the outputs of this part, which
        must be a whole graph or the rest of one."""
        strand, names = self.strand, list(self.operators)
        head = {name: self.operators[name] for name in names[:at]}
        rest = {name: self.operators[name] for name in names[at:]}
        carried = _handed_over(self, frozenset(head.values()), rest)
        reads = _reads(head.values())
        later = _reads((*rest.values(), *self.outputs)).union(self.outputs)
        given = tuple(Binding(CARRIED, node.name) for node in carried)
        first = {n: b for n, b in self.inputs.items() if n in reads}
        second = {n: b for n, b in self.inputs.items() if b.role not in HANDED or n in later}
        return (
            GraphPart(strand, head, first, carried, given),
            GraphPart(
                strand, rest, second | dict(zip(carried, given, strict=True)), self.outputs,
                self.names,
            ),
        )  # fmt: skip


def _operators(strand: StrandGraph) -> dict[str, fx.Node]:
    return {
        node.name: node
        for node in strand.graph.nodes
        if node.op == "call_function" and not is_free(node)
    }


def _placeholders(strand: StrandGraph) -> dict[fx.Node, Binding]:
    return {
        node: strand.bindings[node.name] for node in strand.graph.nodes if node.op == "placeholder"
    }


def _reads(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Everything that these nodes need, through free nodes."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                if is_free(source):
                    stack.append(source)
    return found


def _handed_over(
    part: GraphPart, head: frozenset[fx.Node], rest: Mapping[str, fx.Node]
) -> tuple[fx.Node, ...]:
    """Nodes that the head computes and somebody after it needs, in graph order.

    A view is made again from what it looks at; of an operator with several results only those
    that are needed are handed over.
    """
    waited = {node for node in _reads(head) if is_wait(node)}
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [source for node in rest.values() for source in node.all_input_nodes]
    stack += part.outputs
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node in head:
            found.add(node)
        elif is_wait(node):
            assert source is not None
            if source in head:
                found.add(node if node in waited else source)
        elif is_free(node) and node.target not in VIEWS and source in head:
            found.add(node)  # a look-up in an operator's results
        elif is_free(node):
            stack += node.all_input_nodes
    return tuple(node for node in part.strand.graph.nodes if node in found)
