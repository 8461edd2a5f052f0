"""Costs of graphs on a cluster: times of its device and, for each lane, of the links of its ranks.

The ranks of a lane may be in one host or on several, and its groups need not lie alike: six ranks
fit in a host of eight, and the next six do not. Ranks wait for each other, so that of all groups of
a lane the slowest counts. Lanes over the same link share it.
"""

from collections.abc import Iterable, Mapping, Sequence

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.computed_costs import analytic_costs, refuse_holding_all
from interlace.ir.costs import CostTable, Line
from interlace.ir.graph import Kind, OpGraph

Groups = Mapping[str, Sequence[Sequence[int]]]
"""By lane, the groups of global ranks that a mesh axis has."""

_FAR_BYTES = 2**40
"""A size at which the line through the time of an empty tensor is taken."""


class ClusterMachine:
    """A rank of a cluster whose lanes have these groups, as a `computed_costs.Machine`."""

    def __init__(self, cluster: Cluster, groups: Groups) -> None:
        cluster.require(
            1 + max((rank for lane in groups.values() for g in lane for rank in g), default=0)
        )
        self.cluster = cluster
        self.flops_per_s = cluster.peak_tflops * 1e12
        self.bytes_per_s = cluster.memory_gb_per_s * 1e9
        self.multiprocessors = cluster.sms
        self.groups = {lane: cluster.unlike(each) for lane, each in groups.items()}
        for lane in groups:
            refuse_holding_all(self.held(lane), self.multiprocessors)

    def collective_ns(self, kind: Kind, full_bytes: float, lane: str, ranks: int = 0) -> int:
        """Time in the slowest group of the lane, whose ranks are known: `ranks` plays no part."""
        groups = self._of(lane)
        return max(self.cluster.collective_ns(kind, full_bytes, group) for group in groups)

    def line(self, kind: Kind, lane: str, ranks: int = 0) -> Line:
        """The same time in ns as a line over the bytes of the whole tensor."""
        empty_ns = self.collective_ns(kind, 0, lane)
        far_ns = self.collective_ns(kind, _FAR_BYTES, lane)
        return Line(float(empty_ns), (far_ns - empty_ns) / _FAR_BYTES)

    def held(self, lane: str) -> int:
        """SMs that a collective of this lane holds, where it holds the most."""
        return max(self.cluster.sms_held(group) for group in self._of(lane))

    def link_bytes_per_s(self, lane: str) -> float:
        """What a collective of this lane sends on its faster link, in byte/s."""
        names = {self.cluster.link_of(group) for group in self._of(lane)}
        return max(getattr(self.cluster, name).bytes_per_s for name in names)

    def links(self, lanes: Iterable[str]) -> dict[str, str]:
        """`intra_host`, or `inter_host` where a group of the lane is on several hosts."""
        found = {}
        for lane in lanes:
            names = {self.cluster.link_of(group) for group in self._of(lane)}
            found[lane] = "inter_host" if "inter_host" in names else "intra_host"
        return found

    def costs(self, graphs: Mapping[str, OpGraph]) -> CostTable:
        """Costs of every operator of `graphs`. Raises InputError if a lane of theirs has no ranks
        here."""
        sizes = {lane: len(each[0]) for lane, each in self.groups.items()}
        return analytic_costs(graphs, self, sizes)

    def _of(self, lane: str) -> tuple[tuple[int, ...], ...]:
        if lane not in self.groups:
            raise InputError(
                f"lane {lane!r} of a graph has no ranks on cluster {self.cluster.name}",
                hint="give the groups of all lanes: " + ", ".join(self.groups),
            )
        return self.groups[lane]


def cluster_costs(graphs: Mapping[str, OpGraph], cluster: Cluster, groups: Groups) -> CostTable:
    """Costs of every operator of `graphs` on a rank of the cluster.

    Raises InputError if the groups have more ranks than the cluster, or miss a lane of the graphs.
    """
    return ClusterMachine(cluster, groups).costs(graphs)
