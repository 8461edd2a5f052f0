"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU (arXiv 2302.13971, 2307.09288).

`moe.py` has its attention and its feed-forward too: biases, norms of heads and long rotary
positions are for the models there, and for dense ones of the same families.

Letters: S sequence, B micro-batch, D width, H query heads, K key/value heads, E head size,
F feed-forward width, V vocabulary. Under tensor parallelism H, K, F and V are a rank's share.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.model_config import ModelConfig, head_size_of
from interlace.models.attention import CausalAttention

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
    "blocks.*.ffn": "gather_input",
    "blocks.*.ffn.gate": "column",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
    "norm": "sequence_norm",
    "head": "vocabulary_head",
}
"""Role of each sub-module of a Llama under tensor + sequence parallelism, by pattern of names
(roles: `interlace.parallel.tensor`)."""
CONTEXT_PLAN = {"blocks.*.attention.core": "attention", "blocks.*.attention.rotary": "positions"}
"""Role of each sub-module of a Llama under context parallelism (roles:
`interlace.parallel.context`)."""


def rotary_frequencies(config: ModelConfig, sequence_length: int) -> Tensor:
    """Angle per position of each pair of a head, [E/2] in float64.

    `linear` stretches all of them by a factor (arXiv 2306.15595). `llama3` stretches only those
    that turn too seldom over the original length to be told apart, and blends in between
    (arXiv 2407.21783, and the reference code of Llama 3.1). `long` stretches each by a factor of
    its own, of one list up to the original length and of another beyond it (arXiv 2402.13753).
    """
    head_size = head_size_of(config)
    exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    frequency = config.rope_theta**-exponent
    if config.rope_scaling == "none":
        return frequency
    if config.rope_scaling == "linear":
        return frequency / config.rope_factor
    if config.rope_scaling == "long":
        is_long = sequence_length > config.rope_original_length
        factors = config.rope_long_factors if is_long else config.rope_short_factors
        return frequency / torch.tensor(factors, dtype=torch.float64)
    low, high = config.rope_low_frequency, config.rope_high_frequency
    turns = frequency * config.rope_original_length / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / config.rope_factor)


def rotary_scale(config: ModelConfig, sequence_length: int) -> float:
    """By what rotated queries and keys are multiplied: 1 but for `long`."""
    if config.rope_scaling != "long":
        return 1.0
    is_long = sequence_length > config.rope_original_length
    return config.rope_long_scale if is_long else config.rope_short_scale


class Rotary(nn.Module):
    """Rotates pairs (i, i + E/2) of each head by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        """`sequence_length` is that of whole sequences: `long` chooses by it."""
        super().__init__()
        position = torch.arange(sequence_length, dtype=torch.float64)
        frequency = rotary_frequencies(config, sequence_length)
        angle = torch.outer(position, frequency)[:, None, None, :]
        scale = rotary_scale(config, sequence_length)
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("cos", (scale * angle.cos()).to(wide), persistent=False)
        self.register_buffer("sin", (scale * angle.sin()).to(wide), persistent=False)

    def forward(self, x_SBHE: Tensor) -> Tensor:
        """Same shape and dtype; the rotation itself is done in float32 at least."""
        wide = torch.promote_types(x_SBHE.dtype, torch.float32)
        first, second = x_SBHE.to(wide).chunk(2, dim=-1)
        length = x_SBHE.shape[0]
        cos, sin = self.cos[:length], self.sin[:length]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x_SBHE.dtype)


class Attention(nn.Module):
    """Causal self-attention; K may be smaller than H, and H x E differ from D."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.head_size = head_size_of(config)
        inner, kv_inner = config.heads * self.head_size, config.kv_heads * self.head_size
        bias = config.attention_bias
        self.query = nn.Linear(config.width, inner, bias=bias)
        self.key = nn.Linear(config.width, kv_inner, bias=bias)
        self.value = nn.Linear(config.width, kv_inner, bias=bias)
        self.output = nn.Linear(inner, config.width, bias=bias)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.query_key_norm:
            self.query_norm = nn.RMSNorm(self.head_size, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(self.head_size, eps=config.norm_eps)
        self.rotary = Rotary(config, sequence_length)
        self.core = CausalAttention()

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        length, batch, _ = x_SBD.shape
        shape = (length, batch, -1, self.head_size)
        q_SBHE = self._rotated(self.query(x_SBD).view(shape), self.query_norm)
        k_SBKE = self._rotated(self.key(x_SBD).view(shape), self.key_norm)
        v_SBKE = self.value(x_SBD).view(shape)
        mixed_SBHE = self.core(q_SBHE, k_SBKE, v_SBKE)
        return self.output(mixed_SBHE.reshape(length, batch, -1))

    def _rotated(self, x_SBHE: Tensor, norm: nn.Module | None) -> Tensor:
        return self.rotary(x_SBHE if norm is None else norm(x_SBHE))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn_width, bias=False)
        self.up = nn.Linear(width, ffn_width, bias=False)
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        return self.down(F.silu(self.gate(x_SBD)) * self.up(x_SBD))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, sequence_length)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config.width, config.ffn_width)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        x_SBD = x_SBD + self.attention(self.attention_norm(x_SBD))
        return x_SBD + self.ffn(self.ffn_norm(x_SBD))


class Llama(nn.Module):
    """Tokens [B, S] -> logits [S, B, V]."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, sequence_length) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        self._initialise(config)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def _initialise(self, config: ModelConfig) -> None:
        # Projections back into the residual stream are scaled by 1/sqrt(2 layers), so that its
        # variance does not grow with depth (GPT-2, section 2.3).
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
            std = 0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits [S, B, V] of the next token at each position."""
        x_SBD = self.embedding(tokens_BS.t())
        for block in self.blocks:
            x_SBD = block(x_SBD)
        return self.head(self.norm(x_SBD))


def build(config: ModelConfig, vocab_size: int, sequence_length: int) -> Llama:
    """A Llama with fresh weights."""
    return Llama(config, vocab_size, sequence_length)
