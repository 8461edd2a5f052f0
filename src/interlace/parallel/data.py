"""Data parallelism: which weights are sharded over data-parallel ranks, and in which buckets.

A weight is cut along one of its dimensions into equal parts, one per rank of the `dp_shard` axis
(ZeRO, arXiv 1910.02054). That dimension is never the one that tensor parallelism cuts, so every
layout is plain `Shard(i)` on each axis. Weights without such a dimension, small vectors most of
all, stay whole, and their gradients are all-reduced. The parts of a bucket lie behind each other
in one flat tensor, which is what a collective moves.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from interlace.config import ParallelConfig
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS, Meshes

_LAYER = re.compile(r"(.*?\.\d+)\.")
"""Finds the layer that a parameter belongs to: its name up to the first number."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as this rank computes with it: whole but for tensor parallelism."""

    names: tuple[str, ...]
    """The name under which it is stored, then those of parameters that are the same object."""
    shape: tuple[int, ...]
    dim: int | None
    """The dimension that is cut over `dp_shard`; None if it stays whole."""

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return self.names[0]

    @property
    def elements(self) -> int:
        """Of the whole weight."""
        return prod(self.shape)

    def part(self, ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        if self.dim is None:
            return self.shape
        return tuple(n // ranks if i == self.dim else n for i, n in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights of one layer that travel together; all of them sharded, or all whole."""

    index: int
    weights: tuple[Weight, ...]
    sharded: bool

    @property
    def elements(self) -> int:
        """Of all weights, whole."""
        return sum(weight.elements for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis as traced collectives name it."""

    group: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLayout:
    """How the weights of one rank are shared with the data-parallel ranks."""

    buckets: tuple[Bucket, ...]
    """In the order in which parameters are listed; every parameter is in one."""
    shard: Axis
    """`dp_shard`, with `cp` folded in."""
    replicate: Axis
    zero: int
    reduce_each: bool
    """Gradients of sharded weights are reduced after each micro-batch, not once a step."""
    reduce_dtype: torch.dtype

    @property
    def ranks(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.shard.size * self.replicate.size

    @property
    def gathers_each(self) -> bool:
        """Sharded weights are gathered in each forward and each backward."""
        return self.zero == 3 and any(bucket.sharded for bucket in self.buckets)

    def axes(self, bucket: Bucket) -> tuple[Axis, ...]:
        """The axes over which all-reduce sums the gradients of a bucket. Those of a sharded bucket
        have been summed over `shard` before, by reduce-scatter."""
        found = (self.replicate,) if bucket.sharded else (self.shard, self.replicate)
        return tuple(axis for axis in found if axis.size > 1)


def data_layout(
    module: nn.Module, config: ParallelConfig, meshes: Meshes, reduce_dtype: torch.dtype
) -> DataLayout | None:
    """The layout of the parameters of `module`; None where no other rank shares them."""
    axes = {
        name: Axis(str(meshes.weights.get_group(name).group_name), meshes.weights[name].size())
        for name in (SHARD_AXIS, REPLICATE_AXIS)
    }
    if all(axis.size == 1 for axis in axes.values()):
        return None
    weights = split_weights(module, shards_of(config))
    return DataLayout(
        buckets=_buckets(weights, config.bucket_mib * 2**20 / _item_bytes(module)),
        shard=axes[SHARD_AXIS],
        replicate=axes[REPLICATE_AXIS],
        zero=config.zero,
        reduce_each=config.reduce == "micro_batch",
        reduce_dtype=reduce_dtype,
    )


def gathered_in_stage(
    config: ParallelConfig, module: nn.Module, meshes: Meshes
) -> DataLayout | None:
    """The layout of weights that the graphs of a stage of a pipeline gather for each pass; None
    where they do not."""
    if config.pipeline == 1 or config.zero != 3 or shards_of(config) == 1:
        return None
    return data_layout(module, config, meshes, torch.float32)


def shards_of(config: ParallelConfig) -> int:
    """Into how many parts weights are cut. Ranks that only share sequences hold whole weights, as
    if they saw other data."""
    return config.data_shard * config.context if config.data_shard > 1 else 1


def split_weights(module: nn.Module, ranks: int) -> list[Weight]:
    """All parameters of `module`, and how each is cut into `ranks` equal parts."""
    return [_weight(names, parameter, ranks) for names, parameter in _parameters(module)]


def replicated_layout(
    module: nn.Module, replicas: Axis, reduce_dtype: torch.dtype, *, bucket_mib: float
) -> DataLayout:
    """The layout of parameters that are whole on all `replicas`, on any mesh of other axes."""
    weights = [
        Weight(names, tuple((p.to_local() if isinstance(p, DTensor) else p).shape), None)
        for names, p in _parameters(module)
    ]
    return DataLayout(
        buckets=_buckets(weights, bucket_mib * 2**20 / _item_bytes(module)),
        shard=Axis("", 1),
        replicate=replicas,
        zero=1,
        reduce_each=False,
        reduce_dtype=reduce_dtype,
    )


def placements_of(
    weight: Weight, tensor: Sequence[Placement] | None
) -> tuple[Placement, Placement, Placement]:
    """On the mesh `Meshes.weights`: how a weight's part lies, `tensor` being its layout over the
    tensor-parallel ranks (None: every one has all of it)."""
    own = Replicate() if weight.dim is None else Shard(weight.dim)
    return (Replicate(), own, tensor[0] if tensor else Replicate())


def cut(weight: Weight, whole: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's part of a whole weight, as a view."""
    if weight.dim is None:
        return whole
    return whole.chunk(ranks, dim=weight.dim)[rank]


def views(bucket: Bucket, flat: Tensor, ranks: int) -> dict[str, Tensor]:
    """The parts in a bucket's flat tensor, by name."""
    sizes = [prod(weight.part(ranks)) for weight in bucket.weights]
    pieces = flat.split(sizes)
    return {
        weight.name: piece.view(weight.part(ranks))
        for weight, piece in zip(bucket.weights, pieces, strict=True)
    }


def _item_bytes(module: nn.Module) -> int:
    return next(iter(module.parameters())).element_size()


def _parameters(module: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [(tuple(found), parameter) for parameter, found in names.items()]


def _weight(names: tuple[str, ...], parameter: nn.Parameter, ranks: int) -> Weight:
    taken = None
    part: Tensor = parameter
    if isinstance(parameter, DTensor):
        part = parameter.to_local()
        (placement,) = parameter.placements
        taken = placement.dim if isinstance(placement, Shard) else None
    shape = tuple(part.shape)
    free = [i for i, n in enumerate(shape) if i != taken and n % ranks == 0]
    return Weight(names, shape, free[0] if ranks > 1 and free else None)


def _buckets(weights: Sequence[Weight], most_elements: float) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    open_: dict[bool, tuple[str, list[Weight]]] = {}

    def close(sharded: bool) -> None:
        if sharded in open_:
            buckets.append(Bucket(len(buckets), tuple(open_.pop(sharded)[1]), sharded))

    for weight in weights:
        sharded, layer = weight.dim is not None, _layer(weight.name)
        if sharded in open_:
            first, held = open_[sharded]
            if first != layer or sum(w.elements for w in held) + weight.elements > most_elements:
                close(sharded)
        open_.setdefault(sharded, (layer, []))[1].append(weight)
    for sharded in list(open_):
        close(sharded)
    return tuple(buckets)


def _layer(name: str) -> str:
    """`model.blocks.3` of `model.blocks.3.ffn.up.weight`; the module's name outside of layers."""
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]
