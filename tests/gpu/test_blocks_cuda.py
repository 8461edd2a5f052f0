"""On one GPU: the kernels under ring attention give what scores spelled out in float64 give.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
"""

import unittest

import torch
from torch import Tensor

from interlace.parallel.block_attention import PLAIN, Kernel, attend, attend_backward, kernel_for

Block = tuple[Tensor, Tensor, Tensor]

BOUNDS = {"flash_cuda": (torch.bfloat16, 2e-2), "efficient_cuda": (torch.float32, 1e-5)}
"""Per kernel: the type that it is used for, and the largest relative error."""


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class BlocksOnCuda(unittest.TestCase):
    """Two blocks of keys, of which the second is the causal one; grouped heads."""

    def test_gradients_of_two_blocks_add_up(self) -> None:
        for name, (dtype, bound) in BOUNDS.items():
            for kv_heads in (8, 2):
                with self.subTest(name, kv_heads=kv_heads):
                    self._check(name, dtype, kv_heads, bound)

    def _check(self, name: str, dtype: torch.dtype, kv_heads: int, bound: float) -> None:
        torch.manual_seed(0)
        shapes = (8, kv_heads, kv_heads, 8)
        q, k, v, grad = (torch.randn(2, h, 64, 32, device="cuda").to(dtype) for h in shapes)
        earlier = torch.randn(2, kv_heads, 64, 32, device="cuda").to(dtype)
        self.assertEqual(kernel_for(q).name, name)
        found = self._two_blocks((q, k, v), grad, earlier, None)
        wide = [x.double() for x in (q, k, v, grad, earlier)]
        true = self._two_blocks((wide[0], wide[1], wide[2]), wide[3], wide[4], PLAIN)
        for x, y in zip(found, true, strict=True):
            self.assertLess(((x - y).abs().max() / y.abs().max()).item(), bound)

    def _two_blocks(
        self, own: Block, grad: Tensor, earlier: Tensor, kernel: Kernel | None
    ) -> list[Tensor]:
        """Output and log-sum-exp over both blocks, and the gradients of each."""
        blocks = ((own, True), ((own[0], earlier, earlier), False))
        parts = [attend(*qkv, causal=causal, kernel=kernel) for qkv, causal in blocks]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        shares = [part * (one - lse).exp().unsqueeze(-1) for part, one in parts]
        found = [(shares[0] + shares[1]).to(grad.dtype), lse]
        for qkv, causal in blocks:
            found += attend_backward(qkv, grad, *found[:2], causal=causal, kernel=kernel)
        return found


if __name__ == "__main__":
    unittest.main()
