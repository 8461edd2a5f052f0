"""Collectives of a laid-out job on a cluster: how long each takes, on which lane, over which link.

Ranks are dealt as the trainer's meshes do: tensor ranks are neighbours, then those that share a
sequence, then shards, then replicas, then stages. Of the ranks that see other tokens those in a row
share the experts, and the others that hold the same experts are their shards and replicas. A lane
is called by its mesh axis (`tp`, `cp`, `dp_shard`, `dp_replicate`, `ep`, `ep_dp_shard`, `pp`, ...).
"""

from dataclasses import dataclass
from functools import cached_property

from interlace.hardware.cluster import Cluster
from interlace.hardware.collective_times import GroupPlace, axis_place, collective_time
from interlace.hardware.computed_costs import LARGEST_FACTOR, MEMORY_PASSES, REDUCING_PASSES
from interlace.ir.costs import Contention
from interlace.ir.graph import Kind
from interlace.strategy.job_layout import JobLayout

TENSOR, CONTEXT, SHARD, REPLICATE, STAGE = "tp", "cp", "dp_shard", "dp_replicate", "pp"
"""Lanes."""
EXPERT, COUNTS = "ep", "ep_counts"
"""Of rows to the ranks of their experts and back, and of how many they are."""
EXPERT_SHARD, EXPERT_REPLICATE = "ep_dp_shard", "ep_dp_replicate"
"""Of weights and gradients of experts."""
_COMPUTE_BOUND = (Kind.MATMUL, Kind.ATTENTION)
_MEMORY_BOUND = (Kind.ELEMENTWISE, Kind.REDUCTION, Kind.MEMORY)
_LANE_KINDS = {
    TENSOR: (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SEND),
    SHARD: (Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
    REPLICATE: (Kind.ALL_REDUCE,),
    CONTEXT: (Kind.ALL_TO_ALL,),
    EXPERT: (Kind.ALL_TO_ALL,),
    COUNTS: (Kind.ALL_TO_ALL,),
    EXPERT_SHARD: (Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
    EXPERT_REPLICATE: (Kind.ALL_REDUCE,),
}
"""What runs on a lane beside compute."""


@dataclass(frozen=True)
class JobLinks:
    """The links of one layout."""

    cluster: Cluster
    layout: JobLayout
    transfer_factor: float = 1.0
    """How many times longer a collective takes while an operator runs beside it."""
    attention_factor: float = 1.0
    """How many times longer attention takes beside a collective, if that is more than the
    multiprocessors that the collective holds take from it."""

    @cached_property
    def places(self) -> dict[str, GroupPlace]:
        """Where the ranks of each lane lie. Raises InputError if the cluster has fewer devices."""
        layout = self.layout
        self.cluster.require(layout.ranks)
        behind = layout.tensor * layout.expert
        strides = {
            TENSOR: (layout.tensor, 1),
            CONTEXT: (layout.context, layout.tensor),
            SHARD: (layout.group, layout.tensor),
            REPLICATE: (layout.data_replicate, layout.tensor * layout.group),
            EXPERT: (layout.expert, layout.tensor),
            COUNTS: (layout.expert, layout.tensor),
            EXPERT_SHARD: (layout.expert_group, behind),
            EXPERT_REPLICATE: (layout.expert_replicas, behind * layout.expert_group),
            STAGE: (layout.pipeline, layout.ranks // layout.pipeline),
        }
        return {
            lane: axis_place(self.cluster, size, stride, layout.ranks)
            for lane, (size, stride) in strides.items()
        }

    def seconds(self, lane: str, kind: Kind, full_bytes: float, buckets: int = 1) -> float:
        """Of one collective on a whole tensor, or on so many equal parts one after the other."""
        place = self.places[lane]
        if place.ranks == 1 or not full_bytes:
            return 0.0
        return buckets * collective_time(self.cluster, kind, full_bytes / buckets, place).seconds

    @cached_property
    def contention(self) -> Contention:
        """How compute is slowed by a collective beside it, and which lanes share a link.

        Matmuls lose the multiprocessors that the collective holds, other operators the memory
        bandwidth that it takes; a collective takes `transfer_factor` times as long, 1 if it has its
        multiprocessors for itself. Sources: `hardware.computed_costs`."""
        factors: dict[tuple[Kind, Kind], tuple[float, float]] = {}
        links: dict[str, str] = {}
        for lane, kinds in _LANE_KINDS.items():
            place = self.places[lane]
            if place.ranks == 1:
                continue
            across = place.hosts > 1
            links[lane] = "inter_host" if across else "intra_host"
            link = self.cluster.inter_host if across else self.cluster.intra_host
            for kind in kinds:
                left = 1 - link.sms_held / max(self.cluster.sms, 1)
                passes = MEMORY_PASSES.get(kind, REDUCING_PASSES)
                spare = 1 - passes * link.bytes_per_s / self.cluster.device.bytes_per_s
                for computes, share in ((_COMPUTE_BOUND, left), (_MEMORY_BOUND, spare)):
                    factor = 1 / max(share, 1 / LARGEST_FACTOR)
                    for compute in computes:
                        least = self.attention_factor if compute is Kind.ATTENTION else 1.0
                        slower = max(factor, least, factors.get((compute, kind), (1.0, 1.0))[0])
                        factors[compute, kind] = (slower, self.transfer_factor)
        return Contention(factors=factors, links=links)
