"""Which matmuls a device can add to a float32 buffer without rounding them first.

Tensor cores add products of 16-bit numbers in float32. `aten.addmm.dtype_out` adds that sum to the
buffer as it is; `mm` rounds it to 16 bits first. CUDA has the kernel; the CPU has none in torch
2.11 to 2.13.
"""

import torch

aten = torch.ops.aten
ADD_WIDE = aten.addmm.dtype_out
"""Adds the product of 16-bit matrices to a float32 matrix."""
_NARROW = (torch.bfloat16, torch.float16)
"""Types that are rounded to 16 bits."""
_SIZE = 16
"""Rows and columns of the matrices that are tried."""


def wide_sums(device: torch.device) -> frozenset[torch.dtype]:
    """The types whose matmuls `device` adds to float32 unrounded. Runs a small one of each, so call
    it where tensors are real."""
    return frozenset(dtype for dtype in _NARROW if _adds_wide(device, dtype))


@torch.no_grad()
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """0.5 + (2048 * 1 + 1 * 1), of which the product has twelve bits and float16 eleven."""
    left = torch.zeros(_SIZE, _SIZE, dtype=dtype, device=device)
    left[:, 0], left[:, 1] = 2048, 1
    right = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    total = torch.full((_SIZE, _SIZE), 0.5, device=device)
    try:
        ADD_WIDE(total, left, right, torch.float32, out=total)
    except RuntimeError:  # NotImplementedError is one: no kernel, or none for these types
        return False
    return bool((total == 2049.5).all())
