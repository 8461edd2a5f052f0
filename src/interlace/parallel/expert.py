"""Expert parallelism: the experts of a layer are dealt to ranks that see different tokens.

Ranks of the axis `ep` are data-parallel ranks in a row. Each holds E / R experts, gets the rows
that all of them have routed to these, and sends the results back. The other ranks that hold the
same experts are their data-parallel ranks (GShard, arXiv 2006.16668; DeepSpeed-MoE, 2201.05596).
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError
from interlace.experts.between_ranks import (
    host_counts,
    received_counts,
    sends_back,
    sends_to_ranks,
    to_experts,
    to_tokens,
)
from interlace.models.experts import ExpertLayer, RowExchange
from interlace.parallel.published_experts import adopt_published_experts


class BetweenRanks(RowExchange):
    """Rows go to the rank of their expert, and back."""

    def __init__(
        self, mesh: DeviceMesh, counts: dist.ProcessGroup | None = None, *, merged: bool = False
    ) -> None:
        super().__init__()
        self.merged = merged
        self.mesh = mesh
        self.ranks, self.group = mesh.size(), str(mesh.get_group().group_name)
        self.counts_group = self.group if counts is None else str(counts.group_name)

    def counts(self, sent_E: Tensor) -> Tensor:
        """As in `RowExchange`; ranks tell each other first."""
        return host_counts(sent_E, received_counts(sent_E, self.ranks, self.counts_group))

    def to_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As in `RowExchange`, of all ranks."""
        return to_experts(rows, counts, self.ranks, self.group)

    def sends_to_ranks(self, sends: Tensor, merged: Tensor) -> Tensor:
        """As in `RowExchange`, of all ranks."""
        return sends_to_ranks(sends, merged, self.ranks, self.group)

    def sends_back(self, sends: Tensor, merged: Tensor) -> Tensor:
        """As in `RowExchange`, to the ranks that they came from."""
        return sends_back(sends, merged, self.ranks, self.group)

    def to_tokens(self, rows: Tensor, counts: Tensor, token_rows: int) -> Tensor:
        """As in `RowExchange`, to the ranks that they came from."""
        return to_tokens(rows, counts, self.ranks, token_rows, self.group)


def apply_expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    counts: dist.ProcessGroup | None = None,
    *,
    merged: bool = False,
) -> None:
    """Deal the experts of all layers of `model` to the ranks of a one-dimensional mesh, in place.
    Every rank must hold equal weights, plain tensors. `counts`, another group of the same ranks,
    is for the counts of rows: on the group of `mesh` they wait for the rows of the other strand.
    With `merged` a token is sent once to each rank, however many of its experts are there.
    A model of `transformers` is dealt by the plan that it publishes (`published_experts`).

    Raises InputError for a model without experts, and for a number that the ranks do not divide.
    """
    ranks = mesh.size()
    if ranks == 1:
        return
    adopt_published_experts(model)
    found = list(_layers(model))
    if not found:
        raise InputError(
            f"parallel.expert = {ranks}, and {type(model).__name__} has no experts",
            hint="set parallel.expert to 1, or choose a mixture-of-experts model",
        )
    for name, layer in found:
        if layer.count % ranks:
            raise InputError(
                f"the {layer.count} experts of {name or 'the model'} cannot be dealt to "
                f"parallel.expert = {ranks} ranks",
                hint="set parallel.expert to a divisor of the number of experts",
            )
        for own, weight in list(layer.named_parameters()):
            part = weight.detach().chunk(ranks)[mesh.get_local_rank()].clone()
            setattr(layer, own, nn.Parameter(part, requires_grad=weight.requires_grad))
        layer.exchange = BetweenRanks(mesh, counts, merged=merged)


def dealt_parameters(model: nn.Module) -> dict[str, int]:
    """The parameters of which a rank holds its experts' part along dimension 0, by name, and over
    how many ranks they are dealt."""
    return {
        f"{name}.{own}" if name else own: layer.exchange.ranks
        for name, layer in _layers(model)
        if layer.exchange.ranks > 1
        for own, _ in layer.named_parameters()
    }


def dealt_over(model: nn.Module) -> dict[str, DeviceMesh]:
    """The ranks over which experts are dealt, by the name of their process group."""
    exchanges = [layer.exchange for _, layer in _layers(model)]
    return {each.group: each.mesh for each in exchanges if isinstance(each, BetweenRanks)}


def _layers(model: nn.Module) -> Iterator[tuple[str, ExpertLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, ExpertLayer):
            yield name, module
