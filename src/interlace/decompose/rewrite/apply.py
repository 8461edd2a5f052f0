"""Decompose a traced chunk: find the sites of both strands, choose, rewrite, and list them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from interlace.decompose.choose import Request, Times, choose
from interlace.decompose.listing import Listing
from interlace.decompose.rewrite.find import find_sites
from interlace.decompose.rewrite.gather import rewrite_gather
from interlace.decompose.rewrite.query_split import find_attention, rewrite_attention
from interlace.decompose.rewrite.scatter import rewrite_all_reduce, rewrite_scatter
from interlace.decompose.rewrite.slicing import slice_site
from interlace.decompose.sites import Site
from interlace.graphs.torch_private import process_group
from interlace.graphs.trace import ChunkGraphs, StrandGraph


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
    """`strand` with `site` decomposed into `pieces` slices per rank (with `slicing`: in all);
    changes its graph. The site is one that `find_sites` found in this graph."""
    if site.kind == "attention_scatter":
        done = rewrite_attention(strand, site, variant, pieces, rank_in_group)
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
