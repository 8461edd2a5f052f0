"""A layer of experts under tensor + sequence parallelism: every rank routes, and computes a slice.

All tensor-parallel ranks see the same tokens, choose the same experts and exchange the same counts;
each computes its part of the inner width of every expert, so that results are partial sums. So is
every gradient inside, that of the router too: backward is linear in the gradient that it is given.
The layer runs on plain tensors from the gathered sequence to the scattered sum.
"""

from collections.abc import Collection
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from interlace.parallel.local_parts import lay_out, specialise
from interlace.parallel.tensor_layers import SEQUENCE_DIM


def has_experts(layer: nn.Module) -> bool:
    """Whether a feed-forward says how it is cut itself, as a layer of experts does."""
    return hasattr(layer, "tensor_shards")


def split_experts(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Lay a layer out over a one-dimensional mesh, in place; it gets its part of the sequence, and
    gives that.

    `layer.tensor_shards` says along which dimension parameters are cut, by name; the others are
    whole on every rank. Its forward takes x [S, B, D] and gives a named tuple with field `x`;
    floating fields beside it are computed alike on every rank.
    """
    shards = cast("dict[str, int]", layer.tensor_shards)
    whole = {name for name, _ in layer.named_parameters()} - shards.keys()
    lay_out(layer, mesh, shards, whole)
    specialise(layer, (), {"forward": _forward(type(layer).forward, mesh)})


def _forward(inside: Any, mesh: DeviceMesh) -> Any:
    sequence = (Shard(SEQUENCE_DIM),)

    def forward(layer: nn.Module, x_SBD: Tensor) -> Any:
        if not isinstance(x_SBD, DTensor):
            x_SBD = DTensor.from_local(x_SBD, mesh, sequence, run_check=False)
        gathered = x_SBD.redistribute(placements=(Replicate(),))
        found = inside(layer, gathered.to_local(grad_placements=(Partial(),)))
        partial = DTensor.from_local(found.x, mesh, (Partial(),), run_check=False)
        own = partial.redistribute(placements=sequence).to_local()
        return found._replace(x=own, **_alike(found, {"x"}, mesh.size()))

    return forward


def _alike(found: Any, but: Collection[str], ranks: int) -> dict[str, Tensor]:
    """The other fields, as they are. Every rank gives a gradient to what all of them computed, and
    all are summed, so each counts for its share."""
    fields = {name: getattr(found, name) for name in found._fields if name not in but}
    return {
        name: x.detach() + (x - x.detach()) / ranks
        for name, x in fields.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
