"""Device meshes. Axis names are torchtitan's: `pp`, `dp_replicate`, `dp_shard`, `cp`, `ep`, `tp`.

Ranks that share a sequence see different tokens of it, so for weights they are data-parallel
ranks like any other: weights lie on a mesh whose `dp_shard` axis is `dp_shard` and `cp` together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from interlace.config import ParallelConfig

REPLICATE_AXIS, SHARD_AXIS, CONTEXT_AXIS, TENSOR_AXIS = "dp_replicate", "dp_shard", "cp", "tp"
"""Names of the mesh axes, from the outermost to the innermost."""
EXPERT_AXIS = "ep"
"""The axis whose ranks hold the experts of a layer between them; they see different tokens."""
COUNTS_AXIS = "ep_counts"
"""The same ranks by a group of its own, for the counts of rows, which are few bytes and wait for no
rows that way."""
PIPELINE_AXIS = "pp"
"""The axis whose ranks run the stages of a pipeline; of a run it is the outermost."""
_DATA_AXIS = "data"
"""All ranks of a stage that see other tokens."""
_EXPERT_LANES = {
    EXPERT_AXIS: EXPERT_AXIS,
    SHARD_AXIS: "ep_dp_shard",
    REPLICATE_AXIS: "ep_dp_replicate",
}
"""How lanes of the axes of `Meshes.experts` are called."""


@dataclass(frozen=True)
class StageGroups:
    """The ranks with which one of a pipeline works."""

    number: int
    """Which stage this rank runs."""
    pipeline: dist.ProcessGroup | None
    """One of each stage, in order; None where stages are laid out each in its own way."""
    replicas: dist.ProcessGroup
    """Those that hold the same weights of this stage."""
    stage: dist.ProcessGroup
    """All of this stage."""
    same_experts: dist.ProcessGroup | None = None
    """Those that hold the same experts of this stage, where experts are dealt to ranks."""
    apart: tuple[DeviceMesh, ...] = ()
    """The layouts of all stages, where each has its own."""

    @property
    def copies(self) -> int:
        """How many ranks hold the same weights."""
        return dist.get_world_size(self.replicas)


@dataclass(frozen=True)
class Meshes:
    """How the ranks of a run are laid out, seen from its data and from its weights."""

    layout: DeviceMesh
    """dp_replicate x dp_shard x cp x tp."""
    weights: DeviceMesh
    """dp_replicate x (dp_shard and cp, named dp_shard) x tp; the same ranks in the same order."""
    experts: DeviceMesh | None = None
    """Those of experts, where they are dealt to ranks: dp_replicate x dp_shard x ep x tp, the same
    ranks in the same order. Of the ranks that see other tokens, those in a row are of one `ep`."""
    counts: dist.ProcessGroup | None = None
    """The ranks of `ep` by another group, where experts are dealt to ranks."""
    stages: StageGroups | None = None
    """In a pipeline, whose stages have meshes of their own."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups in which this rank exchanges something of the model."""
        meshes = [mesh for mesh in (self.layout, self.weights, self.experts) if mesh is not None]
        own = [self.counts] if self.counts is not None else []
        return [group for mesh in meshes for group in mesh.get_all_groups()] + own

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each layer with this one."""
        return self.weights[TENSOR_AXIS]

    @property
    def context(self) -> DeviceMesh:
        """The ranks that share each sequence with this one."""
        return self.layout[CONTEXT_AXIS]

    @property
    def data_rank(self) -> int:
        """Which share of the micro-batches this rank sees, of `data_ranks`."""
        replica, shard, _, _ = _coordinate(self.layout)
        return replica * self.layout.size(1) + shard

    @property
    def data_ranks(self) -> int:
        """Into how many shares the micro-batches of a step are dealt."""
        return self.layout.size(0) * self.layout.size(1)

    @property
    def axis_of_group(self) -> dict[str, str]:
        """Mesh axis by process-group name, as it appears in traced collectives."""
        found = {
            str(self.weights.get_group(name).group_name): name
            for name in (REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS)
        }
        # Without other data-parallel ranks `cp` and `dp_shard` are one group, named after `cp`.
        if self.context.size() > 1:
            found[str(self.context.get_group().group_name)] = CONTEXT_AXIS
        if self.experts is not None:
            lanes = {a: n for a, n in _EXPERT_LANES.items() if self.experts[a].size() > 1}
            for axis, lane in lanes.items():
                found[str(self.experts.get_group(axis).group_name)] = lane
        if self.counts is not None:
            found[str(self.counts.group_name)] = COUNTS_AXIS
        return found


def build_meshes(
    config: ParallelConfig, device_type: str, stages: Sequence[ParallelConfig] = ()
) -> Meshes:
    """The meshes of a run, of a pipeline those of this rank's stage; the process group must exist
    and have the right size. Communicators are made here, ahead of the first collective. `stages`
    are layouts of stages that differ, over ranks in a row."""
    if stages:
        return _meshes_apart(stages, device_type)

    def mesh(sizes: dict[str, int]) -> DeviceMesh:
        sizes = {PIPELINE_AXIS: config.pipeline, **sizes} if config.pipeline > 1 else sizes
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    layout, weights = map(mesh, _stage_sizes(config))
    experts, counts = None, None
    if config.expert > 1:
        experts = mesh(_expert_sizes(config))
        counts = _own_group(axis_groups(config)[EXPERT_AXIS])
    if config.pipeline == 1:
        return Meshes(layout, weights, experts, counts)
    data = config.stage_ranks // config.tensor
    of_stages = mesh({_DATA_AXIS: data, TENSOR_AXIS: config.tensor})
    of_stage = mesh({"stage": config.stage_ranks})
    same_experts = None
    if config.expert > 1:
        axes = {_DATA_AXIS: data // config.expert, EXPERT_AXIS: config.expert}
        same_experts = mesh(axes | {TENSOR_AXIS: config.tensor}).get_group(_DATA_AXIS)
    return Meshes(
        _without_pipeline(layout),
        _without_pipeline(weights),
        _without_pipeline(experts) if experts is not None else None,
        counts,
        StageGroups(
            number=of_stages.get_local_rank(PIPELINE_AXIS),
            pipeline=of_stages.get_group(PIPELINE_AXIS),
            replicas=of_stages.get_group(_DATA_AXIS),
            stage=of_stage.get_group("stage"),
            same_experts=same_experts,
        ),
    )


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """A new process group of the ranks among which this rank is. Collective on all of `groups`."""
    found, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    assert isinstance(found, dist.ProcessGroup)
    return found


def _meshes_apart(stages: Sequence[ParallelConfig], device_type: str) -> Meshes:
    """Every rank makes the meshes of all stages, as making one is collective, and keeps its own."""
    rank, first = dist.get_rank(), 0
    layouts: list[DeviceMesh] = []
    found: list[Meshes] = []
    for number, stage in enumerate(stages):
        ranks = torch.arange(first, first + stage.stage_ranks)
        first += len(ranks)
        data, tensor = stage.data_replicate * stage.data_shard * stage.context, stage.tensor
        sizes = _stage_sizes(stage)
        made = [
            DeviceMesh(device_type, ranks.view(*each.values()), mesh_dim_names=tuple(each))
            for each in (*sizes, {_DATA_AXIS: data, TENSOR_AXIS: tensor}, {"stage": len(ranks)})
        ]
        layouts.append(made[0])
        if rank in ranks.tolist():
            groups = StageGroups(
                number=number, pipeline=None, replicas=made[2].get_group(_DATA_AXIS),
                stage=made[3].get_group("stage"),
            )  # fmt: skip
            found.append(Meshes(made[0], made[1], stages=groups))
    (own,) = found
    assert own.stages is not None
    return replace(own, stages=replace(own.stages, apart=tuple(layouts)))


def _stage_sizes(config: ParallelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Axes of a stage, seen from its data and from its weights."""
    replicate, shard, context = config.data_replicate, config.data_shard, config.context
    inner = {TENSOR_AXIS: config.tensor}
    return (
        {REPLICATE_AXIS: replicate, SHARD_AXIS: shard, CONTEXT_AXIS: context, **inner},
        {REPLICATE_AXIS: replicate, SHARD_AXIS: shard * context, **inner},
    )


