"""A model in one file: each position sees the mean of what came before, through a wide layer.

Letters: S sequence, B micro-batch, D width, F feed-forward width, V vocabulary. Under tensor
parallelism F and V are a rank's share, and the residual stream is a rank's part of the sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.config import ModelConfig

TENSOR_PLAN = {
    "embedding": "vocabulary_embedding",
    "blocks.*.norm": "sequence_norm",
    "blocks.*.mixer": "gather_input",
    "blocks.*.mixer.up": "column",
    "blocks.*.mixer.down": "row",
    "head": "vocabulary_head",
}
CONTEXT_PLAN: dict[str, str] = {}  # nothing here can run on a part of the sequence


class Mixer(nn.Module):
    """down(gelu(mean over positions so far of up(x)))."""

    count: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)
        count_S11 = torch.arange(1.0, sequence_length + 1)[:, None, None]
        self.register_buffer("count", count_S11, persistent=False)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        mean_SBF = self.up(x_SBD).cumsum(0) / self.count
        return self.down(F.gelu(mean_SBF))


class Block(nn.Module):
    """A mixer added to the residual stream."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mixer = Mixer(config, sequence_length)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        return x_SBD + self.mixer(self.norm(x_SBD))


class RunningMean(nn.Module):
    """Tokens [B, S] -> logits [S, B, V]."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, sequence_length) for _ in range(config.layers))
        self.head = nn.Linear(config.width, vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits [S, B, V] of the next token at each position."""
        x_SBD = self.embedding(tokens_BS.t())
        for block in self.blocks:
            x_SBD = block(x_SBD)
        return self.head(x_SBD)


def build(config: ModelConfig, vocab_size: int, sequence_length: int) -> RunningMean:
    """The model with fresh weights; which fields of `config` it reads is its own affair."""
    return RunningMean(config, vocab_size, sequence_length)
