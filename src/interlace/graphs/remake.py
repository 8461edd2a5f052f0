"""Move values from "kept by the forward" to "computed again by the backward".

A value is computed again by copies of the forward's own nodes, placed right before the first node
of the backward that needs it. So a copy has the bits of the original, and a planner sees ordinary
operators. What the copies read is kept, unless it is computed again too; a view is never kept, but
what it looks at.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from interlace.graphs.torch_private import tree_leaves
from interlace.graphs.trace import (
    VIEWS,
    Binding,
    ChunkGraphs,
    drop_unused_inputs,
    set_outputs,
)

AGAIN = "_again"
"""Ends the name of a node that the backward computes again."""

IsRemade = Callable[[fx.Node], bool]
"""Whether a node of the forward is computed again, rather than kept, if the backward needs it."""


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at memory of its input, as a look-up in a split does."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in VIEWS
    return node.target in VIEWS


def looked_at(node: fx.Node) -> fx.Node:
    """The node whose memory a node looks at; itself if it has its own."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def saved_values(chunk: ChunkGraphs) -> dict[str, fx.Node]:
    """The forward's node behind each saved value, by the value's name."""
    return dict(zip(chunk.saved, chunk.forward.outputs[1:], strict=True))


def needed(chunk: ChunkGraphs, again: IsRemade) -> tuple[list[fx.Node], list[fx.Node]]:
    """(kept, remade): nodes of the forward whose values are handed over, and those that are
    computed again, both in the order of the forward."""
    kept: set[fx.Node] = set()
    remade: set[fx.Node] = set()
    stack = list(saved_values(chunk).values())
    while stack:
        node = stack.pop()
        if node in kept or node in remade:
            continue
        if node.op == "get_attr" or is_view(node) or (node.op == "call_function" and again(node)):
            remade.add(node)
            stack += node.all_input_nodes
        else:
            kept.add(node)
    order = list(chunk.forward.graph.nodes)
    return [n for n in order if n in kept], [n for n in order if n in remade]


def kept_bytes(chunk: ChunkGraphs, again: IsRemade = lambda _: False) -> int:
    """Bytes that one micro-batch keeps from its forward for its backward, or would keep; each
    storage once. Parameters, buffers and the batch are there anyway and do not count."""
    kept, _ = needed(chunk, again)
    values = [node.meta["val"] for node in kept if node.op != "placeholder"]
    return sum(tensor.nbytes for tensor in tree_leaves(values))


def remake(chunk: ChunkGraphs, again: IsRemade) -> ChunkGraphs:
    """`chunk` with a backward that computes again what `again` says. Changes its graphs."""
    kept, remade = needed(chunk, again)
    copier = _Copier(chunk, kept, remade)
    copier.run()
    forward, backward = chunk.forward, chunk.backward
    drop_unused_inputs(backward.graph)
    backward = replace(backward, bindings=_left(backward.graph, copier.bindings))
    saved = [b.target for b in backward.bindings.values() if b.role == "saved"]
    set_outputs(forward.graph, [forward.outputs[0], *(copier.saved[name] for name in saved)])
    drop_unused_inputs(forward.graph)
    forward = replace(forward, bindings=_left(forward.graph, forward.bindings))
    for strand in (forward, backward):
        strand.module.recompile()
    return replace(chunk, forward=forward, backward=backward, saved=tuple(saved))


def _left(graph: fx.Graph, bindings: Mapping[str, Binding]) -> dict[str, Binding]:
    return {node.name: bindings[node.name] for node in graph.find_nodes(op="placeholder")}


class _Copier:
    """Copies nodes of the forward into the backward, each once, at its first use."""

    def __init__(self, chunk: ChunkGraphs, kept: list[fx.Node], remade: list[fx.Node]) -> None:
        self.forward, self.backward = chunk.forward, chunk.backward
        self.graph = chunk.backward.graph
        self.bindings = dict(chunk.backward.bindings)
        self.saved = saved_values(chunk)
        self.position = {node: index for index, node in enumerate(remade)}
        self.value: dict[fx.Node, fx.Node] = {}
        """What stands in the backward for a node of the forward."""
        self.given: dict[Binding, fx.Node] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            binding = self.bindings[node.name]
            self.given[binding] = node
            if binding.role == "saved" and self.saved[binding.target] not in self.position:
                self.value.setdefault(self.saved[binding.target], node)
        for node in kept:
            if node not in self.value:
                self.value[node] = self._input(node)

    def run(self) -> None:
        """Make every reader of a value that is computed again read the copy."""
        for node in list(self.graph.nodes):
            for source in node.all_input_nodes:
                binding = self.bindings.get(source.name) if source.op == "placeholder" else None
                if binding is None or binding.role != "saved":
                    continue
                origin = self.saved[binding.target]
                if origin in self.position:
                    node.replace_input_with(source, self._make(origin, node))

    def _input(self, node: fx.Node) -> fx.Node:
        """A placeholder of the backward for a kept node; one of the forward's own inputs if it
        lives as long as the run."""
        binding = self.forward.bindings.get(node.name) if node.op == "placeholder" else None
        if binding is None or binding.role == "batch":
            binding = Binding("saved", node.name)
            self.saved[node.name] = node
        if binding in self.given:
            return self.given[binding]
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            made = self.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        self.bindings[made.name] = binding
        self.given[binding] = made
        return made

    def _make(self, wanted: fx.Node, before: fx.Node) -> fx.Node:
        """The copy of `wanted`, with all that it needs and that is not there yet."""
        missing: set[fx.Node] = set()
        stack = [wanted]
        while stack:
            node = stack.pop()
            if node not in self.value and node not in missing:
                missing.add(node)
                stack += node.all_input_nodes
        with self.graph.inserting_before(before):
            for node in sorted(missing, key=self.position.__getitem__):
                self.value[node] = self._copy(node)
        return self.value[wanted]

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":  # both graphs are parts of one, so equal names mean equal values
            constant = getattr(self.forward.module, str(node.target))
            setattr(self.backward.module, str(node.target), constant)
        copy = self.graph.create_node(
            node.op,
            node.target,
            fx.node.map_arg(node.args, self.value.__getitem__),
            fx.node.map_arg(node.kwargs, self.value.__getitem__),
            name=node.name + AGAIN,
        )
        copy.meta = dict(node.meta)
        return copy
