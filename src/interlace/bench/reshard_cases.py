"""Cases and methods of the resharding paper (arXiv 2211.05322), scaled to a lab.

The paper measured on 5 hosts of 4 GPUs with 10 Gbit/s NICs and tensors of 1 and 2 GiB; here hosts,
tensors and rates are smaller, and layouts are its own. Sources are on the first hosts,
destinations on the hosts after them, so no device is on both sides.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

ITEM_BYTES = 4
"""int32, as in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One mesh, hosts x devices per host, and how the tensor lies on it."""

    hosts: int
    devices: int
    spec: str
    """Per tensor dimension, as the paper writes it: R, S0 (over hosts), S1 (over the devices of a
    host) or S01 (over both). Mesh axes that no dimension names hold copies."""

    @property
    def placements(self) -> tuple[int | None, int | None]:
        """The tensor dimension that each mesh axis shards; None where it holds copies."""
        dims = self.spec.split()
        host, device = (
            next((i for i, dim in enumerate(dims) if dim[0] == "S" and axis in dim), None)
            for axis in "01"
        )
        return host, device

    @property
    def replicas(self) -> int:
        """Copies of every element."""
        sizes = (self.hosts, self.devices)
        return math.prod(n for n, dim in zip(sizes, self.placements, strict=True) if dim is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardCase:
    """One tensor that moves from a layout to another."""

    name: str
    shape: tuple[int, ...]
    source: Side
    destination: Side

    @property
    def tensor_bytes(self) -> int:
        """Size of the whole tensor."""
        return ITEM_BYTES * math.prod(self.shape)

    @property
    def storage_bytes(self) -> tuple[float, float]:
        """(bytes that a source host writes, bytes that a destination host reads) when the tensor
        goes through shared storage: writing is shared by all source hosts, and each destination
        host reads what its devices need once."""
        chunks = 1 if self.destination.placements[0] is None else self.destination.hosts
        return self.tensor_bytes / self.source.hosts, self.tensor_bytes / chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardSize:
    """How much is run, and on what."""

    hosts: int
    devices: int
    rate: str
    """What each host's NIC carries in either direction, headers included."""
    cases: tuple[ReshardCase, ...]
    repeats: int
    emulated: bool = False
    """An emulated link belongs to a process, so then a host is one device."""

    @property
    def link(self) -> str:
        """How results call it."""
        return f"{'emulated' if self.emulated else 'lab'} link {self.rate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to move a tensor: a strategy and an order of `ReshardPlan`."""

    name: str
    label: str
    strategy: str
    order: str


OURS = "ours"
"""Our strategy and order, the one that `reshard` takes by itself."""
SEND_RECV = "send_recv"
"""Each receiver gets its part from one sender: the paper's baseline."""
FULL_TENSOR = "full_tensor"
"""`DTensor.full_tensor` on the senders, one of which scatters the parts or sends all to all."""
CHECKPOINT = "checkpoint"
"""Written by the senders, read by the receivers."""
METHODS = (
    Method(name=SEND_RECV, label="send/recv", strategy="send_recv", order="naive"),
    Method(
        name="local_all_gather",
        label="+ all-gather",
        strategy="local_all_gather",
        order="naive",
    ),
    Method(name="broadcast", label="broadcast", strategy="broadcast", order="naive"),
    Method(name="load_balance", label="+ balance", strategy="broadcast", order="load_balance"),
    Method(name="search", label="+ order", strategy="broadcast", order="search"),
    Method(name=OURS, label="ours", strategy="auto", order="auto"),
)
"""The paper's five configurations in its order, then ours. `search` has its limit of 1 s."""
PYTORCH = {FULL_TENSOR: "full_tensor", CHECKPOINT: "checkpoint"}
"""What a user of plain PyTorch does today. The checkpoint lies on a RAM disk that all hosts see."""
LABELS = {**{method.name: method.label for method in METHODS}, **PYTORCH}
"""What people read, by method."""

