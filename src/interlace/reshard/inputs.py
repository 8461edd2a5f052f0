"""What is to move: as the caller describes it, or as the source ranks hold it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from interlace.errors import InputError
from interlace.reshard.layouts import (
    MeshRanks,
    SourceTensor,
    check_local_shape,
    layout_text,
    make_layout,
    placement_texts,
)
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.transfer_plan import TensorSpec

Placements = Sequence[Placement]
PlacementsOf = Placements | Mapping[str, Placements] | Callable[[str], Placements]
"""The same for all tensors, by name, or a function of the name."""

_SHOWN_CHARACTERS = 300
"""Characters up to which a message lists the tensors of a rank; a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One tensor to move, described alike on all ranks of both meshes."""

    shape: Sequence[int]
    """Of the whole tensor."""
    dtype: torch.dtype
    src_mesh: DeviceMesh
    src_placements: Placements
    dst_mesh: DeviceMesh
    dst_placements: Placements

    def source(self, name: str) -> SourceTensor:
        """The tensor before the move."""
        mesh = MeshRanks.of(self.src_mesh)
        texts = placement_texts(self.src_placements, mesh, len(self.shape), f"{name}: src")
        return SourceTensor(name, tuple(self.shape), self.dtype, mesh, texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of a plan."""

    source: SourceTensor
    dst_mesh: DeviceMesh
    dst_placements: tuple[Placement, ...]
    destination: Layout

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.source.name

    def spec(self) -> TensorSpec:
        """What the planner needs."""
        return self.source.spec(self.destination)

    def __str__(self) -> str:
        source, to = layout_text(self.source.held()), layout_text(self.destination)
        return f"{self.source.titled()} {source} to {to}"


def make_item(
    source: SourceTensor, dst_mesh: DeviceMesh, dst_placements: Placements
) -> PlannedTensor:
    """A tensor and where it goes. Raises InputError if it cannot go there."""
    mesh = MeshRanks.of(dst_mesh)
    where = f"{source.name}: dst"
    texts = placement_texts(dst_placements, mesh, len(source.shape), where)
    if any(text.startswith("P") for text in texts):
        raise InputError(
            f"{where}: a destination cannot be partial", hint="use Replicate or Shard there"
        )
    if mesh.device_type != source.mesh.device_type:
        raise InputError(
            f"{source.name}: from a mesh of {source.mesh.device_type} to one of {mesh.device_type}",
            hint="make both meshes of the same device type",
        )
    return PlannedTensor(
        source=source,
        dst_mesh=dst_mesh,
        dst_placements=tuple(dst_placements),
        destination=make_layout(source.shape, mesh, texts),
    )


def placements_for(name: str, placements: PlacementsOf) -> Placements:
    """The destination placements of one tensor."""
    if isinstance(placements, Mapping):
        if name not in placements:
            raise InputError(
                f"dst_placements has nothing for {name!r}",
                hint="give placements for every tensor",
            )
        return placements[name]
    return placements(name) if callable(placements) else placements


def held_tensors(
    tensors: Mapping[str, DTensor], src_mesh: DeviceMesh | None, rank: int
) -> list[SourceTensor]:
    """What a source rank holds. Raises InputError for tensors that are not on one mesh."""
    for name, tensor in tensors.items():
        _check_kind(tensor, name)
    meshes = {MeshRanks.of(tensor.device_mesh) for tensor in tensors.values()}
    if src_mesh is not None:
        meshes.add(MeshRanks.of(src_mesh))
    if len(meshes) > 1:
        raise InputError(
            "the tensors are on more than one mesh"
            if src_mesh is None
            else f"a tensor is not on src_mesh, whose ranks are {src_mesh.mesh.tolist()}",
            hint="make a plan per source mesh, or a ReshardPlan of Moves",
        )
    if not meshes:
        raise InputError("there is no tensor to move", hint="give at least one")
    sources = []
    for name, tensor in tensors.items():
        mesh = MeshRanks.of(tensor.device_mesh)
        texts = placement_texts(tensor.placements, mesh, tensor.ndim, f"{name}: src")
        source = SourceTensor(name, tuple(tensor.shape), tensor.dtype, mesh, texts)
        if rank in mesh.ranks:
            check_local_shape(tensor, source.held(), rank, name)
        sources.append(source)
    return sources


def sources_claim(sources: Sequence[SourceTensor], *, whole: bool) -> dict[str, Any]:
    """What a rank says of the tensors; the lowest of a mesh says all, others a digest."""
    mesh = sources[0].mesh
    place = [mesh.ranks, mesh.shape, mesh.device_type]
    table = [source.to_json() for source in sources]
    text = ", ".join(map(str, sources))
    shown = text if len(text) < _SHOWN_CHARACTERS else f"{len(sources)} tensors"
    claim = {"digest": digest([place, table]), "shown": shown, "mesh": place}
    return claim | ({"tensors": table} if whole else {})


def claimed_sources(claims: Mapping[int, Mapping[str, Any]]) -> list[SourceTensor]:
    """The tensors that the source ranks say they hold.

    Raises InputError, on all ranks alike, if they disagree or if one of them has none.
    """
    said = {rank: claim for rank, claim in claims.items() if "digest" in claim}
    if not said:
        raise InputError(
            "no rank gave a tensor", hint="give the tensor on the ranks of its mesh, None elsewhere"
        )
    first = min(said)
    for rank, claim in said.items():
        if claim["digest"] != said[first]["digest"]:
            raise InputError(
                f"rank {rank} has {claim['shown']} where rank {first} has {said[first]['shown']}",
                hint="give the same shapes, dtypes, placements and mesh on all ranks",
            )
    ranks, shape, device_type = said[first]["mesh"]
    mesh = MeshRanks(tuple(ranks), tuple(shape), device_type)
    absent = [rank for rank in mesh.ranks if rank not in said]
    if absent:
        raise InputError(
            f"rank {absent[0]} is in the source mesh but gave no tensor",
            hint="give the tensor on every rank of its mesh",
        )
    table = next(claim["tensors"] for claim in said.values() if "tensors" in claim)
    return [SourceTensor.from_json(tensor, mesh) for tensor in table]


def digest(table: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def check_planned(tensor: DTensor | None, item: PlannedTensor, rank: int) -> None:
    """Raises InputError unless the tensor is the one that was planned."""
    if tensor is None:
        raise InputError(f"{item.name!r} is missing", hint="give it on every rank of its mesh")
    _check_kind(tensor, item.name)
    source, mesh = item.source, MeshRanks.of(tensor.device_mesh)
    texts = placement_texts(tensor.placements, mesh, tensor.ndim, item.name)
    given = type(source)(item.name, tuple(tensor.shape), tensor.dtype, mesh, texts)
    if given != source:
        where = "" if mesh == source.mesh else f" on ranks {list(mesh.ranks)}"
        raise InputError(
            f"given {given}{where}, planned {source}", hint="make a new plan for other tensors"
        )
    check_local_shape(tensor, source.held(), rank, item.name)


def _check_kind(tensor: object, name: str) -> None:
    if not isinstance(tensor, DTensor):
        raise InputError(
            f"{name!r} is of type {type(tensor).__name__}, not a DTensor",
            hint="make it one by DTensor.from_local or distribute_tensor",
        )
