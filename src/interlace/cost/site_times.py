"""Times of sites of decomposed collectives computed from a description of a machine."""

from collections.abc import Sequence

from interlace.cost.analytic import LAUNCH_NS, MachineModel, wire_bytes
from interlace.decompose.choose import SiteTimes, SliceTimes, Times, Way
from interlace.decompose.products import products_of
from interlace.decompose.sites import Site
from interlace.graphs.trace import StrandGraph
from interlace.ir.graph import Kind

_COLLECTIVE = {
    "gather_matmul": Kind.ALL_GATHER,
    "matmul_scatter": Kind.REDUCE_SCATTER,
    "matmul_reduce": Kind.ALL_REDUCE,
}


def computed_times(machine: MachineModel) -> Times:
    """Roofline and alpha-beta as in `cost.analytic`; both directions of a ring leave by one link,
    so that sending halves both ways gains nothing."""

    def times(strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
        products = products_of(strand, site)

        def matmuls_ns(rows: int) -> int:
            return sum(
                LAUNCH_NS
                + int(1e9 * max(p.flops_of(rows) / machine.flops_per_s,
                                p.bytes_of(rows) / machine.bytes_per_s))
                for p in products
            )  # fmt: skip

        def transfer_ns(wire: float) -> int:
            return machine.link_latency_ns + int(8e9 * wire / machine.link_bits_per_s)

        wire = wire_bytes(_COLLECTIVE[site.kind], site.bytes * site.ranks, site.ranks)
        slices = {}
        for variant, pieces in ways:
            parts = 2 if variant == "bidirectional" else 1
            rows = site.rows // pieces
            slices[variant, pieces] = SliceTimes(
                compute_ns=parts * matmuls_ns(rows // parts),
                send_ns=transfer_ns(site.bytes / pieces),
            )
        plain_ns = transfer_ns(wire) + matmuls_ns(site.rows * site.ranks)
        return SiteTimes(plain_ns=plain_ns, slices=slices)

    return times
