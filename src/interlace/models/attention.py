"""Attention between projected heads: the part of a model that context parallelism replaces."""

import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Each position attends to itself and to all before it. Holds no weights.

    Letters: S sequence, B micro-batch, H query heads, K key/value heads (a divisor of H: each
    serves H / K query heads in a row), E head size.
    """

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
        """Scores are scaled by 1 / sqrt(E). Returns [S, B, H, E]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBHE, k_SBKE, v_SBKE))
        mixed_BHSE = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed_BHSE.permute(2, 0, 1, 3)
