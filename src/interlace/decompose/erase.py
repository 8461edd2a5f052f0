"""Move nodes for a rewrite, and drop those that it left without readers."""

from collections.abc import Iterable

from torch import fx

from interlace.graphs.buffers import written


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