_RECEIVERS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2), (3, 4))
"""Meshes that receive one whole tensor, as (hosts, devices of each)."""
_LAYOUTS = {
    1: (2, "S0 R R", 2, "S0 R R"),
    2: (2, "R R R", 2, "S0 R R"),
    3: (2, "R S0 R", 2, "S0 R R"),
    4: (2, "R S01 R", 2, "S01 R R"),
    5: (2, "S1 R R", 2, "S0 R R"),
    6: (2, "S0 R R", 3, "S0 R R"),
    7: (1, "S1 R R", 2, "R R R"),
    9: (2, "R S0 R", 2, "R R S0"),
}
"""Source hosts and spec, destination hosts and spec. Case 8 of the released code repeats 7."""
_SHAPE, _SHAPE_6 = (256, 256, 64), (192, 256, 85)
"""1/128 of (1024, 1024, 512) and of (3072, 1024, 170): 16 MiB."""


def one_to_many(elements: int, *, hosts: int, devices: int) -> list[ReshardCase]:
    """The paper's 5.1.1 as far as it fits: one device sends a tensor to all of some others."""
    fitting = dict.fromkeys((receivers, min(each, devices)) for receivers, each in _RECEIVERS)
    return [
        ReshardCase(
            name=f"1 to ({receivers},{each})",
            shape=(elements,),
            source=Side(hosts=1, devices=1, spec="R"),
            destination=Side(hosts=receivers, devices=each, spec="R"),
        )
        for receivers, each in fitting
        if receivers < hosts
    ]


def many_to_many(*, hosts: int, devices: int, thinner: int = 1) -> list[ReshardCase]:
    """The paper's 5.1.2 as far as it fits; `thinner` divides the size of the tensor."""
    return [
        ReshardCase(
            name=f"case {number}",
            shape=_thinned(_SHAPE_6 if number == 6 else _SHAPE, thinner),
            source=Side(hosts=sources, devices=devices, spec=source),
            destination=Side(hosts=destinations, devices=devices, spec=destination),
        )
        for number, (sources, source, destinations, destination) in _LAYOUTS.items()
        if sources + destinations <= hosts
    ]


def _thinned(shape: tuple[int, ...], thinner: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // thinner)


def _size(
    *, hosts: int, devices: int, thinner: int, repeats: int, only: Sequence[str] = ()
) -> ReshardSize:
    cases = [
        *one_to_many(math.prod(_SHAPE) // thinner, hosts=hosts, devices=devices),
        *many_to_many(hosts=hosts, devices=devices, thinner=thinner),
    ]
    return ReshardSize(
        hosts=hosts,
        devices=devices,
        rate="125mbit",
        cases=tuple(case for case in cases if not only or case.name in only),
        repeats=repeats,
        emulated=devices == 1,
    )


FULL = _size(hosts=5, devices=4, thinner=1, repeats=3, only=())
"""The paper's 5 hosts of 4 devices."""
QUICK = _size(hosts=3, devices=2, thinner=4, repeats=2, only=("1 to (1,2)", "1 to (2,2)", "case 7"))
"""Three cases on three hosts of two devices, a quarter of the data."""
FULL_EMULATED = _size(hosts=5, devices=1, thinner=1, repeats=3, only=())
"""The paper's hosts with one device each, on emulated links."""
QUICK_EMULATED = _size(
    hosts=4, devices=1, thinner=4, repeats=2, only=("1 to (2,1)", "1 to (3,1)", "case 7", "case 9")
)
"""Four cases on four hosts of one device, a quarter of the data."""


def warm_up_case(size: ReshardSize) -> ReshardCase:
    """A small move to all hosts but the first: what a process does for the first time (imports,
    threads, connections) takes it seconds."""
    return ReshardCase(
        name="warm-up",
        shape=(2**14,),
        source=Side(hosts=1, devices=1, spec="R"),
        destination=Side(hosts=size.hosts - 1, devices=size.devices, spec="R"),
    )


def to_json(size: ReshardSize) -> str:
    """For the processes of the world; `from_json` reads it."""
    return json.dumps(asdict(size))


def from_json(text: str) -> ReshardSize:
    """What `to_json` wrote."""
    content = json.loads(text)
    cases = tuple(
        ReshardCase(
            name=case["name"],
            shape=tuple(case["shape"]),
            source=Side(**case["source"]),
            destination=Side(**case["destination"]),
        )
        for case in content.pop("cases")
    )
    return ReshardSize(cases=cases, **content)
