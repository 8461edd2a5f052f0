"""Costs computed from a description of a machine instead of measured: roofline and alpha-beta.

    compute     max(flops / peak, bytes moved / memory bandwidth) + launch
    collective  latency + bytes on the wire / link rate

Bytes on the wire per rank for n ranks and a full tensor of S bytes: all-gather, reduce-scatter and
all-to-all (n-1)/n S, all-reduce 2(n-1)/n S, broadcast S.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from interlace.ir.costs import CostTable
from interlace.ir.graph import Kind, Operator, OpGraph

LAUNCH_NS = 5_000
"""Python and dispatcher time per operator, seen on CPU and CUDA alike (4 to 6 us)."""


@dataclass(frozen=True, kw_only=True)
class MachineModel:
    """One rank of a machine and its link."""

    flops_per_s: float
    bytes_per_s: float
    link_bits_per_s: float
    link_latency_ns: int


def analytic_costs(
    graphs: Mapping[str, OpGraph], machine: MachineModel, ranks: Mapping[str, int]
) -> CostTable:
    """Costs of every operator of `graphs`. `ranks` gives the size of each link lane's group."""
    solo = {
        op.key: _solo_ns(op, machine, ranks.get(op.lane, 1))
        for graph in graphs.values()
        for op in graph.operators
    }
    return CostTable(solo, "analytic", LAUNCH_NS)


def _solo_ns(op: Operator, machine: MachineModel, ranks: int) -> int:
    if not op.is_collective:
        moved = op.bytes_in + op.bytes_out
        seconds = max(op.flops / machine.flops_per_s, moved / machine.bytes_per_s)
        return LAUNCH_NS + int(seconds * 1e9)
    wire = wire_bytes(op.kind, max(op.bytes_in, op.bytes_out), ranks)
    return machine.link_latency_ns + int(8e9 * wire / machine.link_bits_per_s)


def wire_bytes(kind: Kind, full_bytes: int, ranks: int) -> float:
    """Bytes that each rank sends for a collective on a tensor of `full_bytes`."""
    share = (ranks - 1) / ranks
    if kind is Kind.ALL_REDUCE:
        return 2 * share * full_bytes
    if kind is Kind.BROADCAST:
        return float(full_bytes)
    return share * full_bytes


def measure_this_machine() -> tuple[float, float]:
    """(flop/s of a 1024 x 1024 float32 matmul, byte/s of a 64 MiB copy), one thread, ~0.2 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.randn(1024, 1024)
        big = torch.empty(16 * 2**20)
        flops = 2 * 1024**3 / _best_seconds(lambda: a @ a)
        copied = 2 * big.numel() * big.element_size() / _best_seconds(big.clone)
    finally:
        torch.set_num_threads(threads)
    return flops, copied


def _best_seconds(call: Callable[[], object], repeats: int = 4) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
