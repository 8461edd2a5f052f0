"""What a GPU reaches of its data sheet in a long run, by class of GPU.

A cluster file names the class (`gpu = "A100"`); one that names none gets the values of `OTHER`. The
peaks, bandwidths and multiprocessors themselves are the file's. Sources of the fractions:

    matmul          fits of `operator_times.matmul_share` to SimuMax's tables of GEMMs: A100-PCIe
                    0.78 (183 shapes, mean error 4 %), B200 0.50 (514 shapes, 15 %). The best
                    shapes of stas00/ml-engineering reach 0.87 on A100 SXM and 0.80 on H100 in a
                    short run; 0.80 and 0.64 were chosen for a long one with published training
                    steps in view (`interlace bench simulator`). V100 and A40 are guesses.
    attention       FlashAttention-2 on A100 and FlashAttention-2 and 3 on H100 as their papers
                    print; B200 by SimuMax's tables. A40 as A100: an RTX A5000, of the same chip,
                    reaches 0.74 and 0.70 with heads of 64 over 8,192 tokens
                    (github.com/gpu-mode/ring-attention, issue 10). The rest as the nearest.
    memory          SimuMax: 0.91 on A100, 0.67 on B200.

They are sustained rates: a short run of one kernel on a cool GPU is faster, by half on B200.
"""

from dataclasses import dataclass
from typing import Literal

from interlace.errors import InputError, nearest

AttentionKind = Literal["unfused", "flash1", "flash2", "newest"]
"""Attention of a program: its scores in memory, FlashAttention by generation, or the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedShares:
    """Shares of the data sheet that kernels of a class of GPU reach."""

    matmul: float
    """Of the peak: a large matmul in whole waves of the largest tile."""
    attention_forward: float
    """Of the peak: fused attention over a long sequence, heads of 128."""
    attention_backward: float
    memory: float
    """Of the memory bandwidth: an operator that only moves bytes."""
    flash1: float = 0.55
    """Rate of FlashAttention 1 over that of the newest kernel for this class."""
    flash2: float = 1.0
    """Rate of FlashAttention 2 over the same."""


HOPPER = ReachedShares(
    matmul=0.64,
    attention_forward=0.62,
    attention_backward=0.5,
    memory=0.85,
    flash1=0.3,
    flash2=0.6,
)
"""H100, H200 and GH200."""

REACHED: dict[str, ReachedShares] = {
    "V100": ReachedShares(matmul=0.70, attention_forward=0.40, attention_backward=0.32, memory=0.8),
    "A40": ReachedShares(matmul=0.70, attention_forward=0.70, attention_backward=0.62, memory=0.85),
    "A100": ReachedShares(matmul=0.80, attention_forward=0.70, attention_backward=0.62, memory=0.9),
    "H100": HOPPER,
    "GH200": HOPPER,
    "B200": ReachedShares(matmul=0.5, attention_forward=0.55, attention_backward=0.45, memory=0.67),
}
"""By class. An A800 is an A100, an H800 and an H200 are an H100, a GB200 is a B200."""

OTHER = ReachedShares(matmul=0.7, attention_forward=0.5, attention_backward=0.4, memory=0.8)
"""For a device whose class is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What one device of a cluster does per second, and what one operator costs at least."""

    flops_per_s: float
    """Dense peak of the data sheet, 16 bits."""
    bytes_per_s: float
    """Memory bandwidth that is reached."""
    multiprocessors: int
    memory_bytes: float
    reached: ReachedShares
    kernel_s: float = 3e-6
    """Start and end of one kernel on the device, whose neighbours wait for it."""
    launch_s: float = 6e-6
    """Host time per operator of an eager training step; the device is idle if its work is less."""


def reached_shares(gpu: str) -> ReachedShares:
    """Shares of a class of GPU; general ones if it has no name. Raises InputError if the name is
    not known."""
    if not gpu:
        return OTHER
    if gpu not in REACHED:
        raise InputError(
            f"gpu = {gpu!r} is no class of GPU",
            hint=f"{nearest(gpu, REACHED)} Without the key, general shares are taken.",
        )
    return REACHED[gpu]
