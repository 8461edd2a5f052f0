"""Rewrite one site of a traced graph: its collective becomes sends under partial matmuls."""

from dataclasses import replace

from interlace.decompose.query_split import rewrite_attention
from interlace.decompose.rewrite_gather import rewrite_gather
from interlace.decompose.rewrite_scatter import rewrite_all_reduce, rewrite_scatter
from interlace.decompose.sites import Site
from interlace.decompose.slicing import slice_site
from interlace.graphs.trace import StrandGraph


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
