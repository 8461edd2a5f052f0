"""All ranks agree on what moves, where they are, and on the plan, before anything moves.

Where they are is which ranks share a host, and how fast they reach each other.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.hardware.topology import Topology, cluster_topology, host_groups
from interlace.ranks.agree import odd_ones
from interlace.ranks.identity import ProcessIdentity
from interlace.reshard.inputs import (
    Move,
    PlacementsOf,
    PlannedTensor,
    claimed_sources,
    digest,
    held_tensors,
    make_item,
    placements_for,
    sources_claim,
)
from interlace.reshard.layouts import MeshRanks, layout_text
from interlace.reshard.meeting import Meeting, agreed, check_equal, open_meeting
from interlace.reshard.planning.make_plan import make_plan
from interlace.reshard.planning.transfer_plan import TransferPlan
from interlace.reshard.program import Program, make_program
from interlace.reshard.roll import Roll
from interlace.reshard.settings import Settings
from interlace.reshard.wire import Wire
from interlace.reshard.world import World, default_store

ASSUMED = Topology(
    hosts=(),
    inter_host_bytes_per_s=12.5e9,
    intra_host_bytes_per_s=100e9,
    latency_ns=20_000,
)
"""Rates like those of 100 Gbit/s and of NVLink; where nothing is given or measured, only their
ratio counts."""

_INTRA, _INTER = "intra", "inter"
"""Names of the two rates that are measured: within a host, and between two hosts."""
_PROBE_BYTES = 8 << 20
"""Bytes of a transfer by which a rate is measured; a choice, large beside what its latency
costs."""
_PROBES = 4
"""Transfers of which the fastest counts; a choice: anything else on the link only slows them."""


def host_name() -> str:
    """Names this rank's host; containers of one launcher are told apart by their node rank."""
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


def measured_rates(
    topology: Topology,
    rank: int,
    wire: Wire,
    device: torch.device,
    share: Callable[[Mapping[str, float]], Mapping[int, Mapping[str, float]]],
) -> Topology:
    """`topology` with rates of two transfers of 8 MiB: between two hosts, and within one.

    All its ranks call this; `share` gathers what they say. A pair of devices measures the
    rate, so several ports of a host are not told apart.
    """
    pairs = _pairs(topology)
    found = {name: _probe(pair, rank, wire, device) for name, pair in pairs.items() if rank in pair}
    rates = {name: rate for said in share(found).values() for name, rate in said.items()}
    return replace(
        topology,
        inter_host_bytes_per_s=rates.get(_INTER, topology.inter_host_bytes_per_s),
        intra_host_bytes_per_s=rates.get(_INTRA, topology.intra_host_bytes_per_s),
    )


def _pairs(topology: Topology) -> dict[str, tuple[int, int]]:
    """Two ranks each to measure a rate with."""
    pairs = {}
    inside = [pair for host in topology.hosts for pair in combinations(host, 2)]
    if inside:
        pairs[_INTRA] = inside[0]
    if len(topology.hosts) > 1:
        pairs[_INTER] = (topology.hosts[0][0], topology.hosts[1][0])
    return pairs


def _probe(pair: tuple[int, int], rank: int, wire: Wire, device: torch.device) -> float:
    """Bytes per second of the fastest of a few transfers, each answered by one byte."""
    data = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    answer = torch.empty(1, dtype=torch.uint8, device=device)
    sender, receiver = pair
    best_s = float("inf")
    for _ in range(_PROBES):
        begin_s = time.perf_counter()
        if rank == sender:
            wire.send(data, receiver).wait()
            wire.receive(answer, receiver).wait()
        else:
            wire.receive(data, sender).wait()
            wire.send(answer, sender).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return _PROBE_BYTES / best_s


