"""Data parallelism: which weights are sharded over data-parallel ranks, and in which buckets.

A weight is cut along one of its dimensions into equal parts, one per rank of the `dp_shard` axis
(ZeRO, arXiv 1910.02054). That dimension is never the one that tensor parallelism cuts, so every
layout is plain `Shard(i)` on each axis. Weights without such a dimension, small vectors most of
all, stay whole, and their gradients are all-reduced. The parts of a bucket lie behind each other
in one flat tensor, which is what a collective moves.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from interlace.config import ParallelConfig
from interlace.parallel.expert import dealt_parameters
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
    """The dimension that is cut over data-parallel ranks; None if it stays whole."""
    ranks: int = 1
    """Into how many parts it is cut."""
    dealt: int = 1
    """Over how many ranks of `ep` experts are dealt, of which this rank has its own ones only."""

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return self.names[0]

    @property
    def elements(self) -> int:
        """Of the whole weight."""
        return prod(self.shape)

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return tuple(n // self.ranks if i == self.dim else n for i, n in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights of one layer that travel together; all of them sharded, or all whole."""

    index: int
    weights: tuple[Weight, ...]
    sharded: bool
    shard: "Axis"
    """The ranks over which its weights are cut, or gradients of whole ones summed first."""
    replicate: "Axis"
    """Those that hold the same parts."""

    @property
    def elements(self) -> int:
        """Of all weights, whole."""
        return sum(weight.elements for weight in self.weights)

    @property
    def axes(self) -> tuple["Axis", ...]:
        """The axes over which all-reduce sums its gradients. Those of a sharded bucket have been
        summed over `shard` before, by reduce-scatter."""
        found = (self.replicate,) if self.sharded else (self.shard, self.replicate)
        return tuple(axis for axis in found if axis.size > 1)

    @property
    def dealt(self) -> bool:
        """Whether it holds weights of experts, which are dealt to ranks."""
        return any(weight.dealt > 1 for weight in self.weights)


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
    ranks: int
    """Ranks that see other tokens, over which gradients are averaged. All of them have added to
    those of experts, which came from all ranks of `ep` and are summed over the others."""
    zero: int
    reduce_each: bool
    """Gradients of sharded weights are reduced after each micro-batch, not once a step."""
    reduce_dtype: torch.dtype

    @property
    def gathers_each(self) -> bool:
        """Sharded weights are gathered in each forward and each backward."""
        return self.zero == 3 and any(bucket.sharded for bucket in self.buckets)


def data_layout(
    module: nn.Module, config: ParallelConfig, meshes: Meshes, reduce_dtype: torch.dtype
) -> DataLayout | None:
    """The layout of the parameters of `module`; None where no other rank shares them."""
    ways = {False: _ways(meshes.weights)}
    ranks = prod(axis.size for axis in ways[False])
    if ranks == 1:
        return None
    if meshes.experts is not None:
        ways[True] = _ways(meshes.experts)
    weights = split_weights(module, shards_of(config))
    return DataLayout(
        buckets=_buckets(weights, ways, config.bucket_mib * 2**20 / _item_bytes(module)),
        ranks=ranks,
        zero=config.zero,
        reduce_each=config.reduce == "micro_batch",
        reduce_dtype=reduce_dtype,
    )


