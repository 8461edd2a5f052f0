"""What the axes of a user's mesh mean for a step: names of lanes, replicas, who sees which data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.config import ParallelConfig
from interlace.errors import InputError
from interlace.graphs.collectives import group_of, is_collective
from interlace.graphs.spread import ranks_of
from interlace.ir.actions import Share, strand
from interlace.parallel.data import Axis, DataLayout, replicated_layout
from interlace.parallel.expert import dealt_over, dealt_parameters
from interlace.parallel.meshes import EXPERT_AXIS, PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS
from interlace.ranks.process_group import group_of_some
from interlace.runtime.traced_strands import Strands


def axis_of_group(mesh: DeviceMesh | None) -> dict[str, str]:
    """Axis name by process-group name; axes without names are `axis0`, `axis1`, ..."""
    if mesh is None:
        return {}
    return {mesh.get_group(index).group_name: name for index, name in enumerate(_names(mesh))}


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))


def rank_groups(mesh: DeviceMesh | None) -> dict[str, list[tuple[int, ...]]]:
    """The groups of global ranks of each axis, those of other ranks among them. Axes of one rank
    may share a process group, so they are told apart by their names."""
    if mesh is None:
        return {}
    rows = [mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)) for axis in range(mesh.ndim)]
    return {
        name: [tuple(ranks) for ranks in each.tolist()]
        for name, each in zip(_names(mesh), rows, strict=True)
    }


def replicas_of(
    module: nn.Module, mesh: DeviceMesh | None, dtype: torch.dtype
) -> DataLayout | None:
    """How graphs sum gradients over ranks that hold the same weights; None if there are none, or if
    parameters lie on that axis themselves and so say how their gradients add up. In a pipeline it
    is not the graphs that sum them."""
    group, experts = replica_group(module, mesh), expert_group(module, mesh)
    if pipeline_of(mesh) is not None or group is experts is None:
        return None
    replicas, over = (
        Axis("", 1) if each is None else Axis(str(each.group_name), dist.get_world_size(each))
        for each in (group, experts)
    )
    return replicated_layout(
        module, replicas, dtype, experts=over, bucket_mib=ParallelConfig().bucket_mib
    )


def expert_group(module: nn.Module, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks to which the experts of a module are dealt, this one among them; None if a rank has
    all. They see different data and hold everything else alike.

    Raises InputError unless they are the axis `ep` of the mesh.
    """
    dealt = dealt_parameters(module)
    if not dealt:
        return None
    name, ranks = next(iter(dealt.items()))
    names = (mesh.mesh_dim_names if mesh is not None else None) or ()
    group = mesh.get_group(EXPERT_AXIS) if mesh is not None and EXPERT_AXIS in names else None
    if group is None or set(dealt_over(module)) != {str(group.group_name)}:
        raise InputError(
            f"{name!r} holds the experts of one of {ranks} ranks, which are not the axis "
            f"{EXPERT_AXIS} of the mesh of compile_step ({', '.join(names) or 'no axes'})",
            hint=f"give compile_step a mesh with an axis {EXPERT_AXIS}, and "
            f'apply_expert_parallel mesh["{EXPERT_AXIS}"]',
        )
    return group


def shared_group(
    module: nn.Module, mesh: DeviceMesh
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The ranks of a stage that hold the same weights beside those of dealt experts, and the ranks
    that hold the same experts. Makes a group where the former are on two axes: collective on it."""
    replicas, experts = replica_group(module, mesh), expert_group(module, mesh)
    if replicas is None or experts is None:
        return replicas or experts, replicas
    axes = [(mesh.mesh_dim_names or ()).index(name) for name in (REPLICATE_AXIS, EXPERT_AXIS)]
    place = mesh.get_coordinate()
    assert place is not None
    own = mesh.mesh[tuple(slice(None) if i in axes else at for i, at in enumerate(place))]
    return group_of_some(own.flatten().tolist()), replicas


def replica_group(module: nn.Module, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks of those, this one among them. Raises InputError for a mesh whose ranks are to
    share weights."""
    names = (mesh.mesh_dim_names if mesh is not None else None) or ()
    on_axis = {
        name
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
        for name in parameter.device_mesh.mesh_dim_names or ()
    }
    sizes = {
        name: mesh.size(index)
        for index, name in enumerate(names)
        if mesh is not None and name not in on_axis
    }
    if sizes.get(SHARD_AXIS, 1) > 1:
        raise InputError(
            f"mesh has the axis {SHARD_AXIS} of {sizes[SHARD_AXIS]} ranks, and compile_step shards "
            "no weights itself",
            hint="put the module under fully_shard on that axis, which the step then takes as it "
            f"is; or name the axis {REPLICATE_AXIS} to average gradients over it",
        )
    if mesh is None or sizes.get(REPLICATE_AXIS, 1) == 1:
        return None
    return mesh.get_group(REPLICATE_AXIS)


def pipeline_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that run the stages of this rank's pipeline; None if there is no pipeline."""
    names = (mesh.mesh_dim_names if mesh is not None else None) or ()
    if mesh is None or PIPELINE_AXIS not in names or mesh.size(names.index(PIPELINE_AXIS)) == 1:
        return None
    return mesh.get_group(PIPELINE_AXIS)


def data_rank_of(mesh: DeviceMesh | None, strands: Strands) -> int:
    """This rank's number among the ranks that see other data: those along axes over which the model
    neither lays out parameters nor exchanges anything, and along `dp_replicate` and `ep`. The
    stages of a pipeline see the same data, and the ranks over which `fully_shard` cuts weights do
    not."""
    if mesh is None:
        return 0
    cut_over = () if strands.groups is None else strands.groups.axes
    apart = {ranks_of(axis.group) for axis in cut_over if axis.size > 1}
    shared = {
        ranks_of(str(parameter.device_mesh.get_group(axis).group_name))
        for parameter in strands.module.parameters()
        if isinstance(parameter, DTensor)
        for axis in range(parameter.device_mesh.ndim)
    }
    for name, graph in strands.graphs.items():
        nodes = graph.graph.nodes if strand(name).share != Share.ONCE else ()
        shared |= {ranks_of(group_of(node)) for node in nodes if is_collective(node)}
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    found = 0
    for axis in range(mesh.ndim):
        if names[axis] == PIPELINE_AXIS:
            continue
        ranks = ranks_of(str(mesh.get_group(axis).group_name))
        is_replicas = names[axis] in (REPLICATE_AXIS, EXPERT_AXIS)
        if is_replicas or ranks in apart or ranks not in shared:
            found = found * mesh.size(axis) + mesh.get_local_rank(axis)
    return found
