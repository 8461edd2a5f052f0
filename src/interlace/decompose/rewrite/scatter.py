"""Matmuls + reduce-scatter: multiply the rows of other ranks first, send the sums under the next
rows, and multiply the own rows last.

An all-reduce is a reduce-scatter and an all-gather. Nothing computes on what arrives of the latter,
so its rows are cut into blocks, and each block is gathered under the matmuls of the next one.
Weight gradients made of the same values run under what is still on its way at the end.
"""

import torch
from torch import Tensor, fx

from interlace.decompose.rewrite.find import (
    Sum,
    is_matmul,
    is_sum,
    match_site,
    matmuls_of,
    row_operand,
)
from interlace.decompose.rewrite.sends import Route, RowRange, cut_rows, rows_slice, scatter_slices
from interlace.decompose.sites import Site, blocks_of
from interlace.graphs.buffers import filled
from interlace.graphs.trace import StrandGraph
from interlace.graphs.writer import GraphWriter, erase_unused

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def rewrite_scatter(
    strand: StrandGraph, site: Site, variant: str, pieces: int, rank_in_group: int
) -> None:
    """Decompose a `matmul_scatter` site, in place."""
    match, writer = _open(strand, site)
    row_ranges = cut_rows(site.rows, pieces, variant)
    route = _route(site, site.rows, row_ranges, variant, rank_in_group)
    total, end = _scatter(writer, match.root, route, first_row=0)
    _move_weight_gradients(match, end)
    _replace(writer, match, total)


def rewrite_all_reduce(
    strand: StrandGraph, site: Site, variant: str, pieces: int, rank_in_group: int
) -> None:
    """Decompose a `matmul_reduce` site into `pieces` blocks of rows, in place.

    Fewer blocks are made if a rank's rows cannot be divided among so many.
    """
    match, writer = _open(strand, site)
    blocks = blocks_of(site.rows, pieces)
    rows = site.rows // blocks
    block_rows = rows * site.ranks
    row_ranges = cut_rows(rows, 1, variant)
    route = _route(site, rows, row_ranges, variant, rank_in_group)
    gathered = []
    for block in range(blocks):
        total, _ = _scatter(writer, match.root, route, first_row=block * block_rows)
        call = _functional.all_gather_into_tensor.default
        gathered.append(writer.call(call, total, site.ranks, site.group))
    arrived = [writer.call(_functional.wait_tensor.default, each) for each in gathered]
    _move_weight_gradients(match, arrived[0])
    if blocks == 1:
        _replace(writer, match, arrived[0])
        return
    value: Tensor = match.root.meta["val"]
    whole = writer.call(
        aten.new_empty.default, arrived[0], [site.rows * site.ranks, value.shape[-1]]
    )
    writes = []
    for block, part in enumerate(arrived):
        place = rows_slice(writer, whole, block * block_rows, block_rows)
        writes.append(writer.call(aten.copy_.default, place, part))
    _replace(writer, match, writer.call(filled, whole, *writes))


def _open(strand: StrandGraph, site: Site) -> tuple[Sum, GraphWriter]:
    collective = next(n for n in strand.graph.nodes if n.name == site.collective)
    match = match_site(collective)
    assert isinstance(match, Sum), f"{site.collective} is no sum of matmuls: {match}"
    return match, GraphWriter(strand.graph, strand.bindings, like=match.wait).at(collective)


def _route(
    site: Site, rows: int, row_ranges: tuple[RowRange, ...], variant: str, rank_in_group: int
) -> Route:
    return Route(
        group=site.group,
        ranks=site.ranks,
        rank=rank_in_group,
        rows=rows,
        row_ranges=row_ranges,
        direct=variant == "direct",
    )


def _scatter(
    writer: GraphWriter, root: fx.Node, route: Route, *, first_row: int
) -> tuple[fx.Node, fx.Node]:
    """This rank's rows of the sum over ranks of `root`'s rows from `first_row` on, and the node
    that first waits for the last of what other ranks send."""
    value: Tensor = root.meta["val"]
    result = None
    if len(route.row_ranges) > 1:
        like = row_operand(matmuls_of(root)[0])
        shape = [route.rows, value.shape[-1]]
        result = writer.call(aten.new_empty.default, like, shape, dtype=value.dtype)
    terms = _Terms(writer)

    def compute(first: int, rows: int, place: fx.Node | None) -> fx.Node:
        return terms.rows(root, first_row + first, rows, place)

    parts = scatter_slices(writer, compute, route, result)
    total = parts[0] if result is None else writer.call(filled, result, *parts)
    return total, parts[0]


def _move_weight_gradients(match: Sum, end: fx.Node) -> None:
    """Put gradients of the matmuls' weights, which the graph returns, right in front of `end`."""
    for matmul in match.matmuls:
        transposed = [n for n in row_operand(matmul).users if n.target == aten.t.default]
        for gradient in [user for node in transposed for user in node.users]:
            is_result = all(user.op == "output" for user in gradient.users)
            if gradient.target == aten.mm.default and is_result and gradient < end:
                end.prepend(gradient)


def _replace(writer: GraphWriter, match: Sum, total: fx.Node) -> None:
    shape = list(match.wait.meta["val"].shape)
    match.wait.replace_all_uses_with(writer.call(aten.view.default, total, shape))
    erase_unused([match.wait])


class _Terms:
    """Computes rows of a sum of matmuls: the same operators on fewer rows."""

    def __init__(self, writer: GraphWriter) -> None:
        self.writer = writer

    def rows(self, node: fx.Node, first: int, rows: int, place: fx.Node | None = None) -> fx.Node:
        """Rows [first, first + rows) of a value that is a sum of matmuls, [rows, width], in memory
        of their own, or in `place`."""
        call = self.writer.call
        if is_matmul(node):
            return self._matmul(node, first, rows, place)
        if is_sum(node):
            left, right = node.all_input_nodes
            if not matmuls_of(left):
                left, right = right, left
            return self._add(self.rows(left, first, rows, place), right, first, rows)
        source = node.all_input_nodes[0]
        if node.target != aten._to_copy.default:
            return self.rows(source, first, rows, place)
        part = self.rows(source, first, rows)
        if place is not None:
            return call(aten.copy_.default, place, part)
        return call(aten._to_copy.default, part, **node.kwargs)

    def _matmul(self, node: fx.Node, first: int, rows: int, place: fx.Node | None) -> fx.Node:
        operand = row_operand(node)
        part = rows_slice(self.writer, operand, first, rows)
        args = [part if value is operand else value for value in node.args]
        if place is None:
            return self.writer.call(node.target, *args)
        out = aten.mm.out if node.target == aten.mm.default else aten.addmm.out
        return self.writer.call(out, *args, out=place)

    def _add(self, total: fx.Node, term: fx.Node, first: int, rows: int) -> fx.Node:
        """total += rows of `term`; addition and matmul are one kernel where that is possible."""
        call = self.writer.call
        if not matmuls_of(term):
            flat = call(aten.view.default, term, [-1, term.meta["val"].shape[-1]])
            return call(aten.add_.Tensor, total, rows_slice(self.writer, flat, first, rows))
        product = _without_views(term)
        if product.target == aten.mm.default:
            operand, weight = product.args
            assert isinstance(operand, fx.Node)
            part = rows_slice(self.writer, operand, first, rows)
            return call(aten.addmm_.default, total, part, weight)
        return call(aten.add_.Tensor, total, self.rows(term, first, rows))


def _without_views(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while node.target in (aten.view.default, aten._unsafe_view.default):
        node = node.all_input_nodes[0]
    return node
