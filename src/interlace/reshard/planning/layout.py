"""A tensor's layout on a mesh of ranks: which box of it every rank holds, as DTensor has it.

Placements are text, one per mesh axis:

    "R"      every rank of the axis holds the same
    "S(d)"   tensor dimension d is cut along the axis; several axes on one dimension cut from left
             to right (the first axis cuts the whole, the next the pieces)
    "_S(d)"  as S(d), but after all axes to its right that cut d (DTensor's `_StridedShard`)
    "P"      every rank holds a term of a sum; its box is that of "R"

A cut of n elements over m ranks is `torch.chunk`'s: ceil(n / m) each, the last shorter or empty.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from interlace.errors import InputError

Box = tuple[tuple[int, int], ...]
"""[start, stop) in each dimension of the whole tensor; () for a scalar."""

REPLICATE, PARTIAL = "R", "P"
"""Placements of an axis whose ranks hold the same, or each a term of a sum."""
SHARD = re.compile(r"(_?)S\((\d+)\)")
"""Finds the placement of an axis that cuts a dimension: whether it is strided, and the
dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One tensor on one mesh."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    ranks: tuple[int, ...]
    """Global ranks of the mesh, in row-major order."""
    mesh_shape: tuple[int, ...]
    placements: tuple[str, ...]

    def __post_init__(self) -> None:
        if prod(self.mesh_shape) != len(self.ranks) or not self.ranks:
            raise InputError(
                f"a mesh of shape {self.mesh_shape} with {len(self.ranks)} ranks",
                hint="give as many ranks as the mesh has places, at least one",
            )
        if len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 0:
            raise InputError(
                f"mesh ranks {self.ranks} must be different and 0 or more",
                hint="name every rank of the mesh once",
            )
        if any(size < 0 for size in self.shape):
            raise InputError(
                f"tensor shape {self.shape} has a negative size", hint="sizes are 0 or more"
            )
        if len(self.placements) != len(self.mesh_shape):
            raise InputError(
                f"{len(self.placements)} placements for a mesh of {len(self.mesh_shape)} axes",
                hint="give one placement for each mesh axis",
            )
        for placement in self.placements:
            self._check(placement)

    def _check(self, placement: str) -> None:
        found = SHARD.fullmatch(placement)
        if not found and placement not in (REPLICATE, PARTIAL):
            raise InputError(
                f"unknown placement {placement!r}", hint='write "R", "P", "S(0)" or "_S(0)"'
            )
        if found and int(found[2]) >= len(self.shape):
            raise InputError(
                f"placement {placement!r} on a tensor of {len(self.shape)} dimensions",
                hint="shard a dimension that the tensor has",
            )

    def box(self, rank: int) -> Box | None:
        """What `rank` holds (possibly empty); None outside the mesh."""
        if rank not in self.ranks:
            return None
        return self._box_at(self._coordinate(self.ranks.index(rank)), self.cuts())

    def boxes(self) -> dict[int, Box]:
        """What every rank of the mesh holds."""
        cuts = self.cuts()
        places = product(*(range(size) for size in self.mesh_shape))
        return {
            rank: self._box_at(place, cuts) for rank, place in zip(self.ranks, places, strict=True)
        }

    def tiles(self) -> dict[Box, tuple[int, ...]]:
        """Every different box that is not empty, and the ranks that hold it, in mesh order."""
        found: dict[Box, list[int]] = {}
        for rank, box in self.boxes().items():
            if all(start < stop for start, stop in box):
                found.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in found.items()}

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same box as `rank`, itself among them, in mesh order."""
        boxes = self.boxes()
        return tuple(other for other in self.ranks if boxes[other] == boxes[rank])

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Mesh axes that cut each tensor dimension, in the order in which they cut."""
        cuts: list[list[int]] = [[] for _ in self.shape]
        for axis in reversed(range(len(self.placements))):
            found = SHARD.fullmatch(self.placements[axis])
            if found:
                axes = cuts[int(found[2])]
                axes.insert(len(axes) if found[1] else 0, axis)
        return tuple(map(tuple, cuts))

    def _coordinate(self, index: int) -> tuple[int, ...]:
        place = []
        for size in reversed(self.mesh_shape):
            index, at = divmod(index, size)
            place.append(at)
        return tuple(reversed(place))

    def _box_at(self, place: tuple[int, ...], cuts: Iterable[tuple[int, ...]]) -> Box:
        return tuple(
            self._interval(size, axes, place) for size, axes in zip(self.shape, cuts, strict=True)
        )

    def _interval(
        self, size: int, axes: tuple[int, ...], place: tuple[int, ...]
    ) -> tuple[int, int]:
        start, stop = 0, size
        for axis in axes:
            chunk = -(-(stop - start) // self.mesh_shape[axis])
            start, stop = (
                min(start + place[axis] * chunk, stop),
                min(start + (place[axis] + 1) * chunk, stop),
            )
        return start, stop


def intersection(one: Box, other: Box) -> Box | None:
    """The common elements; None if there are none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None
