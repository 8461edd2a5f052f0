"""Lower bounds: what the busiest port has to carry even if everything is shared at best.

    in    every byte that a host needs and does not hold crosses the ports of its receivers once
    out   every byte leaves the ports of its holders at least once, and all ports as many times as
          there are hosts that need it; copies after the first may come from ranks that received it

Both are fractional assignments: the largest load is at least (bytes of S) / (ports that can carry
any of S) for every set S of slices, and for one set it is exactly that. Sets are found as minimum
cuts, each better than the last (Dinkelbach's method), so only few flows are solved. Ranks that
neither hold nor need a slice do not relay it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import floor, lcm

from interlace.hardware.topology import Topology
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.tasks import Bundle

Demand = tuple[int, tuple[int, ...]]
"""(amount, places that can carry a share of it)."""


def lower_bound_ns(bundles: Sequence[Bundle], topology: Topology) -> int:
    """No schedule of these bundles is shorter."""
    links = Links(topology)
    port_bytes = max(_into(bundles, links), _out_of(bundles, links))
    bound = max(links.port_ns(port_bytes), _devices_ns(bundles, topology))
    return bound + topology.latency_ns if bundles else 0


def least_load(demands: Iterable[Demand]) -> int:
    """The smallest possible largest load when every demand is shared among its places."""
    merged: dict[tuple[int, ...], int] = {}
    for amount, places in demands:
        if amount:
            key = tuple(sorted(set(places)))
            merged[key] = merged.get(key, 0) + amount
    if not merged:
        return 0
    sets = list(merged.items())
    everywhere = {place for places, _ in sets for place in places}
    load = max(-(-sum(merged.values()) // len(everywhere)), *(-(-n // len(p)) for p, n in sets))
    if _fits_evenly(sets, load):
        return load
    while True:
        tight = _overloaded(sets, load)
        if not tight:
            return load
        places = {place for i in tight for place in sets[i][0]}
        load = -(-sum(sets[i][1] for i in tight) // len(places))


def _ports(ranks: Iterable[int], links: Links) -> tuple[int, ...]:
    return tuple(sorted({links.nic[rank] for rank in ranks}))


def _remote(bundle: Bundle, links: Links) -> list[list[int]]:
    """Receivers of each host that holds nothing of the bundle."""
    holding = {links.host[rank] for rank in bundle.senders}
    needing = links.by_host(bundle.receivers)
    return [ranks for host, ranks in needing.items() if host not in holding]


def _into(bundles: Sequence[Bundle], links: Links) -> int:
    return least_load(
        (bundle.size_bytes, _ports(ranks, links))
        for bundle in bundles
        for ranks in _remote(bundle, links)
    )


def _out_of(bundles: Sequence[Bundle], links: Links) -> int:
    """Copies after the first count only where a port both sends and receives: ports that only
    receive need not send more than they take in."""
    first: list[Demand] = []
    more: list[Demand] = []
    receiving: set[int] = set()
    for bundle in bundles:
        hosts = _remote(bundle, links)
        if hosts:
            senders = _ports(bundle.senders, links)
            receivers = _ports(bundle.receivers, links)
            receiving.update(receivers)
            first.append((bundle.size_bytes, senders))
            more.append(((len(hosts) - 1) * bundle.size_bytes, (*senders, *receivers)))
    if receiving.isdisjoint(port for _, senders in first for port in senders):
        return least_load(first)
    return max(least_load(first), least_load([*first, *more]))


def _devices_ns(bundles: Sequence[Bundle], topology: Topology) -> int:
    """A device takes in what it needs by its own link and its host's port at most."""
    sizes = {rank: len(ranks) for ranks in topology.hosts for rank in ranks}
    into: dict[int, int] = {}
    for bundle in bundles:
        for rank in bundle.receivers:
            into[rank] = into.get(rank, 0) + bundle.size_bytes
    several = len(topology.hosts) > 1
    port = topology.inter_host_bytes_per_s if several else 0.0

    def rate(rank: int) -> float:
        return port + (topology.intra_host_bytes_per_s if sizes[rank] > 1 else 0.0)

    return max((floor(1e9 * size / rate(rank)) for rank, size in into.items()), default=0)


def _fits_evenly(sets: Sequence[tuple[tuple[int, ...], int]], load: int) -> bool:
    """Whether no place carries more than `load` when every demand is shared evenly; in whole
    numbers, as a rounded share would pass for less than it is."""
    parts = lcm(*(len(places) for places, _ in sets))
    loads: dict[int, int] = {}
    for places, amount in sets:
        for place in places:
            loads[place] = loads.get(place, 0) + amount * (parts // len(places))
    return max(loads.values()) <= load * parts


def _overloaded(sets: Sequence[tuple[tuple[int, ...], int]], load: int) -> list[int]:
    """Demands that do not fit if every place carries at most `load`: the source side of a minimum
    cut; empty if all fit."""
    left = [amount for _, amount in sets]
    room = {place: load for places, _ in sets for place in places}
    carried: dict[int, dict[int, int]] = {place: {} for place in room}
    while True:
        reached = _augment(sets, left, room, carried)
        if reached is not None:
            return sorted(reached) if any(left) else []


def _augment(
    sets: Sequence[tuple[tuple[int, ...], int]],
    left: list[int],
    room: dict[int, int],
    carried: dict[int, dict[int, int]],
) -> set[int] | None:
    """Push along one shortest path from an unserved demand to a place with room; where there is
    none, the demands reached."""
    came: dict[int, int | None] = {i: None for i, amount in enumerate(left) if amount}
    by_place: dict[int, int] = {}
    queue = deque(came)
    while queue:
        i = queue.popleft()
        for place in sets[i][0]:
            if place in by_place:
                continue
            by_place[place] = i
            if room[place]:
                _push(place, came, by_place, left, room, carried)
                return None
            for other, amount in carried[place].items():
                if amount and other not in came:
                    came[other] = place
                    queue.append(other)
    return set(came)


def _push(
    place: int,
    came: dict[int, int | None],
    by_place: dict[int, int],
    left: list[int],
    room: dict[int, int],
    carried: dict[int, dict[int, int]],
) -> None:
    """Move as much as the path allows: demand by_place[place] takes `place`, and gives up the
    place by which it was reached, and so on back to a demand that is unserved."""
    path = [(by_place[place], place)]
    amount = room[place]
    while (taken_from := came[path[-1][0]]) is not None:
        amount = min(amount, carried[taken_from][path[-1][0]])
        path.append((by_place[taken_from], taken_from))
    amount = min(amount, left[path[-1][0]])
    room[place] -= amount
    left[path[-1][0]] -= amount
    for at, (demand, to) in enumerate(path):
        carried[to][demand] = carried[to].get(demand, 0) + amount
        if at + 1 < len(path):
            carried[path[at + 1][1]][demand] -= amount
