"""What a step of a module under `fully_shard` can be, and on which ranks it runs."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.graphs.fsdp_private import FullyShardedModule
from interlace.graphs.spread import ranks_of
from interlace.parallel.expert import dealt_parameters
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS
from interlace.runtime.step_ranks import StepRanks
from interlace.schedules.finder import Schedule


def mesh_of_fully_shard(module: nn.Module) -> DeviceMesh | None:
    """The mesh with most axes on which `fully_shard` laid out a weight of `module`; None if it laid
    out none. Weights that an earlier forward has left whole are sharded again."""
    found = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for each in found:
        each.reshard()
    meshes = [
        parameter.device_mesh
        for each in found
        for parameter in each.parameters()
        if isinstance(parameter, DTensor)
    ]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def sharded_for_step(
    chunk: nn.Module, ranks: StepRanks, schedule: Schedule
) -> FullyShardedModule | None:
    """The traced module as FSDP2 has it; None if nothing in it is under `fully_shard`.

    Raises InputError for what cannot be traced, and for what does not go together with it.
    """
    if not any(isinstance(each, FSDPModule) for each in chunk.modules()):
        return None
    if ranks.pipeline is not None:
        raise InputError(
            "the module is under fully_shard, and the step is a pipeline of "
            f"{ranks.pipeline[0]} stages",
            hint="leave fully_shard out, or train without a pipeline; interlace train has ZeRO-3 "
            "in stages (parallel.data_shard)",
        )
    if schedule.chunks > 1 or schedule.cuts_backwards:
        raise InputError(
            f"the module is under fully_shard, and schedule {schedule.name!r} cuts it into chunks",
            hint="take the schedule one_strand or two_strand",
        )
    if dealt := dealt_parameters(chunk):
        raise InputError(
            f"the module is under fully_shard, and {next(iter(dealt))!r} holds the experts of one "
            "of several ranks",
            hint="leave fully_shard out, or leave all experts on every rank",
        )
    found = FullyShardedModule(chunk)
    _check_axes(found, ranks.mesh)
    return found


def _check_axes(sharded: FullyShardedModule, mesh: DeviceMesh | None) -> None:
    """Raise InputError if `mesh` has ranks that see other data and are not FSDP2's."""
    names = (mesh.mesh_dim_names if mesh is not None else None) or ()
    known = {ranks_of(axis.group) for axis in sharded.layout.axes if axis.size > 1}
    for name in (REPLICATE_AXIS, SHARD_AXIS):
        if mesh is None or name not in names or mesh[name].size() == 1:
            continue
        if ranks_of(str(mesh.get_group(name).group_name)) not in known:
            raise InputError(
                f"mesh has an axis {name} of {mesh[name].size()} ranks, and the mesh that "
                "fully_shard was given has no axis of these ranks",
                hint="give fully_shard all data-parallel axes: "
                f'mesh["{REPLICATE_AXIS}", "{SHARD_AXIS}"] averages over replicas too',
            )
