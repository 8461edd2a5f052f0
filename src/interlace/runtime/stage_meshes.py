"""The meshes of the stages of a pipeline whose stages are laid out each in its own way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError
from interlace.parallel.meshes import CONTEXT_AXIS, PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS
from interlace.reshard.planning.inferred_layouts import NamedMesh

DATA_AXES = (REPLICATE_AXIS, SHARD_AXIS)
"""Axes whose ranks see other samples."""


@dataclass(frozen=True)
class StageMeshes:
    """One mesh for each stage, over all ranks of the job, and this rank's place in them."""

    meshes: tuple[NamedMesh, ...]
    number: int
    """This rank's stage."""
    mesh: DeviceMesh
    """That of this rank's stage."""
    stage: dist.ProcessGroup
    """The ranks of this stage."""

    @classmethod
    def of(cls, meshes: Sequence[DeviceMesh]) -> "StageMeshes":
        """The stages in order. Collective on the default group, as groups are made.

        Raises InputError unless each rank of the job is in one mesh, whose axes have names."""
        if not dist.is_initialized():
            raise InputError(
                f"there are {len(meshes)} stages and no process group",
                hint="call torch.distributed.init_process_group first",
            )
        named = tuple(_named(number, mesh) for number, mesh in enumerate(meshes))
        _check(named, dist.get_world_size())
        rank = dist.get_rank()
        number = next(i for i, mesh in enumerate(named) if rank in mesh.ranks)
        groups = [dist.new_group(list(mesh.ranks)) for mesh in named]
        stage = groups[number]
        assert isinstance(stage, dist.ProcessGroup)
        return cls(named, number, meshes[number], stage)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each stage."""
        return tuple(mesh.ranks[0] for mesh in self.meshes)

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank is on the axes of its stage."""
        mesh = next(mesh for mesh in self.meshes if rank in mesh.ranks)
        index, found = mesh.ranks.index(rank), {}
        for axis, size in reversed(list(mesh.sizes.items())):
            index, found[axis] = divmod(index, size)
        return found


def _named(number: int, mesh: DeviceMesh) -> NamedMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise InputError(
            f"the mesh of stage {number} has no names for its axes",
            hint='make it by DeviceMesh("cpu", ranks, mesh_dim_names=("tp",))',
        )
    if PIPELINE_AXIS in names:
        raise InputError(
            f"the mesh of stage {number} has an axis {PIPELINE_AXIS}",
            hint="give one mesh for each stage, without that axis; or, where all stages are laid "
            "out alike, compile_step(mesh=...) with it",
        )
    return NamedMesh(
        ranks=tuple(mesh.mesh.flatten().tolist()),
        sizes=dict(zip(names, mesh.mesh.shape, strict=True)),
    )


def _check(meshes: Sequence[NamedMesh], world: int) -> None:
    ranks = [rank for mesh in meshes for rank in mesh.ranks]
    if len(meshes) < 2:
        raise InputError(
            f"stages has {len(meshes)} mesh, and a pipeline has two stages at least",
            hint="give compile_step(mesh=...) for a model in one stage",
        )
    if sorted(ranks) != list(range(world)):
        sizes = " + ".join(str(len(mesh.ranks)) for mesh in meshes)
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        missing = sorted(set(range(world)) - set(ranks))
        what = f"rank {twice[0]} is in two" if twice else f"rank {(missing or [max(ranks)])[0]} "
        what += "" if twice else ("is in none" if missing else "does not exist")
        raise InputError(
            f"the stages have {sizes} = {len(ranks)} ranks, the job has {world}, and {what}",
            hint="put every rank of the job into the mesh of one stage",
        )
    widths = {mesh.sizes.get(CONTEXT_AXIS, 1) for mesh in meshes}
    if len(widths) > 1:
        raise InputError(
            f"the stages have an axis {CONTEXT_AXIS} of {', '.join(map(str, sorted(widths)))} "
            "ranks, and how ranks share a sequence cannot be seen from outside",
            hint=f"give all stages an equally wide axis {CONTEXT_AXIS}",
        )
