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
from interlace.parallel.expert import dealt_parameters
from interlace.parallel.meshes import PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS
from interlace.runtime.traced_strands import Strands


def axis_of_group(mesh: DeviceMesh | None) -> dict[str, str]:
    """Axis name by process-group name; axes without names are `axis0`, `axis1`, ..."""
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    return {mesh.get_group(index).group_name: name for index, name in enumerate(names)}


def replicas_of(
    module: nn.Module, mesh: DeviceMesh | None, dtype: torch.dtype
) -> DataLayout | None:
    """How graphs sum gradients over ranks that hold the same weights; None if there are none, or if
    parameters lie on that axis themselves and so say how their gradients add up. In a pipeline it
    is not the graphs that sum them."""
    group = replica_group(module, mesh)
    if group is None or pipeline_of(mesh) is not None:
        return None
    axis = Axis(str(group.group_name), dist.get_world_size(group))
    return replicated_layout(module, axis, dtype, bucket_mib=ParallelConfig().bucket_mib)


def replica_group(module: nn.Module, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks of those, this one among them. Raises InputError for a mesh whose ranks are to
    share weights, and for experts that are dealt to ranks."""
    if dealt := dealt_parameters(module):
        name, over = next(iter(dealt.items()))
        raise InputError(
            f"{name!r} holds the experts of one of {over} ranks, and compile_step sums gradients "
            "as if all ranks had all experts",
            hint="train by interlace train (parallel.expert), or leave all experts on every rank",
        )
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
            "no weights",
            hint=f"name the axis {REPLICATE_AXIS} to average gradients over it; interlace train "
            "shards weights (parallel.data_shard)",
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
    neither lays out parameters nor exchanges anything, and along `dp_replicate`. The stages of a
    pipeline see the same data."""
    if mesh is None:
        return 0
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
        is_replicas = names[axis] == REPLICATE_AXIS
        if is_replicas or ranks_of(str(mesh.get_group(axis).group_name)) not in shared:
            found = found * mesh.size(axis) + mesh.get_local_rank(axis)
    return found
