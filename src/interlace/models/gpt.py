"""GPT-2 and GPT-3: LayerNorm, learned positions, GELU, biases (Radford 2019, arXiv 2005.14165).

Letters: S sequence, B micro-batch, D width, H query heads, K key/value heads, E head size,
F feed-forward width, V vocabulary. Under tensor parallelism H, K, F and V are a rank's share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.config import ModelConfig
from interlace.models.attention import CausalAttention

TENSOR_PLAN = {
    "embedding": "vocabulary_embedding",
    "positions": "sequence_positions",
    "blocks.*.attention_norm": "sequence_norm",
    "blocks.*.attention": "gather_input",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "key_value",
    "blocks.*.attention.value": "key_value",
    "blocks.*.attention.output": "row",
    "blocks.*.ffn_norm": "sequence_norm",
    "blocks.*.ffn": "gather_input",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
    "norm": "sequence_norm",
    "head": "vocabulary_head",
}
"""Role of each sub-module of a GPT under tensor + sequence parallelism, by pattern of names (roles:
`interlace.parallel.tensor`)."""
CONTEXT_PLAN = {"blocks.*.attention.core": "attention", "positions": "positions"}
"""Role of each sub-module of a GPT under context parallelism (roles:
`interlace.parallel.context`)."""


class LearnedPositions(nn.Module):
    """Adds a vector of its own to each position.

    The rows that are added are those in the buffer `index`: a rank that holds part of each
    sequence keeps the whole table, and the index of its part.
    """

    index: Tensor

    def __init__(self, sequence_length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sequence_length, width))
        self.register_buffer("index", torch.arange(sequence_length), persistent=False)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        return x_SBD + F.embedding(self.index[: x_SBD.shape[0]], self.weight).unsqueeze(1)


class Attention(nn.Module):
    """Causal self-attention with biases; K may be smaller than H."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        kv_width = config.kv_heads * self.head_size
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, kv_width)
        self.value = nn.Linear(config.width, kv_width)
        self.output = nn.Linear(config.width, config.width)
        self.core = CausalAttention()

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        length, batch, _ = x_SBD.shape
        shape = (length, batch, -1, self.head_size)
        q_SBHE = self.query(x_SBD).view(shape)
        k_SBKE = self.key(x_SBD).view(shape)
        v_SBKE = self.value(x_SBD).view(shape)
        mixed_SBHE = self.core(q_SBHE, k_SBKE, v_SBKE)
        return self.output(mixed_SBHE.reshape(length, batch, -1))


class FeedForward(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        return self.down(F.gelu(self.up(x_SBD), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        # Dropout of probability 0 would still be an operator.
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        x_SBD = x_SBD + self.dropout(self.attention(self.attention_norm(x_SBD)))
        return x_SBD + self.dropout(self.ffn(self.ffn_norm(x_SBD)))


class GPT(nn.Module):
    """Tokens [B, S] -> logits [S, B, V]."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.positions = LearnedPositions(sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        self._initialise(config)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def _initialise(self, config: ModelConfig) -> None:
        # As in Llama: projections back into the residual stream are scaled by 1/sqrt(2 layers).
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
                std = 0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits [S, B, V] of the next token at each position."""
        x_SBD = self.positions(self.embedding(tokens_BS.t()))
        for block in self.blocks:
            x_SBD = block(x_SBD)
        return self.head(self.norm(x_SBD))


def build(config: ModelConfig, vocab_size: int, sequence_length: int) -> GPT:
    """A GPT with fresh weights; it has `sequence_length` learned positions."""
    return GPT(config, vocab_size, sequence_length)
