"""One process of the reshard bench: `python -m interlace.bench.reshard_world FOLDER`.

FOLDER/size.json says what to run; rank 0 leaves FOLDER/result.json. Every process is one device;
`LOCAL_RANK` says which one of its host. All processes are on one machine, so they share a clock:
a move begins at a time that rank 0 has announced and ends when the last rank has its part.
"""

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.bench.reshard_cases import (
    CHECKPOINT,
    FULL_TENSOR,
    LABELS,
    METHODS,
    OURS,
    ReshardCase,
    ReshardSize,
    Side,
    from_json,
    warm_up_case,
)
from interlace.bench.reshard_rivals import (
    RankCase,
    RivalGroups,
    part_at,
    placements_of,
    through_checkpoint,
    through_full_tensor,
)
from interlace.config import parse_rate
from interlace.errors import InterlaceError, RunError
from interlace.hardware.topology import Topology
from interlace.lab.links import emulated_backend
from interlace.lab.namespaces import shape
from interlace.ranks.launched import follow_launcher
from interlace.reshard import Move as Described
from interlace.reshard import ReshardPlan, Settings

TCP_SHARE = 1448 / 1514
"""Payload of a full Ethernet frame of TCP with timestamps: what a shaped link counts is 1514."""
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""Where Linux names the algorithm that a TCP connection slows down by."""
_EMULATED_LATENCY_US = 50.0
"""Latency of an emulated link in us, the default of `link.latency_us`."""
_NOTICE_NS = 50_000_000
"""Time, in ns, from saying when a repeat begins to its beginning: more than a broadcast takes."""
_LIMIT = timedelta(seconds=120)
"""Limit of every wait of the bench; no case takes nearly so long."""
_PROBE_BYTES = 4 * 2**20
"""Size of the messages that measure a link's rate; a choice."""
_PROBES = 3
"""How many of them are sent; the fastest counts. A choice."""
T = TypeVar("T")


class BenchWorld:
    """All processes; makes each mesh and each group once. All ranks ask in the same order."""

    def __init__(self, size: ReshardSize) -> None:
        self.rank = dist.get_rank()
        self.size = size
        self._meshes: dict[tuple[tuple[int, ...], tuple[int, int]], DeviceMesh] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def ranks(self, side: Side, first_host: int) -> tuple[int, ...]:
        """Global ranks of a side, host after host."""
        return tuple(
            host * self.size.devices + device
            for host in range(first_host, first_host + side.hosts)
            for device in range(side.devices)
        )

    def mesh(self, ranks: tuple[int, ...], side: Side) -> DeviceMesh:
        """Hosts x devices."""
        key = (ranks, (side.hosts, side.devices))
        if key not in self._meshes:
            names = ("host", "device")
            self._meshes[key] = DeviceMesh(
                "cpu", torch.tensor(ranks).view(key[1]), mesh_dim_names=names
            )
        return self._meshes[key]

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group of some ranks; others get a placeholder, which they do not use."""
        if ranks not in self._groups:
            self._groups[ranks] = cast("dist.ProcessGroup", dist.new_group(list(ranks)))
        return self._groups[ranks]

    def timed(self, action: Callable[[], T]) -> tuple[T, int, int]:
        """(result of `action` here, ns until the last rank was done, CPU ns of all ranks).

        All ranks call it.
        """
        dist.barrier()  # others may still look at what they got
        gate = torch.tensor([time.monotonic_ns() + _NOTICE_NS])
        dist.broadcast(gate, 0)
        start_ns = int(gate.item())
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        cpu_start_ns = time.process_time_ns()
        result = action()
        end = torch.tensor([time.monotonic_ns()])
        cpu = torch.tensor([time.process_time_ns() - cpu_start_ns])
        dist.all_reduce(end, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        return result, int(end.item()) - start_ns, int(cpu.item())


def main(folder: Path) -> None:
    """Run all cases; rank 0 writes the result."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    # `full_tensor` of a tensor cut by two mesh axes advises every rank to flatten the mesh.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    size = from_json((folder / "size.json").read_text(encoding="utf-8"))
    rate_bits = parse_rate(size.rate, "rate")
    backend = emulated_backend(rate_bits, _EMULATED_LATENCY_US) if size.emulated else "gloo"
    if not size.emulated:
        # Of this network namespace. BBR, the default of some kernels, paces each connection by what
        # it carried before, which says nothing here: with 64 of them a move took 1.2 times as long.
        _CONGESTION_CONTROL.write_text("reno")
    dist.init_process_group(backend, timeout=_LIMIT)
    try:
        if not size.emulated and os.environ["LOCAL_RANK"] == "0":
            limit_inbound(size.rate)
        world = BenchWorld(size)
        links = probe(world, rate_bits / 8 * (1.0 if size.emulated else TCP_SHARE))
        topology = topology_of(size, links)
        run_case(world, warm_up_case(size), topology, folder / "checkpoint", repeats=1)
        cases = []
        for case in size.cases:
            result = run_case(world, case, topology, folder / "checkpoint", repeats=size.repeats)
            cases.append(result)
            if world.rank == 0:
                print(f"{case.name} done", file=sys.stderr, flush=True)
        if world.rank == 0:
            content = json.dumps({"links": links, "cases": cases})
            (folder / "result.json").write_text(content, encoding="utf-8")
    finally:
        dist.destroy_process_group()


def limit_inbound(rate: str) -> None:
    """Shape what the switch sends to this lab host, which by itself receives at any rate."""
    found = re.fullmatch(r"il([0-9a-f]+)h(\d+)", os.environ["INTERLACE_LAB_DEVICE"])
    assert found, "named by lab.namespaces"
    lab, host = found.groups()
    shape(f"il{lab}s{host}", rate, namespace=f"ilab-{lab}-sw")


