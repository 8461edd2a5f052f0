"""Routers: which experts each token goes to, and by what its experts' outputs are multiplied.

    softmax       softmax over all experts, of which the largest are chosen (Mixtral, arXiv
                  2401.04088; Qwen3, arXiv 2505.09388; DeepSeekMoE, arXiv 2401.06066)
    sigmoid       a sigmoid of each expert (DeepSeek-V3, arXiv 2412.19437)
    sparse_mixer  two experts, one after the other, each by a softmax over those that come near it
                  (Phi-3.5-MoE; GRIN, arXiv 2409.12136)

`sparse_mixer` takes the largest logits in training too, where GRIN draws an expert at random: its
gradient is that of GRIN for the case that the largest one is drawn.

All shapes follow from those of the tokens, so that routing can be traced. Choices are made on
values without gradient; gradients flow through the gates alone.

Letters: N tokens, D width, E experts, K experts of a token, G groups of experts.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.model_config import ExpertsConfig

_NO_GATE = 1e-20
"""Added to the sum by which gates of `sigmoid` are divided, as DeepSeek-V3 does: it may be 0."""
_JUDGED_BY = 2
"""Experts by which `sigmoid` judges a group: the best two of it, as DeepSeek-V3 does."""


class Routing(NamedTuple):
    """Where the tokens of one layer go."""

    ids: Tensor
    """The experts of each token, all different: [N, K], int64; E, none, where one is over its
    capacity."""
    gates: Tensor
    """Weights of their outputs, [N, K], in the dtype of the tokens; 0 for none."""
    load: Tensor
    """Tokens that chose each expert, dropped ones included: [E], int64."""
    probability: Tensor | None
    """Sum over tokens of the softmax of their logits, [E], in float32 at least; only where an
    auxiliary loss balances."""


class Router(nn.Module):
    """Sends each token to experts; with `balance = "bias"` it has a buffer `bias`, [E], which is
    added to the scores by which experts are chosen and is no part of the gates."""

    bias: Tensor | None

    def __init__(self, config: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.count, width))
        bias = torch.zeros(config.count) if config.balance == "bias" else None
        self.register_buffer("bias", bias)

    def forward(self, x_ND: Tensor) -> Routing:
        """Logits are made in the dtype of the tokens, gates in float32 at least."""
        config, wide = self.config, torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = F.linear(x_ND, self.weight).to(wide)
        if config.router == "sparse_mixer":
            ids_NK, gates_NK = sparse_mixer(logits_NE, config.jitter)
        else:
            ids_NK, gates_NK = best_scores(logits_NE, config, self.bias)
        chosen_NE = torch.zeros_like(logits_NE, dtype=torch.int32).scatter(1, ids_NK, 1)
        gates_NK = gates_NK * config.scale
        if config.capacity_factor:
            limit = capacity(config, x_ND.shape[0])
            ids_NK, gates_NK = within_capacity(ids_NK, gates_NK, chosen_NE, limit)
        balances = config.balance == "auxiliary_loss"
        probability_E = logits_NE.softmax(-1).sum(0) if balances else None
        return Routing(ids_NK, gates_NK.to(x_ND.dtype), chosen_NE.sum(0), probability_E)


def best_scores(
    logits_NE: Tensor, config: ExpertsConfig, bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(ids, gates), [N, K]: the experts of the largest scores, plus `bias_E`, within the groups
    that are kept; the largest first."""
    sigmoid = config.router == "sigmoid"
    scores_NE = logits_NE.sigmoid() if sigmoid else logits_NE.softmax(-1)
    wanted_NE = scores_NE.detach()
    if bias_E is not None:
        wanted_NE = wanted_NE + bias_E
    if config.groups > 1:
        wanted_NE = _in_best_groups(wanted_NE, config, _JUDGED_BY if sigmoid else 1)
    ids_NK = wanted_NE.topk(config.chosen, dim=-1).indices
    gates_NK = scores_NE.gather(1, ids_NK)
    if config.renormalise:
        total_N1 = gates_NK.sum(-1, keepdim=True)
        gates_NK = gates_NK / (total_N1 + _NO_GATE if sigmoid else total_N1)
    return ids_NK, gates_NK


