"""The ranks that a step runs on, as a user gives them: one mesh, or one for each stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.config import OverlapConfig
from interlace.errors import InputError
from interlace.parallel.data import DataLayout
from interlace.parallel.expert import dealt_parameters
from interlace.ranks.agree import refused_together
from interlace.ranks.process_group import group_of_some
from interlace.runtime.laid_out_link import LaidOutLink
from interlace.runtime.mesh_axes import (
    expert_group,
    pipeline_of,
    replica_group,
    replicas_of,
    shared_group,
)
from interlace.runtime.stage_link import DealtWeights, StageLink
from interlace.runtime.stage_meshes import StageMeshes


@dataclass(frozen=True)
class StepRanks:
    """Who runs a step."""

    mesh: DeviceMesh | None
    """With an axis `pp` if it has the stages of a pipeline; that of this rank's stage if stages
    have meshes of their own."""
    apart: StageMeshes | None = None
    """The stages, if they have."""
    members: dist.ProcessGroup | None = None
    """All ranks of the mesh, if other ranks of the job have no part in the step."""

    @classmethod
    def of(
        cls, mesh: DeviceMesh | None, stages: Sequence[DeviceMesh], overlap: OverlapConfig
    ) -> "StepRanks":
        """Collective on the default group where `stages` are given, and else on the ranks of the
        mesh, as groups are made. Raises InputError for what does not go together."""
        if not stages:
            return cls(mesh, members=_members(mesh, overlap))
        with refused_together():
            if mesh is not None:
                raise InputError(
                    "mesh and stages are both given",
                    hint="give stages alone: each rank belongs to the mesh of one of them",
                )
            if overlap.decompose == "auto":
                raise InputError(
                    'overlap.decompose = "auto" measures on all ranks together, and stages with '
                    "meshes of their own have different graphs",
                    hint='name a variant, such as "ring", or set it to "off"',
                )
        apart = StageMeshes.of(stages)
        return cls(apart.mesh, apart)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that trace the same graphs; None for all."""
        return self.members if self.apart is None else self.apart.stage

    @property
    def pipeline(self) -> tuple[int, int] | None:
        """(number of stages, this rank's stage), if there are several."""
        if self.apart is not None:
            return len(self.apart.meshes), self.apart.number
        group = pipeline_of(self.mesh)
        return None if group is None else (dist.get_world_size(group), dist.get_rank(group))

    def data(self, module: nn.Module, dtype: torch.dtype) -> DataLayout | None:
        """How graphs sum gradients over replicas; in a pipeline they do not. Raises InputError for
        experts that are dealt to the ranks of a stage with a mesh of its own."""
        if self.apart is None:
            return replicas_of(module, self.mesh, dtype)
        if dealt := dealt_parameters(module):
            name, ranks = next(iter(dealt.items()))
            raise InputError(
                f"{name!r} holds the experts of one of {ranks} ranks, and stages are given",
                hint="lay all stages out alike, on one mesh with axes pp and ep, or leave all "
                "experts on every rank of a stage",
            )
        return None

    def has_replicas(self, module: nn.Module) -> bool:
        """Whether gradients are averaged over ranks that hold equal weights."""
        groups = replica_group(module, self.mesh), expert_group(module, self.mesh)
        return any(group is not None for group in groups)

    def link(self, module: nn.Module, device: torch.device, wait_s: float) -> StageLink | None:
        """The way to the other stages, and to the replicas of this one."""
        mesh, group = self.mesh, pipeline_of(self.mesh)
        if mesh is None or self.pipeline is None:
            return None
        replicas, same = shared_group(module, mesh)
        dealt = DealtWeights(frozenset(dealt_parameters(module)), same)
        every = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        around = [each for each in every if each not in (group, replicas)]
        if self.apart is not None:
            return LaidOutLink(self.apart, device, replicas=replicas, around=around, wait_s=wait_s)
        assert group is not None
        return StageLink(
            group, device, replicas=replicas, dealt=dealt, around=around, wait_s=wait_s
        )


def _members(mesh: DeviceMesh | None, overlap: OverlapConfig) -> dist.ProcessGroup | None:
    """A group of all ranks of a mesh; None if those are all of the job, or there is no mesh."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    ranks = mesh.mesh.flatten().tolist()
    if mesh.get_coordinate() is None:
        raise InputError(
            f"rank {dist.get_rank()} has no part in the mesh, whose ranks are "
            f"{', '.join(map(str, ranks))}",
            hint="call compile_step on the ranks of its mesh only",
        )
    if overlap.decompose == "auto":
        raise InputError(
            f'overlap.decompose = "auto" measures on all {dist.get_world_size()} ranks of the job '
            f"together, and the mesh has {mesh.size()} of them",
            hint='name a variant, such as "ring", or set it to "off"',
        )
    if mesh.ndim == 1:
        return mesh.get_group(0)
    return group_of_some(ranks)
