"""Times of what a layer of experts computes on one rank, from shapes.

    router      a matmul of tokens x experts in 16 bits, scores in float32, choice, order of rows
    sorted      rows copied in the order of their experts
    up, down    grouped matmuls: one kernel, whose tiles are those of each expert's rows
    activation  SwiGLU on the rows that a rank got
    joined      rows back in the order of tokens, times their gates, summed

Gradients of weights are one matmul for each expert of a rank, as the trainer runs them. The host
reads the counts of rows before it starts what depends on them, so that a device waits for it once a
layer in each forward. Bytes are counted from the operators of `interlace.models.experts`.
"""

import math

from interlace.hardware.device_rates import DeviceRates
from interlace.hardware.expert_job import ExpertJob
from interlace.hardware.operator_times import (
    ELEMENT_BYTES,
    HALF_DEPTH,
    TILES,
    matmul_s,
    moved_s,
)

HOST_READ_S = 25e-6
"""Copy of the counts to the host, and the first launch behind it: a round figure without a source,
about two copies and two launches."""
CAPACITY_BYTES, CAPACITY_KERNELS = 12, 5
"""What a capacity adds to a router: a running count of each expert's tokens (one read, one write,
and one read of it at the choices), compared, and ids and gates masked."""
ROUTER_BYTES = 40
"""For each token and expert: logits in 16 bits and float32, softmax, choice, mask, counts."""
ROUTER_KERNELS = 14
COPY_PASSES = 2
"""A row read and written."""
JOIN_BYTES = 10
"""For each element of a row: read in the order of experts, written in that of tokens, times its
gate, and summed over the experts of a token."""
ACTIVATION_PASSES = 6
"""SiLU (2), product (3), and zeros behind the last row (1)."""


def grouped_matmul_s(
    device: DeviceRates, groups: int, rows: float, columns: int, depth: int
) -> float:
    """Seconds of `groups` matmuls (rows, depth) x (depth, columns) in 16 bits in one kernel; `rows`
    is their mean. Tiles of all groups fill the multiprocessors together."""
    best, each = 0.0, max(1, math.ceil(rows))
    for tile_rows, tile_columns, rate in TILES:
        tiles = groups * math.ceil(each / tile_rows) * math.ceil(columns / tile_columns)
        waves = math.ceil(tiles / device.multiprocessors)
        whole = waves * device.multiprocessors * tile_rows * tile_columns
        best = max(best, rate * groups * rows * columns / whole)
    best *= depth / (depth + HALF_DEPTH)
    moved = ELEMENT_BYTES * groups * (rows * (depth + columns) + float(depth) * columns)
    rate = device.flops_per_s * device.reached.matmul * best
    work = 2.0 * groups * rows * columns * depth
    return device.kernel_s + max(work / rate, moved / device.bytes_per_s)


def expert_parts(
    device: DeviceRates, job: ExpertJob, *, tokens: int, hidden: int, tensor: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(forward, backward) seconds by name of one layer; names of a backward end in `'`, gradients
    of weights in ` weight`. `tokens` are those of a rank and its tensor ranks, who cut the inner
    widths. On the rank with the fullest expert, for which the others wait."""
    inner = max(1, job.ffn // tensor)
    own_rows = float(tokens) * job.chosen * job.kept
    rows = float(tokens) * job.chosen * job.fullest
    each = rows / job.held
    scores = float(tokens) * job.count
    row_bytes = ELEMENT_BYTES * hidden

    def grouped(columns: int, depth: int) -> float:
        return grouped_matmul_s(device, job.held, each, columns, depth)

    def slope(columns: int, depth: int) -> float:
        return job.held * matmul_s(device, columns, depth, max(1, math.ceil(each)))

    copied = moved_s(device, COPY_PASSES * own_rows * row_bytes, 3)
    joined = moved_s(device, JOIN_BYTES * own_rows * hidden, 4)
    active = float(ELEMENT_BYTES) * ACTIVATION_PASSES * rows * inner
    router = matmul_s(device, tokens, job.count, hidden)
    chosen = moved_s(device, ROUTER_BYTES * scores, ROUTER_KERNELS)
    limited = moved_s(device, CAPACITY_BYTES * scores, CAPACITY_KERNELS) if job.capacity else 0.0
    forward = {
        "router": router + chosen + limited,
        "counted": HOST_READ_S,
        "sorted": copied,
        "experts up": 2 * grouped(inner, hidden),
        "experts activation": moved_s(device, active, 3),
        "experts down": grouped(hidden, inner),
        "joined": joined,
    }
    backward = {
        "joined'": joined,
        "experts down'": grouped(inner, hidden),
        "experts down weight": slope(hidden, inner),
        "experts activation'": moved_s(device, 1.5 * active, 4),
        "experts up'": 2 * grouped(hidden, inner),
        "experts up weight": 2 * slope(inner, hidden),
        "sorted'": copied,
        "router'": 2 * router + chosen,
    }
    if job.shared:
        wide, narrow = 2 * job.shared // tensor, job.shared // tensor
        forward["shared up"] = matmul_s(device, tokens, wide, hidden)
        forward["shared down"] = matmul_s(device, tokens, hidden, narrow)
        backward["shared down'"] = matmul_s(device, tokens, narrow, hidden)
        backward["shared down weight"] = matmul_s(device, hidden, narrow, tokens)
        backward["shared up'"] = matmul_s(device, tokens, hidden, wide)
        backward["shared up weight"] = matmul_s(device, wide, hidden, tokens)
    return forward, backward
