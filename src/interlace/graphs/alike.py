"""Which values of a traced step all ranks of an axis hold alike.

Values follow from weights, batches and collectives (`spread`), if all ranks run the same operators
with the same constants. An operator that is not the same on all of them, such as the slice of a
rank's own part, makes values differ, over which ranks is not known.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from interlace.graphs.parts import SAVED, GraphPart
from interlace.graphs.spread import UNCLEAR, GlobalRanks, Spread, spread_of


@dataclass(frozen=True)
class TracedStep:
    """The forward and the backward of a whole model, as this rank traced them."""

    forward: GraphPart
    backward: GraphPart
    tensors: Mapping[str, Tensor]
    """Parameters and buffers, by name."""
    axes: Mapping[str, str]
    """The mesh axis of each process group, by name."""

    @property
    def nodes(self) -> list[fx.Node]:
        """Of both graphs, in order."""
        return [*self.forward.strand.graph.nodes, *self.backward.strand.graph.nodes]

    def texts(self) -> list[str]:
        """What each node does, as a few letters. Process groups go by their axes."""
        return [hashlib.sha256(self._text(node).encode()).hexdigest()[:12] for node in self.nodes]

    def _text(self, node: fx.Node) -> str:
        def named(value: Any) -> Any:
            return self.axes.get(value, value) if isinstance(value, str) else value

        given = [fx.node.map_aggregate(each, named) for each in (node.args, node.kwargs)]
        return f"{node.op} {node.target} {given}"

    def spreads(self, differing: Collection[fx.Node]) -> dict[fx.Node, Spread]:
        """The groups of ranks over which values differ, if these nodes are not the same on all."""
        unlike = {node for node in self.nodes if node.op == "get_attr" or node in differing}
        found = spread_of(self.forward.strand, self.tensors, unlike=unlike)
        saved = {
            name.target: found[node]
            for node, name in zip(self.forward.outputs, self.forward.names, strict=True)
            if name.role == SAVED
        }
        return found | spread_of(self.backward.strand, self.tensors, saved=saved, unlike=unlike)


def unlike_nodes(nodes: Iterable[fx.Node], of_ranks: Collection[list[str]]) -> set[fx.Node]:
    """The nodes whose texts differ between ranks; all, if ranks have other numbers of them."""
    nodes = list(nodes)
    if any(len(texts) != len(nodes) for texts in of_ranks):
        return set(nodes)
    by_node = zip(nodes, zip(*of_ranks, strict=True), strict=True)
    return {node for node, texts in by_node if len(set(texts)) > 1}


def is_alike(spread: Spread, ranks: GlobalRanks) -> bool:
    """Whether these ranks hold a value alike that differs over the groups of `spread`."""
    return UNCLEAR not in spread and all(len({*ranks} & {*group}) < 2 for group in spread)
