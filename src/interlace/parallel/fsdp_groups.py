"""How the weights of a module under FSDP2's `fully_shard` lie over its data-parallel ranks.

A weight is cut along one dimension (the first, unless the user chose another) into parts of equal
size, of which the last ones are filled up with zeros; a rank holds its part as a flat tensor. The
weights of one call of `fully_shard` are a group: they travel together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from interlace.parallel.data import Axis


@dataclass(frozen=True, eq=False)
class GroupWeight:
    """One weight, as this rank computes with it: whole but for tensor parallelism."""

    names: tuple[str, ...]
    """In the traced module; several if it is tied."""
    shape: tuple[int, ...]
    dim: int
    """The dimension that is cut."""
    part: tuple[int, ...]
    """The shape of a rank's part, filled up."""
    own: tuple[int, ...]
    """The shape of this rank's part without what fills it up."""
    own_stride: tuple[int, ...]
    tensor: tuple[DeviceMesh, tuple[Placement, ...]] | None
    """Its layout over tensor-parallel ranks; None for a plain one."""
    early_dtype: torch.dtype | None
    """What its gradient is converted to before tensor-parallel ranks add it up; None for its own
    type (FSDP2 before torch 2.15, and what is not added up)."""
    keeps_wide: bool
    """Whether its gradient stays wider than the weight where an operator gave it so; else autograd
    rounds it to the weight's type (FSDP2 before torch 2.15)."""
    shard: Callable[[], Tensor]
    """This rank's part, flat and filled up: the memory of the parameter as it is now."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def part_elements(self) -> int:
        """Of a rank's part, with what fills it up."""
        return prod(self.part)


@dataclass(frozen=True, eq=False)
class WeightGroup:
    """Weights that travel together."""

    index: int
    weights: tuple[GroupWeight, ...]
    shard: Axis
    """The ranks over which they are cut."""
    replicate: Axis
    """Those that hold the same parts."""
    compute_dtype: torch.dtype | None
    """What they are rounded to before they are gathered; None if they are not."""
    reduce_dtype: torch.dtype | None
    """What gradients are summed in over ranks; None for their own type."""
    keeps: bool
    """Whether a backward takes the whole weights of its forward, not gathered again."""

    def shard_key(self, weight: GroupWeight) -> tuple[str, str]:
        """(role, target) of a weight's part as an input of graphs."""
        return "shard", f"{self.index}.{self.weights.index(weight)}"

    @property
    def sum_key(self) -> tuple[str, str]:
        """(role, target) of the sums of its gradients as an input of graphs."""
        return "shard_gradient", str(self.index)


@dataclass(frozen=True, eq=False)
class WeightGroups:
    """All weights of a module under `fully_shard`."""

    groups: tuple[WeightGroup, ...]
    divisor: float
    """By which sums of gradients over ranks with other data are divided: usually their number."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes on which they are."""
        first = self.groups[0]
        return first.shard, first.replicate

    @property
    def names(self) -> frozenset[str]:
        """All names of their weights."""
        return frozenset(self.early_dtypes)

    @property
    def early_dtypes(self) -> dict[str, torch.dtype | None]:
        """By all names of their weights: what gradients are before they are added up outside."""
        return {n: w.early_dtype for g in self.groups for w in g.weights for n in w.names}

    @property
    def kept_wide(self) -> frozenset[str]:
        """All names of the weights whose gradients are not rounded to the weight's type."""
        every = (w for g in self.groups for w in g.weights)
        return frozenset(n for w in every if w.keeps_wide for n in w.names)
