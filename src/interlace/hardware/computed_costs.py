"""Costs computed from a description of a machine instead of measured: roofline and alpha-beta.

    compute     max(flops / peak, bytes moved / memory bandwidth) + launch
    collective  latency + bytes on the wire (`hardware.wire_bytes`) / link rate

The machine is one rank with one link for all (`MachineModel`), or a rank of a cluster, whose links
depend on where the ranks of a lane are (`hardware.cluster_costs`).

On a GPU a collective holds some multiprocessors (SMs) and moves its bytes through memory, so beside
it

    matmul, attention   take SMs / (SMs - held) times as long
    everything else     takes 1 / (1 - memory rate of the transfer / memory rate) times as long

while the transfer, whose SMs are reserved, keeps its speed. On a CPU nothing is slowed down: what
gloo costs there depends on cores and has to be measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from interlace.errors import InputError
from interlace.hardware.wire_bytes import wire_bytes
from interlace.ir.costs import LARGEST_FACTOR, CostTable, Line, LinkFit, PairCost, cost_of
from interlace.ir.graph import Kind, Operator, OpGraph

LAUNCH_NS = 5_000
"""Python and dispatcher time per operator, seen on CPU and CUDA alike (4 to 6 us)."""

MEMORY_PASSES = {Kind.ALL_GATHER: 2, Kind.ALL_TO_ALL: 2, Kind.BROADCAST: 2, Kind.SEND: 2}
"""Reads and writes of memory per byte on the wire."""
REDUCING_PASSES = 3
"""Two reads and a write where values are added."""


class Machine(Protocol):
    """What costs are computed from: the device of one rank, and the links of its lanes.

    A lane is that of a collective in a graph, which is the name of a mesh axis; `ranks` is the size
    of its group.
    """

    @property
    def flops_per_s(self) -> float:
        """Peak rate of the device."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth of the device."""
        ...

    @property
    def multiprocessors(self) -> int:
        """SMs of the device; 0 for a CPU."""
        ...

    def collective_ns(self, kind: Kind, full_bytes: float, lane: str, ranks: int) -> int:
        """Time of a collective on a whole tensor of `full_bytes`, alone on its link."""
        ...

    def line(self, kind: Kind, lane: str, ranks: int) -> Line:
        """The same time in ns as a line over the bytes of the whole tensor."""
        ...

    def held(self, lane: str) -> int:
        """SMs that a collective of this lane holds."""
        ...

    def link_bytes_per_s(self, lane: str) -> float:
        """What a collective of this lane sends, in byte/s."""
        ...

    def links(self, lanes: Iterable[str]) -> dict[str, str]:
        """The link of each lane that shares one; a lane not named has a link of its own."""
        ...


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
        refuse_holding_all(self.held_multiprocessors, self.multiprocessors)

    def collective_ns(self, kind: Kind, full_bytes: float, lane: str, ranks: int) -> int:
        """As in `Machine`; all lanes are alike."""
        wire = wire_bytes(kind, full_bytes, ranks)
        return self.link_latency_ns + int(8e9 * wire / self.link_bits_per_s)

    def line(self, kind: Kind, lane: str, ranks: int) -> Line:
        """As in `Machine`."""
        ns_per_byte = 8e9 * wire_bytes(kind, 1, ranks) / self.link_bits_per_s
        return Line(float(self.link_latency_ns), ns_per_byte)

    def held(self, lane: str) -> int:
        """As in `Machine`."""
        return self.held_multiprocessors

    def link_bytes_per_s(self, lane: str) -> float:
        """As in `Machine`."""
        return self.link_bits_per_s / 8

    def links(self, lanes: Iterable[str]) -> dict[str, str]:
        """None is shared."""
        return {}


def refuse_holding_all(held: int, multiprocessors: int) -> None:
    """Raise InputError if collectives would leave a GPU no multiprocessor for compute."""
    if multiprocessors and held >= multiprocessors:
        raise InputError(
            f"collectives hold {held} of {multiprocessors} multiprocessors, which leaves none "
            "for compute",
            hint="NCCL holds 2 to 24",
        )


def analytic_costs(
    graphs: Mapping[str, OpGraph], machine: Machine, ranks: Mapping[str, int]
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
        links=machine.links(dict.fromkeys(lane for _, lane in transfers)),
    )


def _fit(kind: Kind, lane: str, machine: Machine, ranks: int) -> LinkFit:
    line = machine.line(kind, lane, ranks)
    return LinkFit(kind, lane, line.at_zero, line.slope)


def _pair(compute: Kind, collective: Kind, lane: str, machine: Machine) -> PairCost:
    """Slow-down of the operator; OEF of a transfer under a longer operator, which is 1 / factor."""
    if compute in (Kind.MATMUL, Kind.ATTENTION):
        left = 1 - machine.held(lane) / machine.multiprocessors
    else:
        passes = MEMORY_PASSES.get(collective, REDUCING_PASSES)
        left = 1 - passes * machine.link_bytes_per_s(lane) / machine.bytes_per_s
    factor = 1 / max(left, 1 / LARGEST_FACTOR)
    return PairCost(compute, collective, lane, factor, transfer_factor=1.0, oef=1 / factor)


def _solo_ns(op: Operator, machine: Machine, ranks: int) -> int:
    if not op.is_collective:
        allocates_only = op.target.startswith("aten.new_empty")
        return compute_ns(machine, op.flops, 0 if allocates_only else op.bytes_in + op.bytes_out)
    return machine.collective_ns(op.kind, max(op.bytes_in, op.bytes_out), op.lane, ranks)


def compute_ns(machine: Machine, flops: float, moved_bytes: float) -> int:
    """Time of one operator: the roofline, and its launch."""
    seconds = max(flops / machine.flops_per_s, moved_bytes / machine.bytes_per_s)
    return LAUNCH_NS + int(seconds * 1e9)
