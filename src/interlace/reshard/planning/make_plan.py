"""Makes a plan: tasks, then hops by a strategy, then their order, then the proof by simulation."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from interlace.errors import InputError, nearest
from interlace.hardware.topology import Topology
from interlace.reshard.planning.chunking import Cutter, check_count, default_chunk_bytes
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.move_bounds import lower_bound_ns
from interlace.reshard.planning.resharding_problem import BALANCED, ReshardingProblem
from interlace.reshard.planning.tasks import make_bundles, make_tasks
from interlace.reshard.planning.transfer_plan import ORDERS, STRATEGIES, TensorSpec, TransferPlan

FEW = 5_000
"""Messages up to which `auto` makes other plans too, a choice: one that sends directly, which saves
the hops' latency, and one in the paper's order, in which a host hears one other for long."""
FEW_TASKS, _SEARCH_S = 40, 0.1
"""Tasks up to which the paper's order is searched for, and seconds for which it is; a choice."""
CLOSE = 0.02
"""Of plans whose predicted times are this close (a share), the one with the fewest pairs of ranks
that talk between hosts is taken: each is a connection, and those that share a port slow each other.
In a lab of 5 hosts, moves over more of them took 2 to 20 % longer than predicted, over the fewest 2
to 6 %."""


def make_plan(
    specs: Sequence[TensorSpec],
    topology: Topology,
    *,
    strategy: str = "auto",
    order: str = "auto",
    chunk_bytes: int | None = None,
    time_limit_s: float = 1.0,
    seed: int = 0,
) -> TransferPlan:
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
    problem = ReshardingProblem(
        specs=specs,
        topology=topology,
        tasks=tasks,
        copies=copies,
        bundles=bundles,
        links=links,
        cut=Cutter(specs, tasks, size),
        seed=seed,
    )
    best = _best(problem, _plans(problem, strategy, order, time_limit_s))
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


def _plans(
    problem: ReshardingProblem, strategy: str, order: str, limit_s: float
) -> list[TransferPlan]:
    """The plan that was asked for; with `auto` others as well."""
    way = "broadcast" if strategy == "auto" else strategy
    plans = [problem.plan(way, BALANCED if order == "auto" else order, limit_s)]
    if strategy != "auto" or not 0 < len(plans[0].transfers) <= FEW:
        return plans
    if order in ("auto", BALANCED):
        plans.append(problem.plan("send_recv", BALANCED, limit_s))
    if order == "auto" and len(problem.bundles) <= FEW_TASKS:
        plans.append(problem.plan(way, "search", min(limit_s, _SEARCH_S)))
    return plans


def _best(problem: ReshardingProblem, plans: Sequence[TransferPlan]) -> TransferPlan:
    """The fastest; of those that are `CLOSE` the one with the fewest connections."""
    longest_ns = (1 + CLOSE) * min(plan.predicted_ns for plan in plans)
    close = [plan for plan in plans if plan.predicted_ns <= longest_ns]
    return min(close, key=lambda plan: (problem.connections(plan), plan.predicted_ns))


def _digest(plan: TransferPlan) -> str:
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
