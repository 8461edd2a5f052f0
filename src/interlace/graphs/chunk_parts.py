"""A walk of a model cut into the parts of its chunks, of which each rank of a pipeline runs some.

Every operator has a label, the name of the part that it belongs to. A part is given what it reads
of others by name (role `carried`), and gives what others read of it. A view is made again by who
reads it, from what it looks at; of an operator with several results only those that are read are
handed over. A collective that nobody in its part waits for is handed over in flight to a part of
the same rank; to another rank goes its result, so its part waits for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from interlace.graphs.collectives import is_wait
from interlace.graphs.op_graphs import is_free
from interlace.graphs.parts import CARRIED, GraphPart
from interlace.graphs.trace import VIEWS, Binding


@dataclass(frozen=True)
class Value:
    """What one part hands to others."""

    node: fx.Node
    label: str
    """The part that makes it."""


@dataclass(frozen=True)
class Cut:
    """The parts of a walk, and what they hand to each other."""

    parts: Mapping[str, GraphPart]
    read: Mapping[str, tuple[Value, ...]]
    """By part: what it is given by others, in the order of the graph."""


def cut_parts(
    whole: GraphPart,
    labels: Sequence[str],
    label_of: Mapping[str, str],
    homes: Callable[[Binding, str | None], Sequence[str]],
    *,
    apart: Callable[[str, str], bool],
) -> Cut:
    """The part of each of `labels`, which run in this order; `label_of` has that of each operator,
    by name.

    `homes` says which parts give an output of the whole, from its name and the part that makes it
    (None for an input); `apart` whether two parts run on different ranks."""
    return _Cutter(whole, labels, label_of, homes, apart).cut()


class _Cutter:
    def __init__(
        self,
        whole: GraphPart,
        labels: Sequence[str],
        label_of: Mapping[str, str],
        homes: Callable[[Binding, str | None], Sequence[str]],
        apart: Callable[[str, str], bool],
    ) -> None:
        self.whole = whole
        self.labels = labels
        self.homes = homes
        self.apart = apart
        self.label_of = {node: label_of[name] for name, node in whole.operators.items()}
        self.waited = self._waited()
        self.place = {node: i for i, node in enumerate(whole.strand.graph.nodes)}
        self.inputs: dict[str, dict[fx.Node, Binding]] = {label: {} for label in labels}
        self.crossing: dict[str, set[fx.Node]] = {label: set() for label in labels}

    def cut(self) -> Cut:
        """All parts."""
        for node, label in self.label_of.items():
            self._need(node.all_input_nodes, label)
        given: dict[str, list[tuple[fx.Node, Binding]]] = {label: [] for label in self.labels}
        for node, name in zip(self.whole.outputs, self.whole.names, strict=True):
            for label in self.homes(name, self._maker(node)):
                self._need((node,), label)
                given[label].append((node, name))
        read = {label: self._values(label) for label in self.labels}
        readers = {value.node: value.label for values in read.values() for value in values}
        for node in sorted(readers, key=self.place.__getitem__):
            given[readers[node]].insert(0, (node, self._carried(node)))
        return Cut({label: self._part(label, given[label], read[label]) for label in self.labels},
                   read)  # fmt: skip

    def _part(
        self,
        label: str,
        given: Sequence[tuple[fx.Node, Binding]],
        read: Iterable[Value],
    ) -> GraphPart:
        operators = {
            name: node
            for name, node in self.whole.operators.items()
            if self.label_of[node] == label
        }
        inputs = self.inputs[label] | {v.node: self._carried(v.node) for v in read}
        return GraphPart(
            self.whole.strand, operators, inputs,
            tuple(node for node, _ in given), tuple(name for _, name in given),
        )  # fmt: skip

    def _carried(self, node: fx.Node) -> Binding:
        """Both walks of a model may have nodes of one name."""
        return Binding(CARRIED, f"{self.whole.strand.name}.{node.name}")

    def _values(self, label: str) -> tuple[Value, ...]:
        nodes = sorted(self.crossing[label], key=self.place.__getitem__)
        return tuple(Value(node, str(self._maker(node))) for node in nodes)

    def _maker(self, node: fx.Node) -> str | None:
        """The part of the operator behind a value; None for an input and views of it."""
        while node not in self.label_of:
            if not node.all_input_nodes:
                return None
            node = node.all_input_nodes[0]
        return self.label_of[node]

    def _need(self, nodes: Iterable[fx.Node], label: str) -> None:
        """Note what a part has to be given for these."""
        stack = list(nodes)
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.whole.inputs:
                self.inputs[label][node] = self.whole.inputs[node]
            elif node in self.label_of:
                if self.label_of[node] != label:
                    self.crossing[label].add(node)
            elif (value := self._handed(node, label)) is not None:
                self.crossing[label].add(value)
            else:
                stack += node.all_input_nodes

    def _handed(self, node: fx.Node, label: str) -> fx.Node | None:
        """What a part is given where it reads this wait or look-up; None if it makes it itself."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        maker = None if source is None else self.label_of.get(source)
        if maker is None or maker == label or node.target in VIEWS:
            return None
        if is_wait(node) and node not in self.waited[maker] and not self.apart(maker, label):
            return source
        return node

    def _waited(self) -> dict[str, set[fx.Node]]:
        """By part, the waits that stand in it in any case."""
        found: dict[str, set[fx.Node]] = {label: set() for label in self.labels}
        for node, label in self.label_of.items():
            stack = list(node.all_input_nodes)
            while stack:
                source = stack.pop()
                if is_free(source) and source not in found[label]:
                    found[label].add(source)
                    stack += source.all_input_nodes
        return found
