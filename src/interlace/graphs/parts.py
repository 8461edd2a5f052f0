"""Parts of a strand: what one phase runs when it does not run all of it.

A strand that runs its head one phase ahead hands values over: what operators of the head made
and the rest, or the strand's outputs, need. A collective that nobody in the head waits for is
handed over in flight (`collectives.Pending`), and the rest waits for it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from interlace.graphs.collectives import is_wait
from interlace.graphs.op_graphs import is_free
from interlace.graphs.trace import VIEWS, Binding, StrandGraph

CARRIED = "carried"
"""Role of an input that an earlier phase made."""


@dataclass(frozen=True)
class Part:
    """Some operators of a strand, with what goes in and what comes out."""

    strand: StrandGraph
    operators: Mapping[str, fx.Node]
    """By name; free nodes (views, waits) are appended where they are needed."""
    inputs: Mapping[fx.Node, Binding]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def whole(cls, strand: StrandGraph) -> "Part":
        """All of it."""
        return cls(strand, _operators(strand), _placeholders(strand), strand.outputs)


def split(strand: StrandGraph, ahead: int) -> tuple[Part, Part]:
    """(head, rest): the first `ahead` operators, whose outputs are what is handed over, and the
    others, which have it as inputs of role `carried` and give the strand's outputs."""
    operators = _operators(strand)
    names = list(operators)
    head = {name: operators[name] for name in names[:ahead]}
    rest = {name: operators[name] for name in names[ahead:]}
    carried = _handed_over(strand, frozenset(head.values()), rest)
    placeholders = _placeholders(strand)
    reads = _reads(head.values())
    return (
        Part(strand, head, {n: b for n, b in placeholders.items() if n in reads}, carried),
        Part(
            strand,
            rest,
            placeholders | {node: Binding(CARRIED, node.name) for node in carried},
            strand.outputs,
        ),
    )


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
    strand: StrandGraph, head: frozenset[fx.Node], rest: Mapping[str, fx.Node]
) -> tuple[fx.Node, ...]:
    """Nodes that the head computes and somebody after it needs, in graph order.

    A view is made again from what it looks at; of an operator with several results only those
    that are needed are handed over.
    """
    waited = {node for node in _reads(head) if is_wait(node)}
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [source for node in rest.values() for source in node.all_input_nodes]
    stack += strand.outputs
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
    return tuple(node for node in strand.graph.nodes if node in found)
