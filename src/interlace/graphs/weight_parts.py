"""Operators by which parts of weights become whole, and gradients become sums of parts.

What a collective moves is flat. In rows there is one row for each rank: [ranks, elements of a
part]; a part is what a rank has of a weight that is cut along one dimension.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from interlace.graphs.writer import GraphWriter
from interlace.parallel.data import Axis

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def gathered_rows(writer: GraphWriter, flat: fx.Node, axis: Axis) -> fx.Node:
    """What all ranks of `axis` have, in rows."""
    gather = _functional.all_gather_into_tensor.default
    pending = writer.call(gather, flat, axis.size, axis.group)
    whole = writer.call(_functional.wait_tensor.default, pending)
    return writer.call(aten.view.default, whole, [axis.size, -1])


def scattered_sum(writer: GraphWriter, rows: fx.Node, axis: Axis) -> fx.Node:
    """This rank's row of the sum over `axis`."""
    scatter = _functional.reduce_scatter_tensor.default
    pending = writer.call(scatter, rows, "sum", axis.size, axis.group)
    return writer.call(_functional.wait_tensor.default, pending)


def summed(writer: GraphWriter, value: fx.Node, axis: Axis) -> fx.Node:
    """The sum over `axis`."""
    pending = writer.call(_functional.all_reduce.default, value, "sum", axis.group)
    return writer.call(_functional.wait_tensor.default, pending)


def side_by_side(
    writer: GraphWriter, rows: fx.Node, ranks: int, dim: int, part: Sequence[int]
) -> fx.Node:
    """A view of rows: parts of this shape, with the ranks as an axis before the dimension `dim`
    that they cut."""
    parts = writer.call(aten.view.default, rows, [ranks, *part])
    if dim == 0:
        return parts
    axes = [*range(1, dim + 1), 0, *range(dim + 1, len(part) + 1)]
    return writer.call(aten.permute.default, parts, axes)


def joined(writer: GraphWriter, parts: fx.Node, shape: Sequence[int]) -> fx.Node:
    """What `side_by_side` gives as one tensor of this shape."""
    return writer.call(aten.view.default, contiguous(writer, parts), list(shape))


def in_rows(
    writer: GraphWriter, whole: fx.Node, ranks: int, dim: int, part: Sequence[int]
) -> fx.Node:
    """The parts of this shape that a whole tensor has along `dim`."""
    node = contiguous(writer, whole)
    if dim:
        split = writer.call(aten.view.default, node, [*part[:dim], ranks, *part[dim:]])
        axes = [dim, *(i for i in range(len(part) + 1) if i != dim)]
        moved = writer.call(aten.permute.default, split, axes)
        node = writer.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
    return writer.call(aten.view.default, node, [ranks, prod(part)])


def packed_rows(writer: GraphWriter, rows: Sequence[fx.Node]) -> fx.Node:
    """Rows of several tensors behind each other."""
    return rows[0] if len(rows) == 1 else writer.call(aten.cat.default, list(rows), 1)


def contiguous(writer: GraphWriter, node: fx.Node) -> fx.Node:
    """`node`, copied if it does not lie in memory as its shape says."""
    if node.meta["val"].is_contiguous():
        return node
    return writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def in_dtype(writer: GraphWriter, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    """`node` in this type, None for its own."""
    if dtype is None or node.meta["val"].dtype == dtype:
        return node
    return writer.call(aten._to_copy.default, node, dtype=dtype)
