"""What a user of plain PyTorch does today to move a tensor to another mesh."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from interlace.bench.reshard_cases import ReshardCase, Side


@dataclass(frozen=True, kw_only=True)
class RankCase:
    """One case as one rank sees it. Only ranks of either mesh take part."""

    case: ReshardCase
    rank: int
    source_ranks: tuple[int, ...]
    destination_ranks: tuple[int, ...]
    source_mesh: DeviceMesh
    destination_mesh: DeviceMesh
    tensor: DTensor | None
    """None outside the source mesh."""
    expected: Tensor | None
    """This rank's part after the move; None outside the destination mesh."""

    @property
    def takes_part(self) -> bool:
        """Whether this rank is on either side."""
        return self.tensor is not None or self.expected is not None

    @property
    def placements(self) -> tuple[list[Placement], list[Placement]]:
        """Of source and destination."""
        return placements_of(self.case.source), placements_of(self.case.destination)


@dataclass(frozen=True, kw_only=True)
class RivalGroups:
    """Process groups that plain PyTorch needs, made ahead of time."""

    source: dist.ProcessGroup
    destination: dist.ProcessGroup
    fan: dist.ProcessGroup
    """The first source rank and all destinations."""
    both: dist.ProcessGroup


def placements_of(side: Side) -> list[Placement]:
    """DTensor's placements of one side."""
    return [Replicate() if dim is None else Shard(dim) for dim in side.placements]


def part_at(full: Tensor, side: Side, place: tuple[int, ...]) -> Tensor:
    """A view of what the device at `place` of the mesh holds."""
    for axis, size in enumerate((side.hosts, side.devices)):
        dim = side.placements[axis]
        if dim is not None:
            full = full.chunk(size, dim)[place[axis]]
    return full


def through_full_tensor(move: RankCase, groups: RivalGroups) -> DTensor | None:
    """`full_tensor()` on the source mesh, then one rank scatters the parts to the destinations
    where nothing is kept twice, else broadcasts the whole, of which each rank takes its part."""
    full = None if move.tensor is None else move.tensor.full_tensor()
    first = move.source_ranks[0]
    if move.rank != first and move.expected is None:
        return None
    side = move.case.destination
    if side.replicas == 1:
        return _scattered(move, full, groups.fan)
    if full is None:
        full = torch.empty(move.case.shape, dtype=torch.int32)
    dist.broadcast(full, first, group=groups.fan)
    if move.expected is None:
        return None
    return distribute_tensor(full, move.destination_mesh, move.placements[1], src_data_rank=None)


def _scattered(move: RankCase, full: Tensor | None, fan: dist.ProcessGroup) -> DTensor | None:
    """The first source rank is a member of the scatter, so it sends a part to itself too."""
    side, first = move.case.destination, move.source_ranks[0]
    parts = None
    if move.rank == first:
        assert full is not None, "the first source rank has the whole tensor"
        places = [(i, j) for i in range(side.hosts) for j in range(side.devices)]
        parts = [part_at(full, side, place).contiguous() for place in places]
        parts.insert(0, parts[0])  # ranks of a group are sorted: the source comes first
        own = torch.empty_like(parts[0])
    else:
        assert move.expected is not None, "all others receive"
        own = torch.empty_like(move.expected, memory_format=torch.contiguous_format)
    dist.scatter(own, parts, first, group=fan)
    if move.rank == first:
        return None
    return DTensor.from_local(own, move.destination_mesh, move.placements[1], run_check=False)


def through_checkpoint(move: RankCase, groups: RivalGroups, folder: Path) -> DTensor | None:
    """Save on the source mesh, wait, load on the destination mesh."""
    if move.tensor is not None:
        dcp.save({"x": move.tensor}, checkpoint_id=folder, process_group=groups.source)
    dist.barrier(groups.both)
    if move.expected is None:
        return None
    empty = torch.empty_like(move.expected, memory_format=torch.contiguous_format)
    loaded = DTensor.from_local(empty, move.destination_mesh, move.placements[1], run_check=False)
    dcp.load({"x": loaded}, checkpoint_id=folder, process_group=groups.destination)
    return loaded
