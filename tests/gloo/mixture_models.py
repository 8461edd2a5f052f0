"""A small mixture-of-experts Llama for tests, and a plain reference that knows no operator of ours.

Routing can be pushed by a buffer: with 0 it is natural; a large number sends all tokens to some
experts, which leaves others, or all experts of a rank, without any.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.models.experts import Experts
from interlace.train.weights import MasterWeights

EXPERTS, PER_TOKEN = 4, 2
ROUTINGS = {
    "natural": (0.0, 0.0, 0.0, 0.0),
    "expert 3 empty": (0.0, 0.0, 0.0, -9.0),
    "half of the ranks empty": (9.0, 9.0, 0.0, 0.0),
    "most to expert 2": (0.0, 0.0, 9.0, 0.0),
}
"""Added to the scores by which experts are chosen."""


class Mixture(nn.Module):
    """A router and its experts, [S, B, D] -> [S, B, D]."""

    def __init__(self, width: int, inner: int, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.push = nn.Buffer(torch.zeros(EXPERTS))
        self.experts = experts

    def forward(self, x_SBD: Tensor) -> Tensor:
        x_ND = x_SBD.flatten(0, 1)
        scores = self.router(x_ND).softmax(-1)
        ids = (scores.detach() + self.push).topk(PER_TOKEN).indices
        return self.experts(x_ND, ids, scores.gather(1, ids)).view_as(x_SBD)


class EveryExpert(nn.Module):
    """The reference: every expert computes every token, and most results are multiplied by 0."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(EXPERTS, inner, width))
        self.up = nn.Parameter(torch.empty(EXPERTS, inner, width))
        self.down = nn.Parameter(torch.empty(EXPERTS, width, inner))

    def forward(self, x_ND: Tensor, ids_NK: Tensor, gates_NK: Tensor) -> Tensor:
        gates = torch.zeros(len(x_ND), EXPERTS, dtype=x_ND.dtype).scatter(1, ids_NK, gates_NK)
        total = torch.zeros_like(x_ND)
        for expert in range(EXPERTS):
            inner = F.silu(x_ND @ self.gate[expert].T) * (x_ND @ self.up[expert].T)
            total = total + gates[:, expert : expert + 1] * (inner @ self.down[expert].T)
        return total


class MixtureLoss(nn.Module):
    """`layers` mixtures between an embedding and a head, and the loss of the next token."""

    def __init__(self, layers: int, width: int, inner: int, *, reference: bool = False) -> None:
        super().__init__()
        made = [
            EveryExpert(width, inner) if reference else Experts(EXPERTS, width, inner)
            for _ in range(layers)
        ]
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Mixture(width, inner, experts) for experts in made)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.mixed = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, 64, bias=False)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2, generator=draw)

    def push(self, routing: str) -> None:
        """Choose a routing of `ROUTINGS`."""
        for block in self.blocks:
            block.push.copy_(torch.tensor(ROUTINGS[routing]))

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_SBD = self.embedding(tokens_BS.t())
        for block, norm, mixed in zip(self.blocks, self.norms, self.mixed, strict=True):
            x_SBD = x_SBD + torch.tanh(mixed(norm(x_SBD)))
            x_SBD = x_SBD + block(x_SBD)
        return F.cross_entropy(self.head(x_SBD).flatten(0, 1), targets_BS.t().flatten())


def gradients_of(weights: MasterWeights) -> dict[str, Tensor]:
    """Whole copies of the masters' gradients, by name. Collective."""
    found = {}
    for name, master in weights.masters.items():
        gradient = master.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = whole.detach().clone()
    return found


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest element of its parameter's."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - want).abs().max() / want.abs().max().clamp(min=1e-30))
        for name, want in wanted.items()
    )