def probe(world: BenchWorld, nic_bytes_per_s: float) -> dict[str, float]:
    """Rates in byte/s and latency in ns, the same on all ranks: `nic` is what the link's rate
    leaves for payload; the others are the best of a few messages of 4 MiB, or of one element."""
    far = world.size.devices * (world.size.hosts - 1)
    best = {
        "nic_measured": _message_ns(world, far, _PROBE_BYTES),
        "inside": _message_ns(world, 1, _PROBE_BYTES),
        "latency_ns": _message_ns(world, far, 4),
    }
    return {
        "nic_bytes_per_s": nic_bytes_per_s,
        "nic_measured_bytes_per_s": _PROBE_BYTES / best["nic_measured"] * 1e9,
        "inside_bytes_per_s": _PROBE_BYTES / best["inside"] * 1e9,
        "latency_ns": best["latency_ns"],
    }


def _message_ns(world: BenchWorld, receiver: int, message_bytes: int) -> int:
    message = torch.zeros(message_bytes, dtype=torch.uint8)

    def send() -> None:
        if world.rank == 0:
            dist.send(message, receiver)
        elif world.rank == receiver:
            dist.recv(message, 0)

    return min(world.timed(send)[1] for _ in range(_PROBES))


def topology_of(size: ReshardSize, links: Mapping[str, float]) -> Topology:
    """The lab: every host has one NIC of the rate that the link has by its making."""
    return Topology(
        hosts=tuple(
            tuple(range(host * size.devices, (host + 1) * size.devices))
            for host in range(size.hosts)
        ),
        inter_host_bytes_per_s=links["nic_bytes_per_s"],
        intra_host_bytes_per_s=links["inside_bytes_per_s"],
        latency_ns=round(links["latency_ns"]),
    )


def run_case(
    world: BenchWorld, case: ReshardCase, topology: Topology, storage: Path, *, repeats: int
) -> dict[str, Any]:
    """Times of every method, in turn repeat by repeat, with its plan's prediction and the bound."""
    move = move_of(world, case)
    source, destination = move.source_ranks, move.destination_ranks
    groups = RivalGroups(
        source=world.group(source),
        destination=world.group(destination),
        fan=world.group((source[0], *destination)),
        both=world.group(source + destination),
    )
    plans = plans_of(move, topology) if move.takes_part else {}
    ways: dict[str, Callable[[], DTensor | None]] = {
        name: partial(moved, plan, move) for name, plan in plans.items()
    }
    if move.takes_part:
        ways[FULL_TENSOR] = partial(through_full_tensor, move, groups)
        ways[CHECKPOINT] = partial(through_checkpoint, move, groups, storage)
    times: dict[str, list[int]] = {name: [] for name in LABELS}
    cpu_times: dict[str, list[int]] = {name: [] for name in LABELS}
    for _ in range(repeats):
        for name in LABELS:
            result, time_ns, cpu_ns = world.timed(ways.get(name, _nothing))
            times[name].append(time_ns)
            cpu_times[name].append(cpu_ns)
            check(result, move, name)
            if name == CHECKPOINT and world.rank == 0:
                shutil.rmtree(storage)  # the next one finds as much memory
    return {
        "name": case.name,
        "times_ns": times,
        "cpu_ns": cpu_times,
        "predicted_ns": {name: plan.plan.predicted_ns for name, plan in plans.items()},
        "lower_bound_ns": plans[OURS].plan.lower_bound_ns if plans else 0,
    }


def plans_of(move: RankCase, topology: Topology) -> dict[str, ReshardPlan]:
    """A plan of each method; made once, as a user would who moves a tensor every few steps."""
    source, destination = move.placements
    spec = Described(
        shape=move.case.shape,
        dtype=torch.int32,
        src_mesh=move.source_mesh,
        src_placements=source,
        dst_mesh=move.destination_mesh,
        dst_placements=destination,
    )
    plans = {}
    for method in METHODS:
        settings = Settings(
            topology=topology,
            strategy=method.strategy,
            order=method.order,
        )
        plans[method.name] = ReshardPlan({"x": spec}, settings=settings)
    return plans


def moved(plan: ReshardPlan, move: RankCase) -> DTensor | None:
    """The tensor at its destination."""
    return plan.start({"x": move.tensor}).wait()["x"]


def move_of(world: BenchWorld, case: ReshardCase) -> RankCase:
    """Sources are the first hosts, destinations those after them; elements count from 0."""
    source = world.ranks(case.source, 0)
    destination = world.ranks(case.destination, case.source.hosts)
    meshes = world.mesh(source, case.source), world.mesh(destination, case.destination)
    full = torch.arange(case.tensor_bytes // 4, dtype=torch.int32).view(case.shape)
    tensor = expected = None
    if world.rank in source:
        place = tuple(meshes[0].get_coordinate() or ())
        local = part_at(full, case.source, place).clone(memory_format=torch.contiguous_format)
        tensor = DTensor.from_local(local, meshes[0], placements_of(case.source), run_check=False)
    if world.rank in destination:
        place = tuple(meshes[1].get_coordinate() or ())
        expected = part_at(full, case.destination, place)
    return RankCase(
        case=case,
        rank=world.rank,
        source_ranks=source,
        destination_ranks=destination,
        source_mesh=meshes[0],
        destination_mesh=meshes[1],
        tensor=tensor,
        expected=expected,
    )


def check(result: DTensor | None, move: RankCase, name: str) -> None:
    """RunError unless every destination has the right elements."""
    if move.expected is None:
        return
    if result is None or not torch.equal(result.to_local(), move.expected):
        raise RunError(f"{name} gave rank {move.rank} wrong elements in {move.case.name}")


def _nothing() -> None:
    """What a rank on neither side does."""


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except InterlaceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
