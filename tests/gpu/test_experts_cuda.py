"""On one GPU: grouped matmuls of experts, which in bfloat16 are one kernel, against float64.

Plain unittest, so that `make gpu-check` runs it where only torch and numpy are; pytest runs it too.
"""

import unittest

import torch
from torch import Tensor

from interlace.experts.grouped import ADD_WEIGHT_GRADIENT, grouped_matmul

SIZES = (16, 0, 40, 8)
"""Rows of each expert; one has none."""
DROPPED = 8
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Largest difference over the largest element."""


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class ExpertsOnCuda(unittest.TestCase):
    """Rows of four experts behind each other, and some that were dropped."""

    def setUp(self) -> None:
        torch.manual_seed(0)
        self.counts = torch.tensor([SIZES, SIZES])

    def near(self, found: Tensor, wanted: Tensor, bound: float) -> None:
        difference = (found.double() - wanted).abs().max() / wanted.abs().max()
        self.assertLess(float(difference), bound)

    def test_forward_and_gradients(self) -> None:
        for dtype, bound in BOUNDS.items():
            with self.subTest(dtype):
                total = sum(SIZES) + DROPPED
                rows = torch.randn(total, 64, device="cuda").to(dtype).requires_grad_()
                weight = torch.randn(len(SIZES), 32, 64, device="cuda").to(dtype).requires_grad_()
                out = grouped_matmul(rows, weight, self.counts, 1)
                tangent = torch.randn_like(out)
                out.backward(tangent)
                x, w = (each.detach().double().requires_grad_() for each in (rows, weight))
                parts = zip(x.split([*SIZES, DROPPED]), w, strict=False)
                whole = torch.cat([part @ one.t() for part, one in parts])
                whole.backward(tangent[: sum(SIZES)].double())
                self.near(out[: sum(SIZES)].detach(), whole.detach(), bound)
                self.assertEqual(float(out[sum(SIZES) :].abs().max()), 0.0)
                for own, true in ((rows, x), (weight, w)):
                    assert own.grad is not None
                    assert true.grad is not None
                    self.near(own.grad, true.grad, bound)
                self.assertEqual(float(weight.grad[1].abs().max()), 0.0)  # type: ignore[index]

    def test_weight_gradients_are_added(self) -> None:
        rows, gradient = (torch.randn(sum(SIZES), n, device="cuda") for n in (64, 32))
        buffer = torch.ones(len(SIZES), 32, 64, device="cuda")
        ADD_WEIGHT_GRADIENT(buffer, gradient, rows, self.counts, 1)
        pairs = zip(gradient.double().split(SIZES), rows.double().split(SIZES), strict=True)
        self.near(buffer, torch.stack([1 + g.t() @ x for g, x in pairs]), 1e-5)


if __name__ == "__main__":
    unittest.main()
