"""Makes a plan: tasks, then hops by a strategy, then their order, then the proof by simulation."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from interlace.errors import InputError, nearest
from interlace.reshard.planning.balance import balance
from interlace.reshard.planning.bounds import lower_bound_ns
from interlace.reshard.planning.chunking import Cutter, check_count, default_chunk_bytes
from interlace.reshard.planning.exact import exact
from interlace.reshard.planning.hops import Hops
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.links import Links
from interlace.reshard.planning.loads import Loads
from interlace.reshard.planning.ordering import Sequenced, host_tasks, load_balance, naive
from interlace.reshard.planning.plan import (
    ORDERS,
    STRATEGIES,
    Copy,
    Plan,
    Task,
    TensorSpec,
    Transfer,
)
from interlace.reshard.planning.random_greedy import random_greedy
from interlace.reshard.planning.schedule import order_hops
from interlace.reshard.planning.search import search
from interlace.reshard.planning.simulate import run
from interlace.reshard.planning.strategies import WAYS
from interlace.reshard.planning.tasks import Bundle, make_bundles, make_tasks
from interlace.reshard.planning.topology import Topology

BALANCED = "balanced"
FEW = 5_000
"""Up to so many messages, `auto` also tries sending directly, which saves the hops' latency."""


def make_plan(
    specs: Sequence[TensorSpec],
    topology: Topology,
    *,
    strategy: str = "auto",
    order: str = "auto",
    chunk_bytes: int | None = None,
    time_limit_s: float = 1.0,
    seed: int = 0,
) -> Plan:
    """How these tensors move; the same on every rank for the same inputs.

    `chunk_bytes` bounds a message; without it messages are small against the busiest port's load,
    and large against what their number costs. `time_limit_s` (counted in steps, not by a clock) is
    for the orders `search` and `exact`, `seed` for `random_greedy`. InputError for unknown names,
    ranks that the topology lacks, and an `exact` order that cannot be proved in time.
    """
    _check(specs, topology, strategy, order, chunk_bytes)
    tasks, copies = make_tasks(specs)
    bundles = make_bundles(specs, tasks)
    links = Links(topology)
    size = chunk_bytes or default_chunk_bytes(bundles, links)
    check_count(bundles, size, given=chunk_bytes is not None)
    cut = Cutter(specs, tasks, size)
    order = BALANCED if order == "auto" else order
    sequence = None
    if order != BALANCED:
        sequence = _sequence(order, bundles, links, time_limit_s, seed)
    way = "broadcast" if strategy == "auto" else strategy
    hops = _hops(way, bundles, links, cut, sequence)
    plans = [_plan(specs, topology, tasks, copies, way, order, hops, links)]
    if strategy == "auto" and order == BALANCED and 0 < len(hops) <= FEW:
        direct = _hops("send_recv", bundles, links, cut, None)
        plans.append(_plan(specs, topology, tasks, copies, "send_recv", order, direct, links))
    best = min(plans, key=lambda plan: plan.predicted_ns)
    best = replace(best, lower_bound_ns=lower_bound_ns(bundles, topology))
    return replace(best, digest=_digest(best))


def _check(
    specs: Sequence[TensorSpec],
    topology: Topology,
    strategy: str,
    order: str,
    chunk_bytes: int | None,
) -> None:
    for name, value, known in (("strategy", strategy, STRATEGIES), ("order", order, ORDERS)):
        if value not in known:
            raise InputError(f"unknown {name} {value!r}", hint=nearest(value, known))
    if chunk_bytes is not None and chunk_bytes < 1:
        raise InputError(f"chunk_bytes = {chunk_bytes}", hint="a message has at least one byte")
    known_ranks = {rank for host in topology.hosts for rank in host}
    for layout in {layout for spec in specs for layout in (spec.source, spec.destination)}:
        missing = [rank for rank in layout.ranks if rank not in known_ranks]
        if missing:
            raise InputError(
                f"ranks {missing[:8]} of a mesh are on no host of the topology",
                hint="name every rank of both meshes in Topology.hosts",
            )


def _sequence(
    order: str, bundles: Sequence[Bundle], links: Links, time_limit_s: float, seed: int
) -> Sequenced:
    tasks = host_tasks(bundles, links)
    if order == "naive":
        return naive(tasks)
    if order == "load_balance":
        return load_balance(tasks)
    if order == "search":
        return search(tasks, time_limit_s=time_limit_s)
    if order == "random_greedy":
        return random_greedy(tasks, seed=seed)
    return exact(tasks, time_limit_s=time_limit_s, seed=seed)


def _hops(
    way: str, bundles: Sequence[Bundle], links: Links, cut: Cutter, sequence: Sequenced | None
) -> Hops:
    """All messages, in the order of the list."""
    hops = Hops()
    loads = Loads(hops, links)
    if sequence is not None:
        for b, host in sequence:
            senders = [rank for rank in bundles[b].senders if links.host[rank] == host]
            WAYS[way](loads, bundles[b], senders, cut)
        return hops
    if way == "broadcast":
        balance(loads, bundles, cut)
    else:
        for bundle in bundles:
            WAYS[way](loads, bundle, bundle.senders, cut)
    return hops.in_order(order_hops(hops, links))


def _plan(
    specs: Sequence[TensorSpec],
    topology: Topology,
    tasks: tuple[Task, ...],
    copies: tuple[Copy, ...],
    strategy: str,
    order: str,
    hops: Hops,
    links: Links,
) -> Plan:
    parts = [hops.chunks[chunk].parts for chunk in hops.chunk]
    transfers = tuple(map(Transfer, hops.sender, hops.receiver, parts))
    sizes = {id(chunk.parts): chunk.size_bytes for chunk in hops.chunks}
    return Plan(
        specs=tuple(specs),
        topology=topology,
        tasks=tasks,
        transfers=transfers,
        copies=copies,
        strategy=strategy,
        order=order,
        predicted_ns=run(tasks, transfers, sizes, topology).makespan_ns,
        lower_bound_ns=0,
        digest="",
    )


def _digest(plan: Plan) -> str:
    """SHA-256 over everything that a rank acts on; repeated layouts and parts are named once."""
    sha = hashlib.sha256()
    layouts: dict[Layout, int] = {}
    for spec in plan.specs:
        numbers = [layouts.setdefault(at, len(layouts)) for at in (spec.source, spec.destination)]
        sha.update(repr((spec.name, spec.shape, spec.itemsize, numbers)).encode())
    head = (list(layouts), plan.topology, plan.strategy, plan.order)
    times = (plan.predicted_ns, plan.lower_bound_ns)
    sha.update(repr((*head, times)).encode())
    for task in plan.tasks:
        sha.update(repr(task).encode())
    for copy in plan.copies:
        sha.update(b"%d %d;" % (copy.rank, copy.task))
    names: dict[int, int] = {}
    for transfer in plan.transfers:
        name = names.setdefault(id(transfer.parts), len(names))
        if name == len(names) - 1:
            sha.update(repr(transfer.parts).encode())
        sha.update(b"%d %d %d;" % (transfer.sender, transfer.receiver, name))
    return sha.hexdigest()
