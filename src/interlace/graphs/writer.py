"""Write operators into an fx graph; shapes and types are worked out on fake tensors."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from interlace.graphs.buffers import written
from interlace.graphs.torch_private import LazyGraphModule
from interlace.graphs.trace import Binding, StrandGraph


class GraphWriter:
    """Appends nodes at one place of a graph, each with the value that tracing would give it."""

    def __init__(self, graph: fx.Graph, bindings: dict[str, Binding], *, like: fx.Node) -> None:
        """New inputs get an entry in `bindings`, and the type and device of `like`."""
        self.graph = graph
        self.bindings = bindings
        self._like: torch.Tensor = like.meta["val"]
        self._next: fx.Node | None = None

    @classmethod
    def empty(cls, like: fx.Node) -> "GraphWriter":
        """A writer of a graph of its own; `strand` makes it a StrandGraph."""
        return cls(fx.Graph(), {}, like=like)

    def at(self, node: fx.Node) -> "GraphWriter":
        """Go on writing before `node`."""
        self._next = node
        return self

    def after(self, node: fx.Node) -> "GraphWriter":
        """Go on writing right behind `node`."""
        return self.at(node.next)

    def placeholder(
        self, name: str, binding: Binding, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> fx.Node:
        """A new input, in front of everything that computes."""
        with self._like.fake_mode:  # type: ignore[attr-defined]
            value = torch.empty(
                tuple(shape), dtype=dtype or self._like.dtype, device=self._like.device
            )
        return self._input(name, binding, value)

    def placeholder_like(self, other: fx.Node, binding: Binding) -> fx.Node:
        """A new input of the name, shape, type and strides of one of another graph."""
        return self._input(other.name, binding, other.meta["val"])

    def _input(self, name: str, binding: Binding, value: torch.Tensor) -> fx.Node:
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with self._before(first):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.bindings[node.name] = binding
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operator."""
        with self._before(self._next):
            node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self._like.fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def _before(self, node: fx.Node | None) -> AbstractContextManager[object]:
        """Of a graph, `inserting_before(None)` would be its beginning; here it is the end."""
        return nullcontext() if node is None else self.graph.inserting_before(node)

    def strand(self, name: str) -> StrandGraph:
        """The graph written so far, without outputs."""
        self.graph.output(())
        return StrandGraph(name, LazyGraphModule(nn.Module(), self.graph), self.bindings)


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that nobody reads, and then what only they read."""
    stack = list(nodes)
    erased: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in erased or node.op != "call_function" or node.users or written(node):
            continue
        stack += node.all_input_nodes
        erased.add(node)
        node.graph.erase_node(node)


def move_before(place: fx.Node, values: Iterable[object]) -> None:
    """Move what makes `values` in front of `place`, as far as it stands behind; it must not depend
    on `place`."""
    late: set[fx.Node] = set()
    stack = [value for value in values if isinstance(value, fx.Node)]
    while stack:
        node = stack.pop()
        if place < node and node not in late:
            late.add(node)
            stack += node.all_input_nodes
    for node in sorted(late):
        place.prepend(node)
