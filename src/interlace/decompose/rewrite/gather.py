"""All-gather + matmuls: multiply the own rows first, then other ranks' as they arrive.

Each matmul writes its rows into its place of the result. The gathered tensor itself is put
together, by a copy of each slice, only if somebody else reads it, such as a weight gradient.
"""

import torch
from torch import Tensor, fx

from interlace.decompose.rewrite.find import Gather, match_site, row_operand
from interlace.decompose.rewrite.sends import Route, cut_rows, gather_slices, rows_slice
from interlace.decompose.sites import Site
from interlace.graphs.buffers import filled
from interlace.graphs.trace import StrandGraph
from interlace.graphs.writer import GraphWriter, erase_unused, move_before

aten = torch.ops.aten


def rewrite_gather(
    strand: StrandGraph, site: Site, variant: str, pieces: int, rank_in_group: int
) -> None:
    """Decompose a `gather_matmul` site, in place."""
    collective = next(n for n in strand.graph.nodes if n.name == site.collective)
    match = match_site(collective)
    assert isinstance(match, Gather), f"{site.collective} is no gather_matmul: {match}"
    for matmul in match.matmuls:
        operand = row_operand(matmul)
        move_before(collective, [value for value in matmul.args if value is not operand])
    writer = GraphWriter(strand.graph, strand.bindings, like=match.wait).at(collective)
    x = _rows(writer, collective)
    route = Route(
        group=site.group,
        ranks=site.ranks,
        rank=rank_in_group,
        rows=site.rows,
        row_ranges=cut_rows(site.rows, pieces, variant),
        direct=variant == "direct",
    )
    _write(writer, match, x, route)
    erase_unused([*match.matmuls, match.wait])


def _rows(writer: GraphWriter, collective: fx.Node) -> fx.Node:
    """This rank's rows [rows, K], contiguous."""
    source = collective.args[0]
    assert isinstance(source, fx.Node)
    value: Tensor = source.meta["val"]
    if not value.is_contiguous():
        source = writer.call(aten.clone.default, source, memory_format=torch.contiguous_format)
    return writer.call(aten.view.default, source, [-1, value.shape[-1]])


def _write(writer: GraphWriter, match: Gather, x: fx.Node, route: Route) -> None:
    results = [_buffer(writer, x, matmul) for matmul in match.matmuls]
    writes: list[list[fx.Node]] = [[] for _ in results]
    whole = None
    copies: list[fx.Node] = []
    if match.is_read_whole:
        shape = match.wait.meta["val"].shape
        whole = writer.call(aten.new_empty.default, x, [route.ranks * route.rows, shape[-1]])
    for part, first in gather_slices(writer, x, route):
        rows = part.meta["val"].shape[0]
        casts: dict[torch.dtype, fx.Node] = {part.meta["val"].dtype: part}
        for i, matmul in enumerate(match.matmuls):
            operand = row_operand(matmul)
            dtype = operand.meta["val"].dtype
            if dtype not in casts:
                casts[dtype] = writer.call(aten._to_copy.default, part, dtype=dtype)
            args = [casts[dtype] if value is operand else value for value in matmul.args]
            place = rows_slice(writer, results[i], first, rows)
            call = aten.mm.out if matmul.target == aten.mm.default else aten.addmm.out
            writes[i].append(writer.call(call, *args, out=place))
        if whole is not None:
            place = rows_slice(writer, whole, first, rows)
            copies.append(writer.call(aten.copy_.default, place, part))
    for matmul, result, parts in zip(match.matmuls, results, writes, strict=True):
        matmul.replace_all_uses_with(writer.call(filled, result, *parts))
    if whole is not None:
        gathered = writer.call(filled, whole, *copies)
        shape = list(match.wait.meta["val"].shape)
        match.wait.replace_all_uses_with(writer.call(aten.view.default, gathered, shape))


def _buffer(writer: GraphWriter, x: fx.Node, matmul: fx.Node) -> fx.Node:
    value: Tensor = matmul.meta["val"]
    return writer.call(aten.new_empty.default, x, list(value.shape), dtype=value.dtype)
