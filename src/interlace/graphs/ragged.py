"""Operators that would look at the number of rows that have arrived for experts.

The graph holds a nominal number; at run time there are as many rows as the routing gave. Operators
that work on each row by itself do the same on any number of them. Others hold the nominal number as
a constant (a mean divides by it, an expansion makes as many rows), and would be silently wrong.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from interlace.experts.between_ranks import AS_SENT, COUNTS, EXCHANGE
from interlace.experts.grouped import MATMUL, WEIGHT_GRADIENT
from interlace.experts.merged_sends import RAGGED, TOKENS
from interlace.graphs.collectives import is_wait
from interlace.graphs.trace_errors import cannot_trace, lines_of

aten = torch.ops.aten
_SAME_ROWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.silu_backward.default,
        aten.gelu_backward.default,
        MATMUL,
        operator.getitem,
    }
)
"""Operators whose result has a row for each row of their first argument."""
_ALONG = {
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.cat.default: 1,
    aten.sum.dim_IntList: 1,
}
"""Operators that leave rows whole if they work along another dimension: the argument with it."""


def refuse_sizes(module: nn.Module, graph: fx.Graph) -> None:
    """Raise InputError for the first operator that looks at the number of rows of experts."""
    ragged: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target == EXCHANGE:
            if node.args[4] or node.args[3] == AS_SENT:
                ragged.add(node)
            continue
        if node.target in RAGGED:
            ragged.add(node)
        if node.target in RAGGED or node.target == TOKENS:
            continue
        if node.op == "output" or not any(source in ragged for source in node.all_input_nodes):
            continue
        if node.target == WEIGHT_GRADIENT:
            continue
        if not _keeps_rows(node, ragged):
            raise cannot_trace(
                module,
                f"{node.target} works on rows that have arrived for experts, whose number is known "
                "at run time only",
                lines_of(node),
                "between the exchanges do only what treats each row by itself, such as activations "
                "and grouped_matmul",
            )
        ragged.add(node)


def inside_exchanges(operators: Iterable[fx.Node]) -> frozenset[int]:
    """How many of these operators, in their order, stand before each place between those that read
    the counts of one layer: rows there are as many as were routed, and counts are on the host."""
    found: set[int] = set()
    place = {node: index for index, node in enumerate(operators)}
    for node, index in place.items():
        if node.target == COUNTS:
            last = max((place[user] for user in node.users if user in place), default=index)
            found.update(range(index + 1, last + 1))
    return frozenset(found)


def _keeps_rows(node: fx.Node, ragged: set[fx.Node]) -> bool:
    """Whether the result has a row for each row of what is ragged, made of that row alone."""
    if is_wait(node) or node.target in _SAME_ROWS:
        return node.target != MATMUL or node.args[0] in ragged
    if node.target == aten.view.default:
        return node.meta["val"].shape == node.all_input_nodes[0].meta["val"].shape
    if node.target in _ALONG:
        place = _ALONG[node.target]
        dim: Any = node.args[place] if place < len(node.args) else 0
        if isinstance(dim, list | tuple):
            (dim,) = dim if len(dim) == 1 else (0,)
        sources = node.all_input_nodes
        return dim % sources[0].meta["val"].dim() != 0 and all(n in ragged for n in sources)
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags:
        return False
    result: Tensor = node.meta["val"]
    others = [n.meta["val"] for n in node.all_input_nodes if n not in ragged]
    # Another tensor may be spread over the rows, but have none of its own.
    return all(x.dim() < result.dim() or x.shape[0] == 1 for x in others)
