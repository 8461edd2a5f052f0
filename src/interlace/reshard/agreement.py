"""All ranks agree on what moves, where they are, and on the plan, before anything moves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.reshard.hosts import (
    ASSUMED,
    cluster_topology,
    host_groups,
    host_name,
    measured_rates,
)
from interlace.reshard.inputs import (
    Item,
    Move,
    PlacementsOf,
    claimed_sources,
    digest,
    held_tensors,
    make_item,
    placements_for,
    sources_claim,
)
from interlace.reshard.layouts import MeshRanks, layout_text
from interlace.reshard.meeting import Meeting, Roll, agreed, check_equal, open_meeting
from interlace.reshard.planning.plan import Plan
from interlace.reshard.planning.planner import make_plan
from interlace.reshard.planning.topology import Topology
from interlace.reshard.program import Program, make_program
from interlace.reshard.settings import Settings
from interlace.reshard.wire import TAGS, Wire
from interlace.runtime.identity import ProcessIdentity

_SHOWN_CHARACTERS = 300
Claim = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks of a plan agreed on, and this rank's part of it."""

    items: Sequence[Item]
    plan: Plan
    program: Program
    rank: int
    people: Mapping[int, ProcessIdentity]
    """All ranks of the plan."""
    device: torch.device
    wire: Wire
    roll: Roll
    watch_store: dist.Store
    """With `watch` on a connection for heartbeats alone: the main thread may block in its own."""


def agree_on_moves(specs: Mapping[str, Move], settings: Settings) -> Agreement:
    """An agreement on tensors that all ranks describe alike. Called by all ranks of the meshes."""
    if not specs:
        raise InputError("there is no tensor to move", hint="give at least one")
    meshes = [mesh for move in specs.values() for mesh in (move.src_mesh, move.dst_mesh)]
    items: list[Item] = []

    def described() -> Claim:
        items.extend(
            make_item(move.source(name), move.dst_mesh, move.dst_placements)
            for name, move in specs.items()
        )
        _check_group(items, settings)
        return _introduction() | _shown("; ".join(map(str, items)))

    meeting = _meet([rank for mesh in meshes for rank in MeshRanks.of(mesh).ranks], settings)
    with meeting.last_words():
        claims = agreed(meeting, "specs", described)
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
    items: list[Item] = []

    def placed() -> Claim:
        items.extend(
            make_item(source, dst_mesh, placements_for(source.name, dst_placements))
            for source in claimed_sources(claims)
        )
        _check_group(items, settings)
        return _shown("; ".join(layout_text(item.destination) for item in items))

    meeting = _meet(ranks, settings)
    with meeting.last_words():
        claims = agreed(meeting, "tensors", lambda: _introduction() | _held(tensors, src_mesh))
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
    return open_meeting(_store(), rank, all_ranks, settings.timeout_s)


def _agree(
    meeting: Meeting,
    items: Sequence[Item],
    claims: Mapping[int, Mapping[str, str]],
    settings: Settings,
) -> Agreement:
    """Plans, and proves that all ranks have the same plan."""
    tag = 1 + int(digest(meeting.session)[:8], 16) % TAGS
    wire = Wire(group=_group(settings), tag=tag)
    device = _device(items[0].source.mesh.device_type)
    host_of = {rank: claim["host"] for rank, claim in claims.items()}
    topology = _topology(meeting, host_of, wire, device, settings)
    made: list[tuple[Plan, Program]] = []

    def planned() -> Claim:
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
    people = {
        rank: ProcessIdentity.from_json(claim["who"]).seen_from_here()
        for rank, claim in claims.items()
    }
    return Agreement(
        items=items,
        plan=plan,
        program=program,
        rank=meeting.rank,
        people=people,
        device=device,
        wire=wire,
        roll=Roll(meeting.store, meeting.rank),
        watch_store=dist.PrefixStore(
            f"{meeting.session}/watch", _watch_connection() if settings.watch else _store()
        ),
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


def _introduction() -> Claim:
    who = ProcessIdentity.of_this_process(dist.get_rank()).to_json()
    return {"who": who, "host": host_name()}


def _shown(text: str) -> Claim:
    return {"digest": digest(text), "shown": text[:_SHOWN_CHARACTERS]}


def _held(tensors: Mapping[str, DTensor] | None, src_mesh: DeviceMesh | None) -> Claim:
    rank = dist.get_rank()
    if tensors is None:
        if src_mesh is not None and rank in MeshRanks.of(src_mesh).ranks:
            raise InputError(
                "this rank is in src_mesh but gave no tensor", hint="give the tensor there"
            )
        return {}
    sources = held_tensors(tensors, src_mesh, rank)
    return sources_claim(sources, whole=rank == min(sources[0].mesh.ranks))


def _check_group(items: Sequence[Item], settings: Settings) -> None:
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


_WATCH_CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
"""Of each world one, for as long as it exists. A new connection to the store asks a name server
on both ends: a burst of them, one per transfer, stood still for 5 s at a time."""


def _watch_connection() -> dist.Store:
    """A connection of its own to the store of the default group."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _WATCH_CONNECTIONS:
        clone = getattr(_store(), "clone")  # noqa: B009 - the type stub lacks it
        _WATCH_CONNECTIONS[world] = clone()
    return _WATCH_CONNECTIONS[world]


def _store() -> dist.Store:
    """The store of the default group: it reaches every rank, also those of no common group."""
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()