def _in_best_groups(wanted_NE: Tensor, config: ExpertsConfig, judged_by: int) -> Tensor:
    """Scores outside of each token's best groups become -infinity."""
    each_NGE = wanted_NE.unflatten(1, (config.groups, -1))
    groups_NG = each_NGE.topk(judged_by, dim=-1).values.sum(-1)
    best_NK = groups_NG.topk(config.groups_kept, dim=-1).indices
    kept_NG = torch.zeros_like(groups_NG, dtype=torch.bool).scatter(1, best_NK, True)
    return each_NGE.masked_fill(~kept_NG.unsqueeze(-1), -math.inf).flatten(1)


def sparse_mixer(logits_NE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """(ids, gates), [N, 2]: the largest logit, then the largest of the others. A gate is a softmax
    over the experts that are left and whose logit is less than 2 `jitter` below, relative to the
    larger size of the two."""
    first_N1, first_gate_N1 = _mixed(logits_NE, logits_NE, jitter)
    others_NE = logits_NE.scatter(1, first_N1, -math.inf)
    second_N1, second_gate_N1 = _mixed(logits_NE, others_NE, jitter)
    return torch.cat((first_N1, second_N1), -1), torch.cat((first_gate_N1, second_gate_N1), -1)


def _mixed(logits_NE: Tensor, left_NE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """(id, gate) of the largest of `left_NE`: the logits, or those with some at -infinity."""
    largest_N1, id_N1 = left_NE.detach().max(-1, keepdim=True)
    size_NE = torch.maximum(logits_NE.detach().abs(), largest_N1)
    far_NE = (largest_N1 - logits_NE.detach()) / size_NE > 2 * jitter
    gates_NE = left_NE.masked_fill(far_NE, -math.inf).softmax(-1)
    return id_N1, gates_NE.gather(1, id_N1)


def capacity(config: ExpertsConfig, rows: int) -> int:
    """Most of `rows` tokens that one expert takes: ceil(factor x rows x chosen / experts), or all
    of them where nothing is dropped."""
    if not config.capacity_factor:
        return rows
    return math.ceil(config.capacity_factor * rows * config.chosen / config.count)


def within_capacity(
    ids_NK: Tensor, gates_NK: Tensor, chosen_NE: Tensor, limit: int
) -> tuple[Tensor, Tensor]:
    """(ids, gates), with E, no expert, and 0 for each expert's tokens behind its first `limit`."""
    over_NK = chosen_NE.cumsum(0, dtype=torch.int32).gather(1, ids_NK) > limit
    return ids_NK.masked_fill(over_NK, chosen_NE.shape[1]), gates_NK.masked_fill(over_NK, 0)


def dropped(load: Tensor, limit: int) -> Tensor:
    """How many choices of tokens were over the `limit` of an expert; a scalar for `load` of any
    shape, int64."""
    return (load - limit).clamp(min=0).sum()


def auxiliary_loss(load_E: Tensor, probability_E: Tensor, rows: int) -> Tensor:
    """E x the sum over experts of (share of tokens that chose it) x (mean probability), both over
    all layers together: what `transformers` computes, after Switch (arXiv 2101.03961, eq. 4 to 6).

    Load and probability are sums over layers and tokens; `rows` is the number of tokens times that
    of layers. The result is the number of experts of a token where loads are even.
    """
    share_E = load_E.to(probability_E.dtype) / rows
    return load_E.shape[0] * (share_E * (probability_E / rows)).sum()


def updated_bias(bias: Tensor, load: Tensor, speed: float) -> Tensor:
    """The bias after a step in which experts had `load`, over all ranks; [..., E] each. Raised by
    `speed` for those below the mean of their layer, lowered for those above (arXiv 2408.15664)."""
    wide = load.to(bias.dtype)
    return bias + speed * (wide.mean(-1, keepdim=True) - wide).sign()
