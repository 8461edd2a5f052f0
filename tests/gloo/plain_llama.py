"""Llama once more, as plain functions of a dictionary of weights: what the real one must equal.

Written apart from `interlace.models.llama`: samples first, attention spelled out, rotation by
complex numbers, loss by log-sum-exp.
"""

import torch
from torch import Tensor

from interlace.config import ModelConfig

Weights = dict[str, Tensor]


def loss(weights: Weights, config: ModelConfig, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean negative log-likelihood of the targets."""
    x_BSD = weights["embedding.weight"][tokens_BS]
    for layer in range(config.layers):
        prefix = f"blocks.{layer}."
        w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        x_BSD = x_BSD + attention(w, config, norm(x_BSD, w["attention_norm.weight"], config))
        x_BSD = x_BSD + feed_forward(w, norm(x_BSD, w["ffn_norm.weight"], config))
    logits_BSV = norm(x_BSD, weights["norm.weight"], config) @ weights["head.weight"].T
    chosen_BS = logits_BSV.gather(-1, targets_BS[..., None]).squeeze(-1)
    return (logits_BSV.logsumexp(-1) - chosen_BS).mean()


def norm(x: Tensor, gain: Tensor, config: ModelConfig) -> Tensor:
    """Divided by the root of the mean square."""
    return x / ((x * x).mean(-1, keepdim=True) + config.norm_eps).sqrt() * gain


def rotate(x_BHSE: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + E/2) as complex numbers, turned by position * theta^(-2i/E)."""
    length, size = x_BHSE.shape[-2:]
    speed = theta ** -(torch.arange(size // 2, dtype=torch.float64) * 2 / size)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), speed).float()
    real, imaginary = x_BHSE[..., : size // 2], x_BHSE[..., size // 2 :]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(w: Weights, config: ModelConfig, x_BSD: Tensor) -> Tensor:
    """Every group of query heads shares one key and value head."""
    samples, length, width = x_BSD.shape
    size = width // config.heads

    def heads(name: str) -> Tensor:
        y = x_BSD @ w[f"attention.{name}.weight"].T
        y = y.reshape(samples, length, -1, size).transpose(1, 2)
        return y.repeat_interleave(config.heads // y.shape[1], dim=1)

    query = rotate(heads("query"), config.rope_theta)
    key = rotate(heads("key"), config.rope_theta)
    scores = query @ key.transpose(-1, -2) / size**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ heads("value")
    return mixed.transpose(1, 2).reshape(x_BSD.shape) @ w["attention.output.weight"].T


def feed_forward(w: Weights, x_BSD: Tensor) -> Tensor:
    """down(silu(gate) * up)."""
    gate = x_BSD @ w["ffn.gate.weight"].T
    up = x_BSD @ w["ffn.up.weight"].T
    return (gate * gate.sigmoid() * up) @ w["ffn.down.weight"].T
