"""Where elements lie in memory: what a trace saw, and what really comes.

A graph is traced on tensors that have strides and no memory. Real strides can differ: batches come
from elsewhere, and some kernels (attention on a CPU, for one) give other strides than their
descriptions say. A traced `view` holds for the strides that were seen, and fails on others where
the code that was traced, a `reshape`, would have copied. So batches are brought to the strides that
were seen, and views that nobody writes through are run as `reshape`: a view wherever one is
possible, else a copy of the same values.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, fx

from interlace.graphs.buffers import is_in_place, written
from interlace.graphs.trace import VIEWS

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
"""Views that give the same values if they copy."""


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether elements lie alike: strides of dimensions with one element do not count."""
    sizes = zip(shape, one, other, strict=True)
    return prod(shape) < 2 or all(size == 1 or a == b for size, a, b in sizes)


def has_overlap(tensor: Tensor) -> bool:
    """Whether elements share memory, as in `expand` and `unfold`; for some strides that nest in an
    unusual way also true if they do not."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0
    for step, size in sorted(pair for pair in sizes if pair[1] > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def without_overlap(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in which each element has memory of its own."""
    return tensor.contiguous() if has_overlap(tensor) else tensor


def restrided(tensor: Tensor, wanted: Sequence[int]) -> Tensor:
    """The tensor, or a copy of its values with the strides `wanted` if it has others."""
    if tensor.stride() == wanted or same_strides(tensor.shape, tensor.stride(), wanted):
        return tensor
    copy = tensor.new_empty_strided(tensor.shape, tuple(wanted))
    return copy.copy_(tensor)


def memory_of(node: fx.Node) -> fx.Node:
    """The node that allocated what a node's value lies in, or the input that it looks at."""
    while node.target in VIEWS or is_in_place(node) or _is_part_of_split(node):
        node = written(node)[0] if is_in_place(node) else node.all_input_nodes[0]
    return node


def _is_part_of_split(node: fx.Node) -> bool:
    sources = node.all_input_nodes
    name = getattr(node.target, "__name__", "")
    return name == "getitem" and bool(sources) and sources[0].target in VIEWS


def copying_views(graph: fx.Graph) -> frozenset[fx.Node]:
    """The traced views that may as well copy: nobody writes to the memory that they look at, in
    which case a copy would miss a write or lose one."""
    changed = {memory_of(value) for node in graph.nodes for value in written(node)}
    return frozenset(
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target in _RESHAPES
        and memory_of(node) not in changed
    )
