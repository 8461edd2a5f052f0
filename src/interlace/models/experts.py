"""The experts of one layer: feed-forwards of which each token meets a few."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """SwiGLU experts without biases; each weight lies as that of `nn.Linear`, (out, in).

    Letters: N tokens, K experts of a token, E experts, D width, F inner width of an expert.
    """

    def __init__(self, count: int, width: int, ffn_width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, ffn_width, width))
        self.up = nn.Parameter(torch.empty(count, ffn_width, width))
        self.down = nn.Parameter(torch.empty(count, width, ffn_width))

    def forward(self, x_ND: Tensor, ids_NK: Tensor, gates_NK: Tensor) -> Tensor:
        """Outputs of each token's experts `ids_NK`, added up by weight: [N, D]."""
        total_ND = torch.zeros_like(x_ND)
        for expert in range(self.gate.shape[0]):
            weight_N = (gates_NK * (ids_NK == expert)).sum(-1)
            inner = F.silu(F.linear(x_ND, self.gate[expert])) * F.linear(x_ND, self.up[expert])
            total_ND = total_ND + weight_N.unsqueeze(-1) * F.linear(inner, self.down[expert])
        return total_ND
