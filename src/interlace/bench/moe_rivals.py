"""Experts as a user of plain PyTorch writes them today: autograd, and nothing of this package.

Ranks exchange counts, read them, exchange rows by an all-to-all with a gradient, as Megatron-LM has
it, and run a matmul for each expert. Gradients add up in `param.grad`, and those of weights that
all ranks hold are averaged once a step, as one buffer.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class _AllToAll(Function):
    """Rows to all ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arriving: list[int], leaving: list[int]) -> Tensor:
        ctx.sizes = arriving, leaving
        out = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), arriving, leaving)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        arriving, leaving = ctx.sizes
        out = gradient.new_empty(sum(leaving), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), leaving, arriving)
        return out, None, None


class EagerExperts(nn.Module):
    """This rank's experts of a layer, between an exchange of rows and another."""

    def __init__(self, count: int, width: int, ffn_width: int) -> None:
        super().__init__()
        self.count = count
        self.gate = nn.Parameter(torch.empty(count, ffn_width, width))
        self.up = nn.Parameter(torch.empty(count, ffn_width, width))
        self.down = nn.Parameter(torch.empty(count, width, ffn_width))

    def deal(self) -> None:
        """Keep the weights of this rank's experts."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(weight.detach().chunk(ranks)[rank].clone()))

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """[N, D], and experts and weights of each token [N, K]: the weighted sum of outputs."""
        ranks = dist.get_world_size()
        own, per_token = self.count // ranks, ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        sent = torch.bincount(ids.flatten(), minlength=self.count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        to_rank = sent.view(ranks, own).sum(1).tolist()
        from_rank = received.view(ranks, own).sum(1).tolist()

        rows = x[order // per_token]
        arrived = _AllToAll.apply(rows, from_rank, to_rank)
        expert = torch.arange(own).repeat(ranks).repeat_interleave(received)
        by_expert = expert.argsort(stable=True)
        counts = received.view(ranks, own).sum(0).tolist()
        outputs = [
            self._expert(number, part)
            for number, part in enumerate(arrived[by_expert].split(counts))
        ]
        done = torch.cat(outputs)[by_expert.argsort()]
        back = _AllToAll.apply(done, to_rank, from_rank)
        of_tokens = back[order.argsort()].view(*ids.shape, -1)
        return (of_tokens * gates.unsqueeze(2)).sum(1)

    def _expert(self, number: int, rows: Tensor) -> Tensor:
        inner = F.silu(F.linear(rows, self.gate[number])) * F.linear(rows, self.up[number])
        return F.linear(inner, self.down[number])


def deal_experts(model: nn.Module) -> None:
    """Keep this rank's part of all layers' experts."""
    for module in model.modules():
        if isinstance(module, EagerExperts):
            module.deal()


def eager_step(model: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> None:
    """Forward and backward of each micro-batch; gradients are those of the mean over micro-batches
    and ranks."""
    model.zero_grad()
    for batch in batches:
        (model(*batch) / len(batches)).backward()
    experts = {
        id(weight)
        for module in model.modules()
        if isinstance(module, EagerExperts)
        for weight in module.parameters()
    }
    _average([p for p in model.parameters() if id(p) not in experts])
    for weight in model.parameters():
        if id(weight) in experts and weight.grad is not None:
            weight.grad /= dist.get_world_size()


def _average(weights: Iterable[nn.Parameter]) -> None:
    """The mean of their gradients over all ranks, as one buffer."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
