"""The matmuls of a site as shapes, and its times computed from a description of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, fx

from interlace.decompose.choose import SiteTimes, SliceTimes, Times, Way
from interlace.decompose.rewrite.find import row_operand
from interlace.decompose.sites import Site
from interlace.experts.grouped import MATMUL
from interlace.graphs.trace import StrandGraph
from interlace.hardware.computed_costs import Machine, compute_ns
from interlace.ir.graph import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulShape:
    """[rows, inner] @ [inner, columns]; rows are those of one rank's slice."""

    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    weight_strides: tuple[int, int]

    def bytes_of(self, rows: int) -> int:
        """Read and written for that many rows."""
        elements = rows * self.inner + self.inner * self.columns + rows * self.columns
        return elements * self.dtype.itemsize

    def flops_of(self, rows: int) -> int:
        """Multiplications and additions for that many rows."""
        return 2 * rows * self.inner * self.columns


def matmul_shapes_of(strand: StrandGraph, site: Site) -> list[MatmulShape]:
    """The site's matmuls, in order."""
    wanted = set(site.matmuls)
    nodes = {node.name: node for node in strand.graph.nodes if node.name in wanted}
    return [_matmul_shape(nodes[name], site.rows) for name in site.matmuls]


def _matmul_shape(matmul: fx.Node, rows: int) -> MatmulShape:
    if matmul.target == MATMUL:
        return _expert_shape(matmul, rows)
    operand = row_operand(matmul)
    weight = matmul.args[-1]
    assert isinstance(weight, fx.Node)
    value: Tensor = weight.meta["val"]
    return MatmulShape(
        rows=rows,
        inner=value.shape[0],
        columns=value.shape[1],
        dtype=operand.meta["val"].dtype,
        weight_strides=(value.stride(0), value.stride(1)),
    )


def _expert_shape(matmul: fx.Node, rows: int) -> MatmulShape:
    """Of the weights [L, F, D] of experts, any one's: they are alike."""
    value: Tensor = matmul.args[1].meta["val"]  # type: ignore[union-attr]
    inner, columns = (1, 2) if matmul.args[4] else (2, 1)
    return MatmulShape(
        rows=rows,
        inner=value.shape[inner],
        columns=value.shape[columns],
        dtype=value.dtype,
        weight_strides=(value.stride(inner), value.stride(columns)),
    )


def sent_value(strand: StrandGraph, site: Site) -> Tensor:
    """What the site's collective is given on this rank, as a fake tensor [rows, width]."""
    node = next(n for n in strand.graph.nodes if n.name == site.collective)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value: Tensor = source.meta["val"]
    return value.reshape(prod(value.shape[:-1]), value.shape[-1])


_COLLECTIVE = {
    "gather_matmul": Kind.ALL_GATHER,
    "matmul_scatter": Kind.REDUCE_SCATTER,
    "matmul_reduce": Kind.ALL_REDUCE,
}
"""The collective that a site's function does without."""


def computed_times(machine: Machine) -> Times:
    """Roofline and collective times as in `hardware.computed_costs`; both directions of a ring
    leave by one link, so that sending halves both ways gains nothing."""

    def times(strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
        matmuls = matmul_shapes_of(strand, site)

        def matmuls_ns(rows: int) -> int:
            return sum(compute_ns(machine, p.flops_of(rows), p.bytes_of(rows)) for p in matmuls)

        def experts_ns(groups: int) -> int:
            # Each expert reads its own weight.
            rows = max(1, site.rows * site.ranks // site.experts)
            return matmuls_ns(rows) * -(-site.experts // groups)

        def transfer_ns(kind: Kind, full_bytes: float) -> int:
            return machine.collective_ns(kind, full_bytes, site.lane, site.ranks)

        slices = {}
        if site.kind == "expert_exchange":
            way = partial(transfer_ns, Kind.ALL_TO_ALL)
            for variant, groups in ways:
                slices[variant, groups] = SliceTimes(
                    compute_ns=experts_ns(groups), send_ns=way(site.bytes * site.ranks / groups)
                )
            plain_ns = 2 * way(site.bytes * site.ranks) + experts_ns(1)
            return SiteTimes(plain_ns=plain_ns, slices=slices)
        for variant, pieces in ways:
            parts = 2 if variant == "bidirectional" else 1
            rows = site.rows // pieces
            slices[variant, pieces] = SliceTimes(
                compute_ns=parts * matmuls_ns(rows // parts),
                send_ns=transfer_ns(Kind.SEND, site.bytes / pieces),
            )
        whole_ns = transfer_ns(_COLLECTIVE[site.kind], site.bytes * site.ranks)
        return SiteTimes(plain_ns=whole_ns + matmuls_ns(site.rows * site.ranks), slices=slices)

    return times
