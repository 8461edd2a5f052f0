"""Costs computed from a description of a machine instead of measured: roofline and alpha-beta.

    compute     max(flops / peak, bytes moved / memory bandwidth) + launch
    collective  latency + bytes on the wire (`hardware.wire_bytes`) / link rate

On a GPU a collective holds some multiprocessors (SMs) and moves its bytes through memory, so beside
it

    matmul, attention   take SMs / (SMs - held) times as long
    everything else     takes 1 / (1 - memory rate of the transfer / memory rate) times as long

while the transfer, whose SMs are reserved, keeps its speed. On a CPU nothing is slowed down: what
gloo costs there depends on cores and has to be measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.hardware.wire_bytes import wire_bytes
from interlace.ir.costs import LARGEST_FACTOR, CostTable, LinkFit, PairCost, cost_of
from interlace.ir.graph import Kind, Operator, OpGraph

LAUNCH_NS = 5_000
"""Python and dispatcher time per operator, seen on CPU and CUDA alike (4 to 6 us)."""

MEMORY_PASSES = {Kind.ALL_GATHER: 2, Kind.ALL_TO_ALL: 2, Kind.BROADCAST: 2, Kind.SEND: 2}
"""Reads and writes of memory per byte on the wire."""
REDUCING_PASSES = 3
"""Two reads and a write where values are added."""


@dataclass(frozen=True, kw_only=True)
class MachineModel:
    """One rank of a machine and its link."""

    flops_per_s: float
    bytes_per_s: float
    link_bits_per_s: float
    link_latency_ns: int
    multiprocessors: int = 0
    """SMs of the GPU; 0 for a CPU."""
    held_multiprocessors: int = 0
    """SMs that one collective holds: NCCL takes 16 to 24 on NVLink, 2 to 8 on a network."""

    def __post_init__(self) -> None:
        if self.multiprocessors and self.held_multiprocessors >= self.multiprocessors:
            raise InputError(
                f"collectives hold {self.held_multiprocessors} of {self.multiprocessors} "
                "multiprocessors, which leaves none for compute",
                hint="NCCL holds 2 to 24",
            )


def analytic_costs(
    graphs: Mapping[str, OpGraph], machine: MachineModel, ranks: Mapping[str, int]
) -> CostTable:
    """Costs of every operator of `graphs`. `ranks` gives the size of each link lane's group."""
    ops = [op for graph in graphs.values() for op in graph.operators]
    transfers = sorted({(op.kind, op.lane) for op in ops if op.is_collective})
    compute = sorted({op.kind for op in ops if not op.is_collective})
    return CostTable(
        operators={op.key: cost_of(op, _solo_ns(op, machine, ranks.get(op.lane, 1))) for op in ops},
        source="analytic",
        issue_ns=LAUNCH_NS,
        pairs=tuple(_pair(kind, *other, machine) for kind in compute for other in transfers)
        if machine.multiprocessors
        else (),
        fits=tuple(_fit(kind, lane, machine, ranks.get(lane, 1)) for kind, lane in transfers),
    )


def _fit(kind: Kind, lane: str, machine: MachineModel, ranks: int) -> LinkFit:
    ns_per_byte = 8e9 * wire_bytes(kind, 1, ranks) / machine.link_bits_per_s
    return LinkFit(kind, lane, float(machine.link_latency_ns), ns_per_byte)


def _pair(compute: Kind, collective: Kind, lane: str, machine: MachineModel) -> PairCost:
    """Slow-down of the operator; OEF of a transfer under a longer operator, which is 1 / factor."""
    if compute in (Kind.MATMUL, Kind.ATTENTION):
        left = 1 - machine.held_multiprocessors / machine.multiprocessors
    else:
        passes = MEMORY_PASSES.get(collective, REDUCING_PASSES)
        left = 1 - passes * machine.link_bits_per_s / 8 / machine.bytes_per_s
    factor = 1 / max(left, 1 / LARGEST_FACTOR)
    return PairCost(compute, collective, lane, factor, transfer_factor=1.0, oef=1 / factor)


def _solo_ns(op: Operator, machine: MachineModel, ranks: int) -> int:
    if not op.is_collective:
        allocates_only = op.target.startswith("aten.new_empty")
        moved = 0 if allocates_only else op.bytes_in + op.bytes_out
        seconds = max(op.flops / machine.flops_per_s, moved / machine.bytes_per_s)
        return LAUNCH_NS + int(seconds * 1e9)
    wire = wire_bytes(op.kind, max(op.bytes_in, op.bytes_out), ranks)
    return machine.link_latency_ns + int(8e9 * wire / machine.link_bits_per_s)