_SHOWN_CHARACTERS = 300
"""Characters to which a message cuts what a rank wants to move; a choice."""
TransferClaim = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks of a plan agreed on, and this rank's part of it."""

    number: int
    """Of the plan, alike on all its ranks and of no other plan of the world."""
    items: Sequence[PlannedTensor]
    plan: TransferPlan
    program: Program
    rank: int
    people: Mapping[int, ProcessIdentity]
    """All ranks of the plan."""
    device: torch.device
    wire: Wire
    roll: Roll
    watch_store: dist.Store
    """With `watch` a connection for heartbeats alone, since the main thread may block in its
    own."""
    world: World

    def turns(self) -> dict[int, int]:
        """Counts this transfer; how many this rank has begun by now with each rank of it.

        Empty with gloo, where tags tell the messages of two plans apart.
        """
        if self.device.type == "cpu":
            return {}
        peers = {operation.peer for operation in self.program.operations}
        return self.world.next_turns(self.wire.group, peers)


def agree_on_moves(specs: Mapping[str, Move], settings: Settings) -> Agreement:
    """An agreement on tensors that all ranks describe alike. Called by all ranks of the meshes."""
    if not specs:
        raise InputError("there is no tensor to move", hint="give at least one")
    meshes = [mesh for move in specs.values() for mesh in (move.src_mesh, move.dst_mesh)]
    items: list[PlannedTensor] = []

    def described() -> TransferClaim:
        items.extend(
            make_item(move.source(name), move.dst_mesh, move.dst_placements)
            for name, move in specs.items()
        )
        _check_group(items, settings)
        return _introduction(meeting, settings) | _shown("; ".join(map(str, items)))

    meeting = _meet([rank for mesh in meshes for rank in MeshRanks.of(mesh).ranks], settings)
    with meeting.last_words():
        claims = agreed(meeting, "specs", described)
        _check_names(claims)
        check_equal(claims, "description")
        return _agree(meeting, items, claims, settings)


def agree_on_tensors(
    tensors: Mapping[str, DTensor] | None,
    dst_mesh: DeviceMesh,
    dst_placements: PlacementsOf,
    src_mesh: DeviceMesh | None,
    settings: Settings,
) -> Agreement:
    """An agreement on tensors that only the source ranks know."""
    ranks: Sequence[int] = dist.get_process_group_ranks(_group(settings))
    if src_mesh is not None:
        ranks = MeshRanks.of(src_mesh).ranks + MeshRanks.of(dst_mesh).ranks
    items: list[PlannedTensor] = []

    def placed() -> TransferClaim:
        items.extend(
            make_item(source, dst_mesh, placements_for(source.name, dst_placements))
            for source in claimed_sources(claims)
        )
        _check_group(items, settings)
        return _shown("; ".join(layout_text(item.destination) for item in items))

    meeting = _meet(ranks, settings)
    with meeting.last_words():
        claims = agreed(
            meeting,
            "tensors",
            lambda: _introduction(meeting, settings) | _held(tensors, src_mesh),
        )
        _check_names(claims)
        check_equal(agreed(meeting, "destinations", placed), "destination")
        return _agree(meeting, items, claims, settings)


def _meet(ranks: Sequence[int], settings: Settings) -> Meeting:
    _group(settings)
    rank, all_ranks = dist.get_rank(), sorted(set(ranks))
    if rank not in all_ranks:
        raise InputError(
            f"rank {rank} is in neither mesh",
            hint="call this on the ranks of the two meshes only, or give src_mesh on no rank",
        )
    return open_meeting(default_store(), rank, all_ranks, settings.timeout_s)


def _agree(
    meeting: Meeting,
    items: Sequence[PlannedTensor],
    claims: Mapping[int, Mapping[str, Any]],
    settings: Settings,
) -> Agreement:
    """Plans, and proves that all ranks have the same plan."""
    number = claims[min(claims)]["number"]
    title = f"plan {number}" + (f" ({settings.name})" if settings.name else "")
    wire = Wire(group=_group(settings), plan=number)
    device = _device(items[0].source.mesh.device_type)
    host_of = {rank: claim["host"] for rank, claim in claims.items()}
    topology = _topology(meeting, host_of, wire, device, settings)
    roll = Roll(meeting.store, meeting.rank, title)
    made: list[tuple[TransferPlan, Program]] = []

    def planned() -> TransferClaim:
        plan = make_plan(
            [item.spec() for item in items],
            topology,
            strategy=settings.strategy,
            order=settings.order,
            chunk_bytes=settings.chunk_bytes,
            time_limit_s=settings.time_limit_s,
            seed=settings.seed,
        )
        made.append((plan, make_program(plan, meeting.rank, most_bytes=settings.message_bytes)))
        return _shown(f"{plan.digest[:16]} in messages of at most {settings.message_bytes} bytes")

    check_equal(agreed(meeting, "plan", planned), "plan")
    ((plan, program),) = made
    people = {rank: ProcessIdentity.from_json(claim["who"]) for rank, claim in claims.items()}
    world = World.current()
    world.add_plan(number, roll)
    return Agreement(
        number=number,
        items=items,
        plan=plan,
        program=program,
        rank=meeting.rank,
        people=people,
        device=device,
        wire=wire,
        roll=roll,
        watch_store=dist.PrefixStore(
            f"{meeting.session}/watch",
            world.watch_connection() if settings.watch else default_store(),
        ),
        world=world,
    )


