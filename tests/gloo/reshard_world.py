"""What the tests of resharding run inside a rank: random layouts, tensors and their moves."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
)
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13)


@dataclass(frozen=True)
class Side:
    """A mesh and placements on it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


class Meshes:
    """Meshes by their ranks and shape; all ranks must ask for the same in the same order."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._made: dict[tuple, DeviceMesh] = {}

    def of(self, ranks: Sequence[int], shape: Sequence[int]) -> DeviceMesh:
        key = (tuple(ranks), tuple(shape))
        if key not in self._made:
            grid = torch.tensor(ranks).view(*shape)
            self._made[key] = DeviceMesh(self.device_type, grid)
        return self._made[key]


def random_mesh(draw: random.Random, meshes: Meshes, world: int) -> DeviceMesh:
    """One of a few meshes: more would make too many process groups."""
    seed = draw.randrange(14)
    own = random.Random(1000 * world + seed)
    shapes = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (8,), (2, 4))
    shape = own.choice([shape for shape in shapes if math.prod(shape) <= world])
    return meshes.of(own.sample(range(world), math.prod(shape)), shape)


def random_placements(
    draw: random.Random, mesh: DeviceMesh, dimensions: int, *, partial: bool
) -> tuple[Placement, ...]:
    """Any placements; two axes on one dimension in either order, partial sums if allowed."""
    found: list[Placement] = []
    for _ in range(mesh.ndim):
        choice = draw.random()
        if dimensions and choice < 0.65:
            found.append(Shard(draw.randrange(dimensions)))
        elif partial and choice < 0.8:
            found.append(Partial("sum"))
        else:
            found.append(Replicate())
    for axis, placement in enumerate(found):
        later = [
            n
            for other, n in zip(found[axis + 1 :], mesh.mesh.shape[axis + 1 :], strict=True)
            if isinstance(other, Shard) and other == placement
        ]
        if isinstance(placement, Shard) and later and draw.random() < 0.5:
            found[axis] = _StridedShard(placement.dim, split_factor=math.prod(later))
    return tuple(found)


def cut(whole: Tensor, side: Side, rank: int) -> Tensor:
    """What a rank holds, by torch.chunk axis after axis; strided axes cut last, from right to
    left."""
    at = (side.mesh.mesh == rank).nonzero()[0].tolist()
    axes = range(len(side.placements))
    strided = [a for a in axes if isinstance(side.placements[a], _StridedShard)]
    part = whole
    for axis in [a for a in axes if a not in strided] + strided[::-1]:
        dim = getattr(side.placements[axis], "dim", None)
        if dim is None:
            continue
        chunks = list(part.chunk(side.mesh.mesh.shape[axis], dim))
        empty = part.narrow(dim, 0, 0)
        part = chunks[at[axis]] if at[axis] < len(chunks) else empty
    return part


def random_whole(draw: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of random bits that no arithmetic would survive, equal on all ranks."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def place(whole: Tensor, side: Side, *, draw: random.Random) -> DTensor | None:
    """The tensor on a mesh, each rank's part possibly not contiguous; None outside of it.

    Where the placements are partial, the first rank of an axis holds the values, others zero."""
    rank = dist.get_rank()
    transposed = draw.random() < 0.3
    if rank not in side.mesh.mesh.flatten().tolist():
        return None
    local = cut(whole, side, rank).clone(memory_format=torch.contiguous_format)
    at = (side.mesh.mesh == rank).nonzero()[0].tolist()
    for index, placement in zip(at, side.placements, strict=True):
        if isinstance(placement, Partial) and index > 0:
            local.zero_()
    if transposed and local.ndim > 1:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        side.mesh,
        side.placements,
        run_check=False,
        shape=whole.shape,
        stride=stride,
    )


def bits(tensor: Tensor) -> bytes:
    """The exact bits."""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit are equal."""
    return one.shape == other.shape and one.dtype == other.dtype and bits(one) == bits(other)
