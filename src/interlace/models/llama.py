"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU (arXiv 2302.13971, 2307.09288).

Letters: S sequence, B micro-batch, D width, H query heads, K key/value heads, E head size,
F feed-forward width, V vocabulary. Under tensor parallelism H, K, F and V are a rank's share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.config import ModelConfig

TENSOR_PLAN = {
    "embedding": "vocabulary_embedding",
    "blocks.*.attention_norm": "sequence_norm",
    "blocks.*.attention": "gather_input",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.output": "row",
    "blocks.*.ffn_norm": "sequence_norm",
    "blocks.*.ffn": "gather_input",
    "blocks.*.ffn.gate": "column",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
    "norm": "sequence_norm",
    "head": "vocabulary_head",
}


class Rotary(nn.Module):
    """Rotates pairs (i, i + E/2) of each head by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, sequence_length: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        angle = torch.outer(torch.arange(sequence_length, dtype=torch.float64), theta**-exponent)
        angle = angle[:, None, None, :]
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x_SBHE: Tensor) -> Tensor:
        """Same shape and dtype; the rotation itself is done in float32."""
        first, second = x_SBHE.float().chunk(2, dim=-1)
        length = x_SBHE.shape[0]
        cos, sin = self.cos[:length], self.sin[:length]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x_SBHE.dtype)


class Attention(nn.Module):
    """Causal self-attention; K may be smaller than H."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        kv_width = config.kv_heads * self.head_size
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(self.head_size, sequence_length, config.rope_theta)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        length, batch, _ = x_SBD.shape
        shape = (length, batch, -1, self.head_size)
        q_SBHE = self.rotary(self.query(x_SBD).view(shape))
        k_SBKE = self.rotary(self.key(x_SBD).view(shape))
        v_SBKE = self.value(x_SBD).view(shape)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBHE, k_SBKE, v_SBKE))
        mixed_BHSE = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.output(mixed_BHSE.permute(2, 0, 1, 3).reshape(length, batch, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

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
        self.ffn = FeedForward(config)

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
