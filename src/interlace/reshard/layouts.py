"""From DTensors, device meshes and placements to the layouts that the planner knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from interlace.errors import InputError
from interlace.reshard.planning.layout import PARTIAL, SHARD, Layout
from interlace.reshard.planning.transfer_plan import TensorSpec


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """A device mesh as numbers."""

    ranks: tuple[int, ...]
    """Global ranks in row-major order."""
    shape: tuple[int, ...]
    device_type: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """The numbers of a mesh."""
        grid = mesh.mesh
        return cls(tuple(grid.flatten().tolist()), tuple(grid.shape), mesh.device_type)

    def ascends(self, axis: int) -> bool:
        """Whether the ranks of every line along the axis ascend."""
        stride, size = prod(self.shape[axis + 1 :]), self.shape[axis]
        return all(
            rank < self.ranks[at + stride]
            for at, rank in enumerate(self.ranks)
            if at // stride % size < size - 1
        )


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor as its source ranks hold it; `placements` may hold "P(sum)" and the like."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: MeshRanks
    placements: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON, for other ranks. The mesh goes apart: tensors share it."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "placements": list(self.placements),
        }

    @classmethod
    def from_json(cls, table: dict[str, Any], mesh: MeshRanks) -> Self:
        """The tensor that `to_json` wrote."""
        return cls(
            table["name"],
            tuple(table["shape"]),
            getattr(torch, table["dtype"]),
            mesh,
            tuple(table["placements"]),
        )

    def titled(self) -> str:
        """Name, dtype and shape."""
        return f"{self.name!r} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def __str__(self) -> str:
        return f"{self.titled()} ({', '.join(self.placements)})"

    def reduced(self) -> tuple[str, ...]:
        """Its placements once partial sums are reduced.

        A partial axis becomes a cut of the first dimension that no other axis cuts and that it
        divides (a reduce-scatter moves half the bytes of an all-reduce), or else replicas. It also
        becomes replicas where ranks do not ascend: DTensor scatters in the order of its sorted
        group.
        """
        placements = list(self.placements)
        taken = {int(found[2]) for text in placements if (found := SHARD.fullmatch(text))}
        for axis, text in enumerate(placements):
            if not text.startswith(PARTIAL):
                continue
            size = self.mesh.shape[axis]
            free = [d for d, n in enumerate(self.shape) if n and n % size == 0 and d not in taken]
            if free and self.mesh.ascends(axis):
                placements[axis] = f"S({free[0]})"
                taken.add(free[0])
            else:
                placements[axis] = "R"
        return tuple(placements)

    def held(self) -> Layout:
        """Its layout as the source ranks hold it."""
        texts = [PARTIAL if text.startswith(PARTIAL) else text for text in self.placements]
        return make_layout(self.shape, self.mesh, texts)

    def layout(self) -> Layout:
        """Its layout, partial sums reduced."""
        return make_layout(self.shape, self.mesh, self.reduced())

    def spec(self, destination: Layout) -> TensorSpec:
        """What the planner needs."""
        return TensorSpec(
            name=self.name,
            shape=self.shape,
            itemsize=self.dtype.itemsize,
            source=self.layout(),
            destination=destination,
        )


def make_layout(shape: Sequence[int], mesh: MeshRanks, placements: Sequence[str]) -> Layout:
    """The planner's layout."""
    return Layout(
        shape=tuple(shape),
        ranks=mesh.ranks,
        mesh_shape=mesh.shape,
        placements=tuple(placements),
    )


def layout_text(layout: Layout) -> str:
    """A layout in few words."""
    mesh = "x".join(map(str, layout.mesh_shape))
    ranks = list(layout.ranks)
    shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, ..., {ranks[-1]}]"
    return f"({', '.join(layout.placements)}) on a {mesh} mesh of ranks {shown}"


def placement_texts(
    placements: Sequence[Placement], mesh: MeshRanks, dimensions: int, where: str
) -> tuple[str, ...]:
    """Placements as the planner's texts, "P(sum)" for a partial one.

    Raises InputError for what is no placement of a tensor of so many dimensions on this mesh.
    """
    if len(placements) != len(mesh.shape):
        raise InputError(
            f"{where}: {len(placements)} placements for a mesh of {len(mesh.shape)} axes",
            hint="give one placement for each axis of the mesh",
        )
    return tuple(
        _text(placement, axis, placements, mesh, dimensions, where)
        for axis, placement in enumerate(placements)
    )


def placement_of(text: str) -> Placement:
    """The public placement that a text means, which is neither a partial nor a strided one."""
    found = SHARD.fullmatch(text)
    return Shard(int(found[2])) if found else Replicate()


def reduce_partial(tensor: DTensor, reduced: Sequence[str]) -> DTensor:
    """Reduces the partial axes to the placements of `SourceTensor.reduced`. A collective."""
    if not any(isinstance(placement, Partial) for placement in tensor.placements):
        return tensor
    placements = [
        placement_of(text) if isinstance(old, Partial) else old
        for old, text in zip(tensor.placements, reduced, strict=True)
    ]
    return tensor.redistribute(placements=placements)


def check_local_shape(tensor: DTensor, layout: Layout, rank: int, name: str) -> None:
    """Raises InputError unless this rank holds what the layout says."""
    box = layout.box(rank)
    assert box is not None
    expected = tuple(stop - start for start, stop in box)
    held = tuple(tensor.to_local().shape)
    if held != expected and prod(held) + prod(expected) > 0:
        raise InputError(
            f"{name}: this rank holds {list(held)} where its placements say {list(expected)}",
            hint="cut the tensor as distribute_tensor does, uneven shards included",
        )


def _text(
    placement: Placement,
    axis: int,
    placements: Sequence[Placement],
    mesh: MeshRanks,
    dimensions: int,
    where: str,
) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if type(placement) is Partial:
        return f"P({placement.reduce_op})"
    dim = getattr(placement, "dim", None)
    strided = type(placement).__name__ == "_StridedShard"
    if dim is None or not (strided or type(placement) is Shard):
        raise InputError(
            f"{where}: cannot move a tensor with placement {placement!r}",
            hint="redistribute it to Shard, Replicate or Partial first",
        )
    if not -dimensions <= dim < dimensions:
        raise InputError(
            f"{where}: {placement!r} for a tensor of {dimensions} dimensions",
            hint="shard a dimension that the tensor has",
        )
    dim %= dimensions
    if not strided:
        return f"S({dim})"
    later = zip(placements[axis + 1 :], mesh.shape[axis + 1 :], strict=True)
    shards = prod(n for other, n in later if getattr(other, "dim", None) == dim)
    factor = getattr(placement, "split_factor")  # noqa: B009 - of a private class
    if factor != shards:
        raise InputError(
            f"{where}: {placement!r} is split {factor} times before, but the axes to its right "
            f"cut dimension {dim} into {shards}",
            hint="use the placements that fully_shard gives on top of tensor parallelism",
        )
    return f"_S({dim})"
