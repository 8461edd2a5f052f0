"""Collectives cut into point-to-point steps under partial compute (CommFuse, arXiv 2604.24013).

Functions on plain tensors and process groups, with autograd:

    gather_matmul           all-gather, then matmuls        (column-parallel linears)
    matmul_scatter          matmul, then reduce-scatter     (row-parallel linear)
    matmul_reduce           matmul, then all-reduce         (row-parallel linear, whole output)
    ulysses_attention       all-to-all, attention on a share of the heads, all-to-all
    query_split_attention   attention, projection, then reduce-scatter
    scatter_gradient        weight gradient, then reduce-scatter (data parallel)
    sliced_gather_matmul, sliced_matmul_scatter
                            the same by data slicing, the published baseline

All ranks of the group must call them alike: same order, variant, pieces, dtype, and which tensors
require gradients. Everything else in this package works on traced graphs.

functions/         on plain tensors and process groups, with autograd
rewrite/           the same as a pass over traced graphs
order.py           in which order a rank visits slices, and where they go; for both
attention_rows.py  attention of some rows of the queries; for both
sites.py           where a collective of a graph could run slice by slice, as data
site_costs.py      the matmuls of a site as shapes, and its computed times
choose.py          whether and how a site is decomposed, from times of its slices
listing.py         what was decomposed and what was not, and why
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.decompose.functions.attention_scatter import query_split_attention
    from interlace.decompose.functions.column_parallel import gather_matmul
    from interlace.decompose.functions.row_parallel import matmul_reduce, matmul_scatter
    from interlace.decompose.functions.sliced_matmul import (
        sliced_gather_matmul,
        sliced_matmul_scatter,
    )
    from interlace.decompose.functions.ulysses_overlap import ulysses_attention
    from interlace.decompose.functions.weight_gradient import scatter_gradient

__all__ = [
    "gather_matmul",
    "matmul_reduce",
    "matmul_scatter",
    "query_split_attention",
    "scatter_gradient",
    "sliced_gather_matmul",
    "sliced_matmul_scatter",
    "ulysses_attention",
]

_MODULE_OF = {
    "gather_matmul": "functions.column_parallel",
    "matmul_reduce": "functions.row_parallel",
    "matmul_scatter": "functions.row_parallel",
    "query_split_attention": "functions.attention_scatter",
    "scatter_gradient": "functions.weight_gradient",
    "sliced_gather_matmul": "functions.sliced_matmul",
    "sliced_matmul_scatter": "functions.sliced_matmul",
    "ulysses_attention": "functions.ulysses_overlap",
}
"""The module of each function, below this package."""


def __getattr__(name: str) -> Any:
    """The functions, imported when they are first asked for."""
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