def _expert_sizes(config: ParallelConfig) -> dict[str, int]:
    """Axes of a stage, seen from its experts."""
    replicate, shard = config.data_replicate, config.data_shard * config.context
    inside = min(shard, config.expert)  # the other ranks of `ep` are in other replicas
    return {
        REPLICATE_AXIS: replicate * inside // config.expert,
        SHARD_AXIS: shard // inside,
        EXPERT_AXIS: config.expert,
        TENSOR_AXIS: config.tensor,
    }


def _without_pipeline(mesh: DeviceMesh) -> DeviceMesh:
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != PIPELINE_AXIS)]


def axis_sizes(config: ParallelConfig) -> dict[str, int]:
    """Ranks per axis, as lanes of traced graphs are named."""
    found = {
        REPLICATE_AXIS: config.data_replicate,
        SHARD_AXIS: config.data_shard * config.context,
        CONTEXT_AXIS: config.context,
        TENSOR_AXIS: config.tensor,
    }
    if config.expert > 1:
        sizes = _expert_sizes(config)
        found |= {lane: sizes[axis] for axis, lane in _EXPERT_LANES.items()}
        found[COUNTS_AXIS] = config.expert
    return found


def axis_groups(config: ParallelConfig) -> dict[str, list[tuple[int, ...]]]:
    """The groups of global ranks of each axis; those of the innermost, `tp`, are consecutive."""
    strides = {
        REPLICATE_AXIS: config.data_shard * config.context * config.tensor,
        SHARD_AXIS: config.tensor,
        CONTEXT_AXIS: config.tensor,
        TENSOR_AXIS: 1,
    }
    if config.expert > 1:
        sizes, stride = _expert_sizes(config), config.tensor
        for axis in (EXPERT_AXIS, SHARD_AXIS, REPLICATE_AXIS):  # from the inside
            strides[_EXPERT_LANES[axis]] = stride
            stride *= sizes[axis]
        strides[COUNTS_AXIS] = strides[EXPERT_AXIS]
    world = config.ranks
    return {
        axis: [
            tuple(range(first, first + size * strides[axis], strides[axis]))
            for first in range(world)
            if first // strides[axis] % size == 0
        ]
        for axis, size in axis_sizes(config).items()
    }


def _coordinate(mesh: DeviceMesh) -> list[int]:
    found = mesh.get_coordinate()
    assert found is not None
    return list(found)
