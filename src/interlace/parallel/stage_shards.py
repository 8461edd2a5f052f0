"""ZeRO in a stage of a pipeline: ranks that share a stage each own a part of its masters.

The gradients of a stage are summed whole over the ranks that share it when the step ends. What
ZeRO-1 (arXiv 1910.02054, P_os) shards is what comes after: a master, its gradient and its optimizer
state are this rank's part along one dimension, and after the optimizer's step the parts are
gathered into the module's whole parameters. With ZeRO-3 the graphs gather weights for each pass,
from flat parts of buckets, and no rank keeps whole ones.
"""

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.parallel.bucket_shards import laid_out
from interlace.parallel.data import (
    Bucket,
    DataLayout,
    Weight,
    cut,
    placements_of,
    split_weights,
    views,
)
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import SHARD_AXIS, Meshes


class StageShards:
    """Masters of a stage's weights, laid out over its ranks and cut over those of `dp_shard`."""

    def __init__(
        self,
        module: nn.Module,
        masters: Mapping[str, nn.Parameter],
        meshes: Meshes,
        shards: int,
        data: DataLayout | None = None,
    ) -> None:
        """`masters` are whole but for tensor parallelism and the experts of other ranks, by the
        names of `module`; they are cut into `shards` parts (`parallel.data.shards_of`), those of
        dealt experts into fewer. `data` has the buckets that graphs gather, if they do. Small
        weights that no dimension cuts into equal parts stay whole."""
        self._meshes = {False: meshes.weights, True: meshes.experts}
        """By whether a weight is one of dealt experts."""
        found = split_weights(module, shards)
        weights = {each.name: each for each in found if each.name in masters}
        self._cut = {name: each for name, each in weights.items() if each.dim is not None}
        self.masters = {name: self._master(weights[name], whole) for name, whole in masters.items()}
        parameters = dict(module.named_parameters())
        self._whole = {name: local(parameters[name]) for name in self._cut}
        gathered = [each for each in (data.buckets if data is not None else ()) if each.sharded]
        self._buckets = {
            each.index: each for each in gathered if any(w.name in self for w in each.weights)
        }
        """Those that graphs gather and that this rank has a master in."""
        self.flat = {each.index: self._packed(each, parameters) for each in gathered}
        """This rank's parts of a bucket one behind the other, in the type that graphs compute
        with; of other stages too, until `free_others`, as operators are timed on the whole
        model."""

    def __contains__(self, name: str) -> bool:
        """Whether this rank has only a part of that master."""
        return name in self._cut

    def _master(self, weight: Weight, whole: nn.Parameter) -> nn.Parameter:
        over = whole.placements if isinstance(whole, DTensor) else None
        part = local(whole)
        if weight.name in self:  # a view would keep the whole weight's memory
            part = self._view(weight, part).clone(memory_format=torch.contiguous_format)
        layout = placements_of(weight, over)
        return nn.Parameter(laid_out(part, self._mesh(weight), layout, whole, weight.dealt))

    def _mesh(self, weight: Weight) -> DeviceMesh:
        mesh = self._meshes[weight.dealt > 1]
        assert mesh is not None
        return mesh

    def gradient(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a gradient: a view where it is cut along its first dimension, else a
        copy, because fused AdamW takes a gradient on a CPU to lie in memory as its parameter."""
        return self._view(self._cut[name], whole).contiguous() if name in self else whole

    def _view(self, weight: Weight, whole: Tensor) -> Tensor:
        return cut(weight, whole, self._mesh(weight).get_local_rank(SHARD_AXIS))

    def _packed(self, bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        parts = [self._view(each, local(parameters[each.name])) for each in bucket.weights]
        return torch.cat([part.reshape(-1) for part in parts])

    def free_whole(self) -> None:
        """Give back the memory of whole weights that graphs gather."""
        for bucket in self._buckets.values():
            for weight in bucket.weights:
                if weight.name in self:
                    self._whole[weight.name].untyped_storage().resize_(0)

    def free_others(self) -> None:
        """Give back the parts of buckets of other stages."""
        for index, flat in self.flat.items():
            if index not in self._buckets:
                flat.untyped_storage().resize_(0)

    @torch.no_grad()
    def publish(self) -> None:
        """Make new masters what graphs compute with, rounded to its type: in the flat parts that
        they gather, or gathered into the module's parameters. Collective."""
        for index, bucket in self._buckets.items():
            for name, part in views(bucket, self.flat[index]).items():
                if name in self:
                    part.copy_(local(self.masters[name]))
        if not self._buckets:
            self._gather()

    def _gather(self) -> None:
        alike: dict[tuple[torch.dtype, bool], list[Weight]] = {}
        for name, weight in self._cut.items():
            alike.setdefault((self._whole[name].dtype, weight.dealt > 1), []).append(weight)
        for (dtype, _), weights in alike.items():
            parts = [local(self.masters[weight.name]).reshape(-1).to(dtype) for weight in weights]
            own, ranks = torch.cat(parts), weights[0].ranks
            gathered = own.new_empty(ranks * own.numel())
            group = self._mesh(weights[0]).get_group(SHARD_AXIS)
            dist.all_gather_into_tensor(gathered, own, group=group)
            shapes = [weight.part for weight in weights]
            sizes = [prod(shape) for shape in shapes]
            for rank, flat in enumerate(gathered.view(ranks, -1)):
                for weight, shape, piece in zip(weights, shapes, flat.split(sizes), strict=True):
                    whole = self._whole[weight.name]
                    cut(weight, whole, rank).copy_(piece.view(shape))
