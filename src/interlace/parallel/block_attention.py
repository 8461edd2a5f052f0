"""Attention of a block of queries to a block of keys, with the log-sum-exp that merging needs.

The softmax of a query over all keys is a mean of its softmaxes over blocks of keys, weighted by
the exponentials of their log-sum-exps (arXiv 2310.01889). A block's gradients follow from the
output and the log-sum-exp over *all* keys, so kernels of flash attention give them as they are.

Letters: N batch, H query heads, K key/value heads (a divisor of H), S queries, T keys, E head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(NamedTuple):
    """One way to compute a block. `forward(q, k, v, causal) -> (out, lse)`,
    `backward(grad, q, k, v, out, lse, causal) -> (dq, dk, dv)`."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    grouped: bool = False
    """Whether it takes fewer key/value heads than query heads."""


def kernel_for(q_NHSE: Tensor) -> Kernel:
    """The kernel for queries of this device, type and shape. Flash kernels need no memory for
    scores. `PLAIN` holds S * T of them; it is for what no such kernel takes (on CUDA float64 and
    odd sizes, on other devices all)."""
    length, head_size = q_NHSE.shape[-2:]
    if q_NHSE.device.type == "cpu":
        return FLASH_CPU
    if q_NHSE.device.type == "cuda":
        half = q_NHSE.dtype in (torch.float16, torch.bfloat16)
        if half and head_size % 8 == 0 and head_size <= 256:
            return FLASH_CUDA
        # This kernel pads its log-sum-exp to a multiple of 32 queries, and reads rows 16 bytes at a
        # time.
        if q_NHSE.dtype == torch.float32 and head_size % 4 == 0 and length % 32 == 0:
            return EFFICIENT_CUDA
    return PLAIN


def attend(
    q_NHSE: Tensor, k_NKTE: Tensor, v_NKTE: Tensor, *, causal: bool, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """(output [N, H, S, E], log-sum-exp of the scores [N, H, S], in float32 or float64).

    Scores are scaled by 1 / sqrt(E). With `causal`, S = T and query i sees keys 0..i.
    """
    kernel = kernel or kernel_for(q_NHSE)
    if not kernel.grouped:
        k_NKTE, v_NKTE = (_repeat(x, q_NHSE.shape[1]) for x in (k_NKTE, v_NKTE))
    return kernel.forward(q_NHSE, k_NKTE, v_NKTE, causal)


def attend_backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    grad_NHSE: Tensor,
    out_NHSE: Tensor,
    lse_NHS: Tensor,
    *,
    causal: bool,
    kernel: Kernel | None = None,
) -> Gradients:
    """This block's share of the gradients of q, k and v (shapes as for `attend`). `grad_NHSE`,
    `out_NHSE` and `lse_NHS` belong to the attention over all keys, of which the block has some."""
    q_NHSE, k_NKTE, v_NKTE = qkv
    kernel = kernel or kernel_for(q_NHSE)
    kv_heads = k_NKTE.shape[1]
    if not kernel.grouped:
        k_NKTE, v_NKTE = (_repeat(x, q_NHSE.shape[1]) for x in (k_NKTE, v_NKTE))
    dq, dk, dv = kernel.backward(grad_NHSE, q_NHSE, k_NKTE, v_NKTE, out_NHSE, lse_NHS, causal)
    if kernel.grouped:
        return dq, dk, dv
    return dq, _sum_repeated(dk, kv_heads), _sum_repeated(dv, kv_heads)


def _repeat(x_NKTE: Tensor, heads: int) -> Tensor:
    """Each head repeated for its group of query heads."""
    batch, kv_heads, length, size = x_NKTE.shape
    if kv_heads == heads:
        return x_NKTE
    group = x_NKTE.unsqueeze(2).expand(batch, kv_heads, heads // kv_heads, length, size)
    return group.clone(memory_format=torch.contiguous_format).view(batch, heads, length, size)


def _sum_repeated(gradient_NHTE: Tensor, kv_heads: int) -> Tensor:
    batch, heads, length, size = gradient_NHTE.shape
    if kv_heads == heads:
        return gradient_NHTE
    return gradient_NHTE.view(batch, kv_heads, heads // kv_heads, length, size).sum(2)


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return found[0], found[1]


def _flash_cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    seed = q.new_zeros(2, dtype=torch.uint64)  # read only with dropout
    offset = q.new_zeros((), dtype=torch.uint64)
    lengths = (None, None, q.shape[2], k.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
    )


def _efficient_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return found[0], found[1]


def _efficient_cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    seed = q.new_zeros((), dtype=torch.int64)  # read only with dropout
    needed = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, seed, seed, 0.0, needed, causal
    )
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q.to(_wide(q)) @ k.to(_wide(q)).transpose(-1, -2) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    wide = _wide(q)
    share = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    grad, out = grad.to(wide), out.to(wide)
    d_share = grad @ v.to(wide).transpose(-1, -2)
    d_scores = share * (d_share - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = d_scores @ k.to(wide)
    dk = d_scores.transpose(-1, -2) @ q.to(wide)
    dv = share.transpose(-1, -2) @ grad
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


FLASH_CPU = Kernel("flash_cpu", _flash_cpu, _flash_cpu_backward)
"""PyTorch's flash attention on a CPU."""
FLASH_CUDA = Kernel("flash_cuda", _flash_cuda, _flash_cuda_backward, grouped=True)
"""PyTorch's flash attention on CUDA, for float16 and bfloat16."""
EFFICIENT_CUDA = Kernel("efficient_cuda", _efficient_cuda, _efficient_cuda_backward)
"""PyTorch's memory-efficient attention on CUDA, for float32."""
PLAIN = Kernel("plain", _plain, _plain_backward)
"""Attention written out in matmuls and a softmax, for everything else."""
