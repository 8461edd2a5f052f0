"""The model of the bench of experts: a small Llama whose feed-forwards are experts, and its data.

Which experts a token takes is drawn beforehand and comes with the micro-batch, so that the load of
the experts is the same in all ways and from run to run. The router's scores weigh their outputs
and are learned as ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.config import ModelConfig
from interlace.models.experts import Experts
from interlace.models.llama import Attention

ROUTINGS = ("balanced", "skewed")
"""How experts are drawn."""
EXPONENT = 1.0
"""Of Zipf's law in skewed routing: expert e is drawn in proportion to 1 / (e + 1)."""


@dataclass(frozen=True, kw_only=True)
class MoeSize:
    """The model and the step."""

    layers: int
    width: int
    ffn_width: int
    heads: int
    experts: int
    words: int
    batch: int
    length: int
    micro_batches: int
    repeats: int
    """Steps of each way that are timed."""
    recorded: int
    """Steps of each of our ways that are recorded."""
    per_token: int = 2
    ranks: int = 2
    flops_per_s: float = 0.0
    """Of emulated compute: matmuls and attention sleep. 0: they are computed."""
    routings: Sequence[str] = ROUTINGS
    """A case each."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch of one rank."""
        return self.batch * self.length


MakeExperts = Callable[[int, int, int], nn.Module]
"""(count, width, inner width) -> experts of a layer, `(x_ND, ids_NK, gates_NK) -> [N, D]`."""


class MoeBlock(nn.Module):
    """Pre-norm attention and experts, each added to the residual stream."""

    def __init__(self, size: MoeSize, make_experts: MakeExperts) -> None:
        super().__init__()
        config = ModelConfig(
            layers=size.layers, width=size.width, heads=size.heads, kv_heads=1,
            ffn_width=size.ffn_width,
        )  # fmt: skip
        self.attention_norm, self.experts_norm = (nn.RMSNorm(size.width) for _ in range(2))
        self.attention = Attention(config, size.length)
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = make_experts(size.experts, size.width, size.ffn_width)

    def forward(self, x_SBD: Tensor, ids_NK: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        x_SBD = x_SBD + self.attention(self.attention_norm(x_SBD))
        tokens_ND = self.experts_norm(x_SBD).flatten(0, 1)
        gates_NK = self.router(tokens_ND).softmax(-1).gather(1, ids_NK)
        return x_SBD + self.experts(tokens_ND, ids_NK, gates_NK).view_as(x_SBD)


class MoeLlama(nn.Module):
    """(tokens [B, S], targets [B, S], ids [layers, S B, K]) -> mean cross entropy."""

    def __init__(self, size: MoeSize, make_experts: MakeExperts = Experts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(MoeBlock(size, make_experts) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, ids_LNK: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        x_SBD = self.embedding(tokens_BS.t())
        for number, block in enumerate(self.blocks):
            x_SBD = block(x_SBD, ids_LNK[number])
        logits_SBV = self.head(self.norm(x_SBD))
        return F.cross_entropy(logits_SBV.flatten(0, 1), targets_BS.t().flatten())


def set_weights(model: nn.Module) -> None:
    """Seeded weights, the same for every rank and way; those of experts must be whole."""
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.02, generator=draw)


def micro_batches(size: MoeSize, rank: int, routing: str) -> list[tuple[Tensor, ...]]:
    """What this rank sees in a step: tokens, targets and the experts of every token and layer."""
    draw = torch.Generator().manual_seed(1 + rank)
    shape = (size.batch, size.length)

    def words() -> Tensor:
        return torch.randint(size.words, shape, generator=draw)

    def experts() -> Tensor:
        layers = [_drawn(size, routing, draw) for _ in range(size.layers)]
        return torch.stack(layers)

    return [(words(), words(), experts()) for _ in range(size.micro_batches)]


def _drawn(size: MoeSize, routing: str, draw: torch.Generator) -> Tensor:
    """[N, K]: `balanced` gives every expert equally many rows of each rank; `skewed` draws without
    replacement by Zipf's law."""
    count, each = size.tokens, size.experts
    if routing == "skewed":
        weights = 1.0 / torch.arange(1, each + 1) ** EXPONENT
        return torch.multinomial(weights.expand(count, each), size.per_token, generator=draw)
    rounds = -(-count * size.per_token // each)
    dealt = torch.stack([torch.randperm(each, generator=draw) for _ in range(rounds)])
    ids = dealt.view(-1, size.per_token)[:count]
    return ids[torch.randperm(count, generator=draw)].contiguous()


def imbalance(rows: Tensor) -> float:
    """Largest over mean."""
    return float(rows.max() / rows.double().mean())
