"""Mixture of experts: blocks of Llama's kind whose feed-forward is a choice of experts.

One file for Mixtral, Qwen3-MoE, Phi-3.5-MoE and models like DeepSeek-V3: they differ in norms,
biases, rotary positions and routers, which `[model]` and `[model.experts]` set. What is like
DeepSeek-V3 here has ordinary attention with grouped queries, not the latent attention of that one.

Letters: S sequence, B micro-batch, D width, H query heads, K key/value heads, E experts (of heads
in `attention`: their size), L layers with experts, N = S x B tokens, V vocabulary. Under tensor
parallelism H, K, V and the inner widths are a rank's share.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from interlace.model_config import ModelConfig, expert_width_of
from interlace.models.experts import Experts
from interlace.models.llama import CONTEXT_PLAN, Attention, FeedForward
from interlace.models.routers import Router, auxiliary_loss, capacity, dropped

__all__ = ["CONTEXT_PLAN", "TENSOR_PLAN", "build"]

TENSOR_PLAN = {
    "embedding": "vocabulary_embedding",
    "blocks.*.attention_norm": "sequence_norm",
    "blocks.*.attention": "gather_input",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "key_value",
    "blocks.*.attention.value": "key_value",
    "blocks.*.attention.query_norm?": "head_norm",
    "blocks.*.attention.key_norm?": "head_norm",
    "blocks.*.attention.output": "row",
    "blocks.*.ffn_norm": "sequence_norm",
    "blocks.*.ffn": "feed_forward",
    "blocks.*.ffn.gate?": "column",
    "blocks.*.ffn.up?": "column",
    "blocks.*.ffn.down?": "row",
    "norm": "sequence_norm",
    "head": "vocabulary_head",
}
"""Role of each sub-module under tensor + sequence parallelism, by pattern of names (roles:
`interlace.parallel.tensor`). `ffn.gate`, `up` and `down` are those of layers without experts."""


class RoutedLogits(NamedTuple):
    """What the model makes of tokens."""

    logits: Tensor
    """Of the next token at each position, [S, B, V]."""
    auxiliary_loss: Tensor | None
    """A scalar (`routers.auxiliary_loss`), not yet multiplied by its weight; None unless
    `experts.balance` is "auxiliary_loss"."""
    load: Tensor
    """Tokens that chose each expert, in all layers together: [E], int64."""
    peak: Tensor
    """The most tokens that chose one expert of one layer, a scalar."""
    dropped: Tensor
    """Choices over the capacity of their expert, in all layers together, a scalar."""
    by_layer: Tensor | None
    """The load of each layer, [L, E], by which biases move; None unless they balance."""


class Routed(NamedTuple):
    """What a layer of experts makes of tokens."""

    x: Tensor
    """[S, B, D]."""
    load: Tensor
    probability: Tensor | None
    """As in `routers.Routing`."""


class ExpertFeedForward(nn.Module):
    """The experts of each token, and a shared feed-forward beside them if there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts = config.experts
        self.router = Router(experts, config.width)
        self.experts = Experts(experts.count, config.width, expert_width_of(config))
        self.shared: FeedForward | None = None
        if experts.shared_width:
            self.shared = FeedForward(config.width, experts.shared_width)

    @property
    def tensor_shards(self) -> dict[str, int]:
        """Along which dimension tensor-parallel ranks cut parameters, by name: inner widths."""
        cut = {"experts.gate": 1, "experts.up": 1, "experts.down": 2}
        if self.shared is not None:
            cut |= {"shared.gate.weight": 0, "shared.up.weight": 0, "shared.down.weight": 1}
        return cut

    def forward(self, x_SBD: Tensor) -> Routed:
        """[S, B, D] -> the same; under tensor parallelism a rank's part of the sequence."""
        x_ND = x_SBD.flatten(0, 1)
        routing = self.router(x_ND)
        y_ND = self.experts(x_ND, routing.ids, routing.gates)
        y_SBD = y_ND.unflatten(0, (-1, x_SBD.shape[1]))
        if self.shared is not None:
            y_SBD = y_SBD + self.shared(x_SBD)
        return Routed(y_SBD, routing.load, routing.probability)


class ExpertBlock(nn.Module):
    """Pre-norm attention and feed-forward, with experts or (`dense`) without, each added to the
    residual stream."""

    def __init__(self, config: ModelConfig, sequence_length: int, *, dense: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, sequence_length)
        self.ffn_norm = _norm(config)
        self.ffn: nn.Module
        if dense:
            self.ffn = FeedForward(config.width, config.ffn_width)
        else:
            self.ffn = ExpertFeedForward(config)

    def forward(self, x_SBD: Tensor) -> Tensor | Routed:
        """[S, B, D] -> the same; a block with experts says their load too."""
        x_SBD = x_SBD + self.attention(self.attention_norm(x_SBD))
        found = self.ffn(self.ffn_norm(x_SBD))
        if isinstance(found, Routed):
            return found._replace(x=x_SBD + found.x)
        return x_SBD + found


class MixtureOfExperts(nn.Module):
    """Tokens [B, S] -> logits [S, B, V] and the load of experts."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        dense, self.experts = config.experts.dense_layers, config.experts
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.blocks = nn.ModuleList(
            ExpertBlock(config, sequence_length, dense=layer < dense)
            for layer in range(config.layers)
        )
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, vocab_size, bias=config.head_bias)
        self._initialise(config)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def _initialise(self, config: ModelConfig) -> None:
        # As in Llama: projections back into the residual stream are scaled by 1/sqrt(2 layers).
        ends = ("attention.output.weight", "down.weight", "experts.down")
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                std = 0.02 / (2 * config.layers) ** 0.5 if name.endswith(ends) else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BS: Tensor) -> RoutedLogits:
        """Logits of the next token at each position, and what balances the experts."""
        x_SBD = self.embedding(tokens_BS.t())
        # Added up block by block, not stacked, so that deep models are traced by a few blocks.
        count, limit = self.experts.count, capacity(self.experts, tokens_BS.numel())
        load_E = torch.zeros(count, dtype=torch.int64, device=tokens_BS.device)
        peak, over, layers = load_E.sum(), load_E.sum(), 0
        probability_E: Tensor | None = None
        loads: list[Tensor] = []
        for block in self.blocks:
            found = block(x_SBD)
            if not isinstance(found, Routed):
                x_SBD = found
                continue
            x_SBD, layers = found.x, layers + 1
            load_E = load_E + found.load
            if self.experts.balance == "bias":
                loads.append(found.load)
            peak = torch.maximum(peak, found.load.max())
            over = over + dropped(found.load, limit)
            if found.probability is not None:
                before = 0.0 if probability_E is None else probability_E
                probability_E = before + found.probability
        loss = None
        if probability_E is not None:
            loss = auxiliary_loss(load_E, probability_E, layers * tokens_BS.numel())
        by_layer = torch.stack(loads) if loads else None
        return RoutedLogits(self.head(self.norm(x_SBD)), loss, load_E, peak, over, by_layer)


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)


def build(config: ModelConfig, vocab_size: int, sequence_length: int) -> MixtureOfExperts:
    """A model with fresh weights; `experts.count` must be above 0 and `experts.dense_layers` below
    `layers` (`interlace.rules`)."""
    return MixtureOfExperts(config, vocab_size, sequence_length)
