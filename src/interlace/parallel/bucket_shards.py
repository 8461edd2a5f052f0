"""This rank's share of the weights that data-parallel ranks own between them (`parallel.data`)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from interlace.parallel.data import Bucket, DataLayout, Weight, cut, placements_of, views
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import SHARD_AXIS, Meshes


class BucketShards:
    """This rank's share of the weights: flat tensors per sharded bucket, whole ones beside."""

    def __init__(
        self,
        whole: Mapping[str, Tensor],
        data: DataLayout,
        meshes: Meshes,
        compute_dtype: torch.dtype,
    ) -> None:
        self.data = data
        self.flat: dict[int, Tensor] = {}
        """Masters of each sharded bucket, float32."""
        self.computing: dict[int, Tensor] = {}
        """The same in the type that graphs compute with."""
        self.masters: dict[str, nn.Parameter] = {}
        self._sharded: set[str] = set()
        self._meshes = {False: meshes.weights, True: meshes.experts}
        """Of buckets, by whether they hold dealt experts."""
        self.rank = meshes.weights.get_local_rank(SHARD_AXIS)
        for bucket in data.buckets:
            if bucket.sharded:
                self._shard(bucket, whole, compute_dtype)
        for bucket in data.buckets:
            parts, mesh = self._parts(bucket, whole), self._meshes[bucket.dealt]
            assert mesh is not None
            for weight in bucket.weights:
                tensor = whole[weight.name]
                over = tensor.placements if isinstance(tensor, DTensor) else None
                layout = placements_of(weight, over)
                part = laid_out(parts[weight.name], mesh, layout, tensor, weight.dealt)
                self.masters[weight.name] = nn.Parameter(part)
        self.masters = {name: self.masters[name] for name in whole}

    def _shard(self, bucket: Bucket, whole: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        wholes = {weight: local(whole[weight.name]) for weight in bucket.weights}
        flat = self.pack(wholes)
        self.flat[bucket.index] = flat
        self.computing[bucket.index] = flat if dtype == torch.float32 else flat.to(dtype)
        self._sharded |= {name for weight in bucket.weights for name in weight.names}

    def _parts(self, bucket: Bucket, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if bucket.sharded:
            return views(bucket, self.flat[bucket.index])
        return {weight.name: local(whole[weight.name]) for weight in bucket.weights}

    def pack(self, wholes: Mapping[Weight, Tensor]) -> Tensor:
        """This rank's parts of whole weights of one bucket, one behind the other."""
        rank = self.rank
        if any(weight.dealt > 1 for weight in wholes):
            mesh = self._meshes[True]
            assert mesh is not None
            rank = mesh.get_local_rank(SHARD_AXIS)
        parts = [cut(weight, whole, rank) for weight, whole in wholes.items()]
        return torch.cat([part.reshape(-1) for part in parts])

    def is_sharded(self, name: str) -> bool:
        """Whether only a part of this parameter is kept."""
        return name in self._sharded

    def publish(self) -> None:
        """Round the flat masters into what is gathered."""
        for index, flat in self.flat.items():
            if self.computing[index] is not flat:
                self.computing[index].copy_(flat)

    def gradients(self, buffers: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
        """Views of the flat sums of sharded buckets, by parameter name."""
        found: dict[str, Tensor] = {}
        for bucket in self.data.buckets:
            if bucket.sharded:
                flat = buffers["shard_gradient", str(bucket.index)]
                found |= views(bucket, flat)
        return found


def laid_out(
    part: Tensor, mesh: DeviceMesh, placements: Iterable[Placement], like: Tensor, dealt: int = 1
) -> DTensor:
    """A DTensor of `part`, with the global shape of `like`, of which there are `dealt` along
    dimension 0."""
    shape = torch.Size((dealt * like.shape[0], *like.shape[1:])) if dealt > 1 else like.shape
    return DTensor.from_local(
        part, mesh, tuple(placements),
        run_check=False, shape=shape, stride=like.stride(),
    )  # fmt: skip