def _topology(
    meeting: Meeting,
    host_of: Mapping[int, str],
    wire: Wire,
    device: torch.device,
    settings: Settings,
) -> Topology:
    topology = settings.topology
    if topology is None and settings.cluster is not None:
        topology = cluster_topology(settings.cluster, list(host_of))
    topology = topology or replace(ASSUMED, hosts=host_groups(host_of))
    if not settings.measure:
        return topology
    return measured_rates(
        topology, meeting.rank, wire, device, lambda rates: meeting.gather("rates", rates)
    )


def _introduction(meeting: Meeting, settings: Settings) -> TransferClaim:
    who = ProcessIdentity.of_this_process(dist.get_rank()).to_json()
    return {"who": who, "host": host_name(), "number": meeting.number, "name": settings.name}


def _check_names(claims: Mapping[int, Mapping[str, Any]]) -> None:
    odd = odd_ones({rank: claim["name"] for rank, claim in claims.items()})
    if odd is not None:
        rank, usual = odd.ranks[0], odd.usual
        raise InputError(
            f"rank {rank} makes plan {claims[rank]['name']!r} where rank {usual} makes plan "
            f"{claims[usual]['name']!r}",
            hint="make plans in the same order on all ranks",
        )


def _shown(text: str) -> TransferClaim:
    return {"digest": digest(text), "shown": text[:_SHOWN_CHARACTERS]}


def _held(tensors: Mapping[str, DTensor] | None, src_mesh: DeviceMesh | None) -> TransferClaim:
    rank = dist.get_rank()
    if tensors is None:
        if src_mesh is not None and rank in MeshRanks.of(src_mesh).ranks:
            raise InputError(
                "this rank is in src_mesh but gave no tensor", hint="give the tensor there"
            )
        return {}
    sources = held_tensors(tensors, src_mesh, rank)
    return sources_claim(sources, whole=rank == min(sources[0].mesh.ranks))


def _check_group(items: Sequence[PlannedTensor], settings: Settings) -> None:
    """Raises InputError unless the process group can move these tensors."""
    group = _group(settings)
    layouts = [layout for item in items for layout in (item.source.held(), item.destination)]
    members = set(dist.get_process_group_ranks(group))
    outside = sorted({rank for layout in layouts for rank in layout.ranks} - members)
    if outside:
        raise InputError(
            f"rank {outside[0]} of a mesh is not in the process group",
            hint="make the meshes of ranks of one world, and give a group that has them all",
        )
    types = sorted({item.source.mesh.device_type for item in items})
    if len(types) > 1:
        raise InputError(f"tensors on {' and '.join(types)}", hint="make a plan for each")
    backends = dict(
        part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part
    )
    # gloo would read device memory as its own.
    if types[0] not in backends or (types[0], backends[types[0]]) == ("cuda", "gloo"):
        raise InputError(
            f"the process group has backends {backends}, and the tensors are on {types[0]}",
            hint='init_process_group("cpu:gloo,cuda:nccl") serves both',
        )


def _device(device_type: str) -> torch.device:
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def _group(settings: Settings) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise InputError(
            "there is no process group", hint="call torch.distributed.init_process_group first"
        )
    group = settings.group or dist.group.WORLD
    assert group is not None
    return group
