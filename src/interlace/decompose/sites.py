"""Where a collective of a traced graph and matmuls next to it could run slice by slice."""

from dataclasses import dataclass
from typing import Literal

SiteKind = Literal[
    "gather_matmul",
    "matmul_scatter",
    "matmul_reduce",
    "gradient_scatter",
    "attention_scatter",
    "expert_exchange",
]
"""`gather_matmul`: an all-gather whose result matmuls read. `matmul_scatter`: a sum of matmuls that
is reduce-scattered. `matmul_reduce`: one that is all-reduced. `gradient_scatter`: a weight gradient
that data-parallel ranks scatter. `attention_scatter`: attention, projection and reduce-scatter.
`expert_exchange`: rows to experts, what these compute, and the way back."""

VARIANTS = ("ring", "direct", "bidirectional", "slicing")
"""Ways to decompose a site; the first three are CommFuse's, the last one cuts the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A collective with the matmuls that can hide it. Names are node names of the strand's graph;
    bytes, rows and flops are those of one slice, which is one rank's part."""

    strand: str
    """`forward` or `backward`."""
    kind: SiteKind
    collective: str
    matmuls: tuple[str, ...]
    group: str
    ranks: int
    """Size of the group; slices for `pieces = 1`."""
    rows: int
    """Rows of the matmul that belong to one rank."""
    bytes: int
    """What one rank sends of one slice."""
    flops: int
    """Of all the matmuls, for one slice."""
    lane: str = ""
    """Mesh axis of the group."""
    module: str = ""
    """Path of the module that the first matmul belongs to; empty if unknown."""
    back: str = ""
    """Of an `expert_exchange`: the collective that brings rows back."""
    experts: int = 0
    """Of an `expert_exchange`: how many experts a rank has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """A collective that stays whole, and why."""

    strand: str
    collective: str
    kind: str
    """Kind of the collective, such as `all_reduce`."""
    reason: str
    module: str = ""


def blocks_of(rows: int, pieces: int) -> int:
    """The largest number of blocks up to `pieces` that divides the rows of a rank."""
    return next(count for count in range(max(1, min(pieces, rows)), 0, -1) if rows % count == 0)
