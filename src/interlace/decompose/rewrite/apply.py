"""Decompose a traced chunk: find the sites of both strands, choose, rewrite, and list them.

The rewrite of all-gather + matmuls is here too: multiply the own rows first, then other ranks' as
they arrive. Each matmul writes its rows into its place of the result. The gathered tensor itself is
put together, by a copy of each slice, only if somebody else reads it, such as a weight gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from interlace.decompose.choose import Request, Times, choose
from interlace.decompose.listing import Listing
from interlace.decompose.rewrite.expert_groups import rewrite_experts
from interlace.decompose.rewrite.find import Gather, find_sites, match_site, row_operand
from interlace.decompose.rewrite.query_split import find_attention, rewrite_attention
from interlace.decompose.rewrite.scatter import rewrite_all_reduce, rewrite_scatter
from interlace.decompose.rewrite.sends import Route, cut_rows, gather_slices, rows_slice
from interlace.decompose.rewrite.slicing import slice_site
from interlace.decompose.sites import Site
from interlace.graphs.buffers import filled
from interlace.graphs.torch_private import process_group
from interlace.graphs.trace import ChunkGraphs, StrandGraph
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Decompose:
    """A request, and where times of sites come from."""

    request: Request
    times: Times


def decompose_chunk(
    chunk: ChunkGraphs, axis_of_group: Mapping[str, str], decompose: Decompose
) -> tuple[ChunkGraphs, Listing]:
    """`chunk` with its collectives decomposed as `decompose` asks for; changes its graphs.

    Collective if the times are measured. Ranks choose alike, as their times are equal.
    """
    forward, forward_list = _decompose(chunk.forward, axis_of_group, decompose)
    backward, backward_list = _decompose(chunk.backward, axis_of_group, decompose)
    listing = Listing(
        choices=forward_list.choices + backward_list.choices,
        missed=forward_list.missed + backward_list.missed,
    )
    return replace(chunk, forward=forward, backward=backward), listing


def _decompose(
    strand: StrandGraph, axis_of_group: Mapping[str, str], decompose: Decompose
) -> tuple[StrandGraph, Listing]:
    sites, missed = find_sites(strand, axis_of_group)
    with_attention = {}
    if decompose.request.variant == "auto":
        found, _ = find_attention(strand, axis_of_group)
        with_attention = {site.collective: site for site in found}
    # All are chosen before any is rewritten: times are looked up by the graph as it was traced.
    request, times = decompose.request, decompose.times
    choices = [
        choose(strand, site, request, times, with_attention.get(site.collective)) for site in sites
    ]
    for choice in choices:
        if choice.variant:
            site = choice.site
            rank = process_group(site.group).rank()
            strand = rewrite(strand, site, choice.variant, choice.pieces, rank)
    return strand, Listing(choices=tuple(choices), missed=tuple(missed))


def rewrite(
    strand: StrandGraph, site: Site, variant: str, pieces: int, rank_in_group: int
) -> StrandGraph:
    """`strand` with `site` decomposed into `pieces` slices per rank (with `slicing`
    and of experts: in all);
    changes its graph. The site is one that `find_sites` found in this graph."""
    if site.kind == "attention_scatter":
        done = rewrite_attention(strand, site, variant, pieces, rank_in_group)
    elif site.kind == "expert_exchange":
        rewrite_experts(strand, site, pieces)
        done = replace(strand)
    elif variant == "slicing":
        done = slice_site(strand, site, pieces)
    else:
        write = {
            "gather_matmul": rewrite_gather,
            "matmul_scatter": rewrite_scatter,
            "matmul_reduce": rewrite_all_reduce,
        }[site.kind]
        write(strand, site, variant, pieces, rank_in_group)
        done = replace(strand)
    done.module.recompile()
    return done
