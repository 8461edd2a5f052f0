"""Layers whose tensor + sequence parallel form is not a DTensor style of PyTorch.

Each takes the place of a plain layer, under the same parameter names, and works on local tensors.
A parameter that every rank holds whole, and of whose gradient each rank computes a part, gets a
gradient with the placement `Partial`, which is summed once a step.

In a layer of experts every rank routes, and computes a slice. All tensor-parallel ranks see the
same tokens, choose the same experts and exchange the same counts; each computes its part of the
inner width of every expert, so that results are partial sums. So is every gradient inside, that of
the router too: backward is linear in the gradient that it is given. The layer runs on plain tensors
from the gathered sequence to the scattered sum.
"""

from collections.abc import Collection
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from interlace.parallel.local_parts import lay_out, specialise
from interlace.parallel.own_buffers import copy_marks, mark_own

SEQUENCE_DIM = 0
"""Dimension of an activation along which the sequence lies, as in [S, B, D]."""


def _distribute(weight: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    laid_out = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(laid_out)


def _sum_scatter(partial_SBD: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks of [S, B, D], of which each rank gets its part of the sequence."""
    whole = DTensor.from_local(partial_SBD, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local()


def _shard(parameter: Tensor) -> Tensor:
    """This rank's part of a sharded parameter."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _copy(parameter: Tensor) -> Tensor:
    """A parameter that all ranks hold; this rank adds a part to its gradient."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()])


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are split over ranks: each rank looks up its own tokens.

    DTensor's own row-wise embedding gives a gradient of the full table on every rank; here the
    gradient is of the rank's rows only.
    """

    def __init__(self, table: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = _distribute(table.weight, mesh, Shard(0))

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """[S, B] -> this rank's part of the sequence, [S / ranks, B, D]."""
        rows = _shard(self.weight)
        local_SB = tokens_SB - self.mesh.get_local_rank() * rows.shape[0]
        foreign_SB = (local_SB < 0) | (local_SB >= rows.shape[0])
        x_SBD = F.embedding(local_SB.masked_fill(foreign_SB, 0), rows)
        return _sum_scatter(x_SBD.masked_fill(foreign_SB.unsqueeze(-1), 0), self.mesh)


class SequencePositions(nn.Module):
    """Learned positions for a rank's part of the sequence. Every rank holds the whole table."""

    index: Tensor

    def __init__(self, positions: nn.Module, mesh: DeviceMesh) -> None:
        """`positions` has the table `weight` and the buffer `index`, the rows it adds."""
        super().__init__()
        index_S, weight = positions.get_buffer("index"), positions.get_parameter("weight")
        part = index_S.chunk(mesh.size())[mesh.get_local_rank()]
        self.register_buffer("index", part.clone(), persistent=False)
        self.weight = _distribute(weight, mesh, Replicate())
        copy_marks(positions, self)
        mark_own(self, mesh)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S / ranks, B, D] -> [S / ranks, B, D]."""
        return x_SBD + F.embedding(self.index, _copy(self.weight)).unsqueeze(1)


class BiasedRow(nn.Module):
    """A linear layer with split input features whose bias is added once, after the sum over ranks.

    Every rank adds the bias to its own part of the sequence.
    """

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = _distribute(linear.weight, mesh, Shard(1))
        self.bias = _distribute(linear.bias, mesh, Replicate())

    def forward(self, x_SBF: Tensor) -> Tensor:
        """[S, B, F / ranks] -> [S / ranks, B, D]."""
        partial_SBD = F.linear(x_SBF, _shard(self.weight))
        return _sum_scatter(partial_SBD, self.mesh) + _copy(self.bias)


class SharedHeads(nn.Module):
    """The projection to fewer key or value heads than ranks: each rank computes one head.

    A head is computed alike by ranks / heads neighbours, those whose query heads it serves. Every
    rank holds the whole weight, so that it is one parameter like any other; of its gradient a
    rank computes the rows of its head.
    """

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, head_size: int) -> None:
        super().__init__()
        heads = linear.out_features // head_size
        self.first = mesh.get_local_rank() * heads // mesh.size() * head_size
        self.head_size = head_size
        self.weight = _distribute(linear.weight, mesh, Replicate())
        self.bias = _distribute(linear.bias, mesh, Replicate()) if linear.bias is not None else None

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D], whole on every rank -> this rank's head, [S, B, E]."""
        if isinstance(x_SBD, DTensor):
            x_SBD = x_SBD.to_local(grad_placements=[Partial()])
        weight = _copy(self.weight).narrow(0, self.first, self.head_size)
        if self.bias is None:
            return F.linear(x_SBD, weight)
        return F.linear(x_SBD, weight, _copy(self.bias).narrow(0, self.first, self.head_size))


class HeadNorm(nn.Module):
    """RMSNorm of each head of a rank, with one weight for all heads, which every rank holds."""

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        assert norm.eps is not None
        self.eps = norm.eps
        self.weight = _distribute(norm.weight, mesh, Replicate())

    def forward(self, x_SBHE: Tensor) -> Tensor:
        """The same shape."""
        return F.rms_norm(x_SBHE, (x_SBHE.shape[-1],), _copy(self.weight), self.eps)


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