def _ways(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """Over which ranks weights on a mesh are sharded and replicated."""
    shard, replicate = (
        Axis(str(mesh.get_group(name).group_name), mesh[name].size())
        for name in (SHARD_AXIS, REPLICATE_AXIS)
    )
    return shard, replicate


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


def split_weights(module: nn.Module, shards: int) -> list[Weight]:
    """All parameters of `module`, and how each is cut into `shards` equal parts; those of experts,
    which are dealt to some of these ranks, into so many fewer."""
    dealt = dealt_parameters(module)
    found = []
    for names, parameter in _parameters(module):
        over = dealt.get(names[0], 1)
        found.append(_weight(names, parameter, max(1, shards // over), over))
    return found


def replicated_layout(
    module: nn.Module,
    replicas: Axis,
    reduce_dtype: torch.dtype,
    *,
    experts: Axis = Axis("", 1),
    bucket_mib: float,
) -> DataLayout:
    """The layout of parameters that are whole on all `replicas`, and on the ranks `experts`, of
    which each has its own experts; on any mesh of other axes."""
    dealt = dealt_parameters(module)
    weights = [
        Weight(
            names, tuple((p.to_local() if isinstance(p, DTensor) else p).shape), None,
            dealt=dealt.get(names[0], 1),
        )
        for names, p in _parameters(module)
    ]  # fmt: skip
    ways = {False: (experts, replicas), True: (Axis("", 1), replicas)}
    return DataLayout(
        buckets=_buckets(weights, ways, bucket_mib * 2**20 / _item_bytes(module)),
        ranks=replicas.size * experts.size,
        zero=1,
        reduce_each=False,
        reduce_dtype=reduce_dtype,
    )


def placements_of(weight: Weight, tensor: Sequence[Placement] | None) -> tuple[Placement, ...]:
    """On the mesh `Meshes.weights`, or `Meshes.experts`: how a weight's part lies, `tensor` being
    its layout over the tensor-parallel ranks (None: every one has all of it)."""
    own = Replicate() if weight.dim is None else Shard(weight.dim)
    dealt = (Shard(0),) if weight.dealt > 1 else ()
    return (Replicate(), own, *dealt, tensor[0] if tensor else Replicate())


def cut(weight: Weight, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a whole weight, as a view."""
    if weight.dim is None:
        return whole
    return whole.chunk(weight.ranks, dim=weight.dim)[rank]


def views(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """The parts in a bucket's flat tensor, by name."""
    sizes = [prod(weight.part) for weight in bucket.weights]
    pieces = flat.split(sizes)
    return {
        weight.name: piece.view(weight.part)
        for weight, piece in zip(bucket.weights, pieces, strict=True)
    }


def _item_bytes(module: nn.Module) -> int:
    return next(iter(module.parameters())).element_size()


def _parameters(module: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [(tuple(found), parameter) for parameter, found in names.items()]


def _weight(names: tuple[str, ...], parameter: nn.Parameter, ranks: int, dealt: int) -> Weight:
    taken: set[int] = {0} if dealt > 1 else set()
    part: Tensor = parameter
    if isinstance(parameter, DTensor):
        part = parameter.to_local()
        (placement,) = parameter.placements
        taken |= {placement.dim} if isinstance(placement, Shard) else set()
    shape = tuple(part.shape)
    free = [i for i, n in enumerate(shape) if i not in taken and n % ranks == 0]
    if ranks == 1 or not free:
        return Weight(names, shape, None, dealt=dealt)
    return Weight(names, shape, free[0], ranks, dealt)


def _buckets(
    weights: Sequence[Weight], ways: Mapping[bool, tuple[Axis, Axis]], most_elements: float
) -> tuple[Bucket, ...]:
    """`ways` are the axes of a bucket, by whether its weights are those of dealt experts."""
    buckets: list[Bucket] = []
    open_: dict[tuple[bool, bool], tuple[str, list[Weight]]] = {}

    def close(kind: tuple[bool, bool]) -> None:
        _, held = open_.pop(kind)
        buckets.append(Bucket(len(buckets), tuple(held), kind[0], *ways[kind[1]]))

    for weight in weights:
        kind, layer = (weight.dim is not None, weight.dealt > 1), _layer(weight.name)
        if kind in open_:
            first, held = open_[kind]
            if first != layer or sum(w.elements for w in held) + weight.elements > most_elements:
                close(kind)
        open_.setdefault(kind, (layer, []))[1].append(weight)
    for kind in list(open_):
        close(kind)
    return tuple(buckets)


def _layer(name: str) -> str:
    """`model.blocks.3` of `model.blocks.3.ffn.up.weight`; the module's name outside of layers."""
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]
