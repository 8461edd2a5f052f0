"""Times of operators on one GPU by their shapes: matmuls, attention, what only moves bytes.

    matmul      2 m n k / (peak x reached share x share of tiles and waves x k / (k + 128))
    attention   multiplications / (peak x reached share x share of heads, sequence and waves)
    the rest    bytes / reached memory bandwidth

each at least its bytes through memory, and a kernel's start and end on top. A matmul is cut into
tiles, which multiprocessors work off in waves; the last wave and the last tiles are partly idle,
and small tiles load more bytes per multiplication. Of all tiles the best counts, as libraries
choose. Held against 697 measured GEMMs (SimuMax's tables of A100-PCIe and B200) the mean error is
4 % on the one and 15 % on the other. The share of the peak was fitted to each, the tiles to the
first.
"""

import math

from interlace.hardware.device_rates import AttentionKind, DeviceRates

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.85),
    (64, 256, 0.7),
    (256, 64, 0.7),
    (128, 64, 0.7),
    (64, 128, 0.7),
    (64, 64, 0.7),
)
"""Rows, columns, and the share of the largest tile's rate."""
HALF_DEPTH = 128
"""Depth k at which half of a tile's time is its start and end."""
QUERIES_PER_BLOCK = 128
"""Queries of one head that one multiprocessor attends to at a time (FlashAttention)."""
HALF_SEQUENCE = 200
"""Length at half the rate of fused attention: A100 backward 114 TFLOP/s at 512, 196 at 16k."""
UNFUSED_PASSES_FORWARD = 6
"""Reads and writes of the scores (heads x sequence x sequence) in unfused attention: out of the
matmul, scaled and masked softmax, dropout, into the matmul."""
UNFUSED_PASSES_BACKWARD = 10
ALIGNED = 8
"""Elements of 16 bits that a row must be a multiple of for tensor cores."""
UNALIGNED_SHARE = 1 / 16
"""Rate without tensor cores: 19.5 of 312 TFLOP/s on A100."""
ELEMENT_BYTES = 2


def matmul_share(rows: int, columns: int, depth: int, multiprocessors: int) -> float:
    """Share of the reached peak that a matmul of this shape has, 0 to 1."""
    best = 0.0
    for tile_rows, tile_columns, rate in TILES:
        down, across = math.ceil(rows / tile_rows), math.ceil(columns / tile_columns)
        waves = math.ceil(down * across / multiprocessors)
        useful = rows * columns / (waves * multiprocessors * tile_rows * tile_columns)
        best = max(best, rate * useful)
    return best * depth / (depth + HALF_DEPTH)


def matmul_s(device: DeviceRates, rows: int, columns: int, depth: int, copies: int = 1) -> float:
    """Seconds of `copies` matmuls (rows, depth) x (depth, columns) in 16 bits, in one kernel."""
    share = matmul_share(rows * copies, columns, depth, device.multiprocessors)
    rate = device.flops_per_s * device.reached.matmul * share
    moved = ELEMENT_BYTES * copies * (rows * depth + depth * columns + rows * columns)
    seconds = max(2.0 * copies * rows * columns * depth / rate, moved / device.bytes_per_s)
    return device.kernel_s + seconds


def moved_s(device: DeviceRates, moved_bytes: float, kernels: int = 1) -> float:
    """Seconds of operators that read and write so many bytes in all."""
    return device.kernel_s * kernels + moved_bytes / device.bytes_per_s


def fused_attention_s(
    device: DeviceRates,
    *,
    batch: int,
    heads: int,
    sequence: int,
    head_size: int,
    causal: bool = True,
    backward: bool = False,
    kernel: AttentionKind = "newest",
) -> float:
    """Seconds of FlashAttention over `batch` sequences; backward has 2.5 times the work."""
    multiplied = 4.0 * batch * heads * sequence * sequence * head_size / (2 if causal else 1)
    reached = device.reached.attention_backward if backward else device.reached.attention_forward
    reached *= {"flash1": device.reached.flash1, "flash2": device.reached.flash2}.get(kernel, 1.0)
    blocks = batch * heads * math.ceil(sequence / QUERIES_PER_BLOCK)
    waves = math.ceil(blocks / device.multiprocessors) * device.multiprocessors
    full = sequence / (sequence + HALF_SEQUENCE * (2 if causal else 1))
    small_heads = min(1.0, 0.7 + 0.3 * head_size / 128)
    rate = device.flops_per_s * reached * full * small_heads * blocks / waves
    moved = ELEMENT_BYTES * batch * heads * sequence * head_size * (8 if backward else 4)
    work = multiplied * (2.5 if backward else 1)
    return device.kernel_s + max(work / rate, moved / device.bytes_per_s)


def unfused_attention_s(
    device: DeviceRates,
    *,
    batch: int,
    heads: int,
    sequence: int,
    head_size: int,
    backward: bool = False,
) -> float:
    """Seconds of attention that writes its scores to memory, with a fused softmax and dropout.

    It multiplies all of the square, causal or not.
    """
    scores = ELEMENT_BYTES * float(batch * heads) * sequence * sequence
    passes = UNFUSED_PASSES_BACKWARD if backward else UNFUSED_PASSES_FORWARD
    per_matmul = matmul_s(device, sequence, sequence, head_size, batch * heads)
    values = matmul_s(device, sequence, head_size, sequence, batch * heads)
    products = 2 * (per_matmul + values) if backward else per_matmul + values
    if head_size % ALIGNED:
        products /= UNALIGNED_SHARE
    return products + moved_s(device, passes * scores, kernels=4)


def launched_s(device: DeviceRates, busy_s: float, operators: float) -> float:
    """Seconds of so many operators in a row: the device's, or the host's if that starts them more
    slowly than they run."""
    return max(busy_s, operators * device.launch_s)
