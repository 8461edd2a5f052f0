"""One resharding problem, planned in one way or another."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.hardware.topology import Topology
from interlace.reshard.planning.chunking import Cutter, balance
from interlace.reshard.planning.depth_first import search
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.exact import exact
from interlace.reshard.planning.hops import Hops, Loads
from interlace.reshard.planning.open_shop import order_hops
from interlace.reshard.planning.ordering import Sequenced, host_tasks, load_balance, naive
from interlace.reshard.planning.random_greedy import random_greedy
from interlace.reshard.planning.simulate import run
from interlace.reshard.planning.strategies import WAYS
from interlace.reshard.planning.tasks import Bundle
from interlace.reshard.planning.transfer_plan import Copy, Task, TensorSpec, Transfer, TransferPlan

BALANCED = "balanced"
"""Name of our own order, which cuts tasks into chunks (`balance`)."""


@dataclass(frozen=True, kw_only=True)
class ReshardingProblem:
    """What has to move, and over what."""

    specs: Sequence[TensorSpec]
    topology: Topology
    tasks: tuple[Task, ...]
    copies: tuple[Copy, ...]
    bundles: Sequence[Bundle]
    links: Links
    cut: Cutter
    seed: int

    def plan(self, way: str, order: str, limit_s: float) -> TransferPlan:
        """By this strategy and order, neither of them `auto`; without bound and digest.

        `limit_s` is for the orders `search` and `exact`.
        """
        hops = self._balanced(way) if order == BALANCED else self._in_sequence(way, order, limit_s)
        parts = [hops.chunks[chunk].parts for chunk in hops.chunk]
        transfers = tuple(map(Transfer, hops.sender, hops.receiver, parts))
        sizes = {id(chunk.parts): chunk.size_bytes for chunk in hops.chunks}
        return TransferPlan(
            specs=tuple(self.specs),
            topology=self.topology,
            tasks=self.tasks,
            transfers=transfers,
            copies=self.copies,
            strategy=way,
            order=order,
            predicted_ns=run(self.tasks, transfers, sizes, self.topology).makespan_ns,
            lower_bound_ns=0,
            digest="",
        )

    def connections(self, plan: TransferPlan) -> int:
        """Pairs of ranks on different hosts of which one sends to the other."""
        host = self.links.host
        pairs = {(transfer.sender, transfer.receiver) for transfer in plan.transfers}
        return sum(host[sender] != host[receiver] for sender, receiver in pairs)

    def _balanced(self, way: str) -> Hops:
        hops = Hops()
        loads = Loads(hops, self.links)
        if way == "broadcast":
            balance(loads, self.bundles, self.cut)
        else:
            for bundle in self.bundles:
                WAYS[way](loads, bundle, bundle.senders, self.cut)
        return hops.in_order(order_hops(hops, self.links))

    def _in_sequence(self, way: str, order: str, limit_s: float) -> Hops:
        hops = Hops()
        loads = Loads(hops, self.links)
        for b, host in self._sequence(order, limit_s):
            bundle = self.bundles[b]
            senders = [rank for rank in bundle.senders if self.links.host[rank] == host]
            WAYS[way](loads, bundle, senders, self.cut)
        return hops

    def _sequence(self, order: str, limit_s: float) -> Sequenced:
        tasks = host_tasks(self.bundles, self.links)
        if order == "naive":
            return naive(tasks)
        if order == "load_balance":
            return load_balance(tasks)
        if order == "search":
            return search(tasks, time_limit_s=limit_s)
        if order == "random_greedy":
            return random_greedy(tasks, seed=self.seed)
        return exact(tasks, time_limit_s=limit_s, seed=self.seed)
