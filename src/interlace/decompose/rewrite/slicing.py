"""Data slicing as a pass over traced graphs: a site's collective is cut into k collectives.

The published baseline (Megatron-LM, MindSpeed CoC); `sliced_matmul` has it as functions. A slice is
the same part of every rank's rows. In front of a reduce-scatter they are copied together, and
behind an all-gather one `cat` puts the results of all slices in the order of the plain collective.

    all-gather 0; all-gather 1, matmul 0; all-gather 2, matmul 1; ...; matmul k - 1
    matmul 0; reduce-scatter 0, matmul 1; ...; reduce-scatter k - 1
"""

from dataclasses import replace

import torch
from torch import Tensor, fx

from interlace.decompose.rewrite.find import (
    Gather,
    Sum,
    is_matmul,
    is_sum,
    match_site,
    matmuls_of,
    row_operand,
)
from interlace.decompose.sites import Site
from interlace.errors import InputError
from interlace.graphs.trace import StrandGraph
from interlace.graphs.writer import GraphWriter, erase_unused, move_before

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def slice_site(strand: StrandGraph, site: Site, pieces: int) -> StrandGraph:
    """`strand` with `site` cut into `pieces` collectives; changes its graph.

    Raises InputError unless `pieces` divides the rows of a rank.
    """
    if pieces < 1 or site.rows % pieces:
        raise InputError(
            f"{site.rows} rows of {site.module or site.collective} cannot be cut into {pieces} "
            "equal slices",
            hint=f"set overlap.pieces to a divisor of {site.rows}",
        )
    collective = next(node for node in strand.graph.nodes if node.name == site.collective)
    match = match_site(collective)
    assert not isinstance(match, str), f"{site.collective} is no site: {match}"
    writer = GraphWriter(strand.graph, strand.bindings, like=match.wait).at(collective)
    if isinstance(match, Gather):
        _slice_gather(writer, match, site, pieces)
    else:
        _slice_sum(writer, match, site, pieces)
    return replace(strand)


def _slice_gather(writer: GraphWriter, match: Gather, site: Site, pieces: int) -> None:
    for matmul in match.matmuls:
        operand = row_operand(matmul)
        move_before(match.collective, [value for value in matmul.args if value is not operand])
    source = match.collective.args[0]
    assert isinstance(source, fx.Node)
    width = source.meta["val"].shape[-1]
    x = _matrix(writer, source)
    rows = site.rows // pieces

    def gather(index: int) -> fx.Node:
        part = writer.call(aten.slice.Tensor, x, 0, index * rows, (index + 1) * rows)
        call = _functional.all_gather_into_tensor.default
        return writer.call(call, part, site.ranks, site.group)

    outputs: list[list[fx.Node]] = [[] for _ in match.matmuls]
    gathered = []
    arriving = gather(0)
    for index in range(pieces):
        arrived = writer.call(_functional.wait_tensor.default, arriving)
        if index + 1 < pieces:
            arriving = gather(index + 1)
        gathered.append(arrived)
        for matmul, found in zip(match.matmuls, outputs, strict=True):
            found.append(_matmul(writer, matmul, _matrix(writer, arrived)))
    for matmul, parts in zip(match.matmuls, outputs, strict=True):
        matmul.replace_all_uses_with(_joined(writer, parts, site.ranks, matmul))
    if match.is_read_whole:
        parts = [writer.call(aten.view.default, part, [-1, width]) for part in gathered]
        match.wait.replace_all_uses_with(_joined(writer, parts, site.ranks, match.wait))
    erase_unused([*match.matmuls, match.wait])


def _matmul(writer: GraphWriter, matmul: fx.Node, rows: fx.Node) -> fx.Node:
    """The same matmul of other rows."""
    operand = row_operand(matmul)
    dtype = operand.meta["val"].dtype
    if rows.meta["val"].dtype != dtype:
        rows = writer.call(aten._to_copy.default, rows, dtype=dtype)
    return writer.call(matmul.target, *(rows if v is operand else v for v in matmul.args))


def _joined(writer: GraphWriter, parts: list[fx.Node], ranks: int, like: fx.Node) -> fx.Node:
    """Slices of the rows of all ranks, put together in the order and shape of `like`."""
    shape = list(like.meta["val"].shape)
    if len(parts) == 1:
        return writer.call(aten.view.default, parts[0], shape)
    width = parts[0].meta["val"].shape[-1]
    by_rank = [writer.call(aten.view.default, part, [ranks, -1, width]) for part in parts]
    return writer.call(aten.view.default, writer.call(aten.cat.default, by_rank, 1), shape)


def _slice_sum(writer: GraphWriter, match: Sum, site: Site, pieces: int) -> None:
    scatters = site.kind == "matmul_scatter"
    # An all-reduce leaves every rank all rows, so its slices need not hold rows of each.
    blocks = site.ranks if scatters else 1
    started = []
    for index in range(pieces):
        partial = _Rows(writer, blocks, pieces, index).of(match.root)
        if scatters:
            call, more = _functional.reduce_scatter_tensor.default, (site.ranks,)
        else:
            call, more = _functional.all_reduce.default, ()
        started.append(writer.call(call, partial, "sum", *more, site.group))
    parts = [writer.call(_functional.wait_tensor.default, each) for each in started]
    whole = parts[0] if pieces == 1 else writer.call(aten.cat.default, parts)
    shape = list(match.wait.meta["val"].shape)
    match.wait.replace_all_uses_with(writer.call(aten.view.default, whole, shape))
    erase_unused([match.wait])


class _Rows:
    """Computes slice `index` of `pieces` of a sum of matmuls: the same operators on fewer rows.
    The rows of a value are `blocks` blocks, and a slice has a part of each."""

    def __init__(self, writer: GraphWriter, blocks: int, pieces: int, index: int) -> None:
        self.writer = writer
        self.blocks, self.pieces, self.index = blocks, pieces, index

    def of(self, node: fx.Node) -> fx.Node:
        """These rows of a sum of matmuls, [rows, width]."""
        call = self.writer.call
        if is_matmul(node):
            return _matmul(self.writer, node, self._cut(row_operand(node)))
        if is_sum(node):
            left, right = node.all_input_nodes
            terms = [self.of(x) if matmuls_of(x) else self._cut(x) for x in (left, right)]
            return call(aten.add.Tensor, *terms)
        source = self.of(node.all_input_nodes[0])
        if node.target == aten._to_copy.default:
            return call(aten._to_copy.default, source, **node.kwargs)
        return source  # a view, which keeps the rows

    def _cut(self, x: fx.Node) -> fx.Node:
        """A copy of these rows of a value; of a single block a view."""
        call, width = self.writer.call, x.meta["val"].shape[-1]
        blocks = call(aten.view.default, _matrix(self.writer, x), [self.blocks, -1, width])
        rows = blocks.meta["val"].shape[1] // self.pieces
        start = self.index * rows
        part = call(aten.slice.Tensor, blocks, 1, start, start + rows)
        if self.blocks > 1 and self.pieces > 1:
            part = call(aten.clone.default, part, memory_format=torch.contiguous_format)
        return call(aten.view.default, part, [-1, width])


def _matrix(writer: GraphWriter, x: fx.Node) -> fx.Node:
    """A contiguous [rows, width] of a value [..., width]."""
    value: Tensor = x.meta["val"]
    if not value.is_contiguous():
        x = writer.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return x if value.ndim == 2 else writer.call(aten.view.default, x, [-1, value.shape[-1]])
