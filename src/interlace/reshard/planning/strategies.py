"""How one bundle travels: the four ways of the paper (section 3.1), as lists of hops.

With a slice that takes t on one network port, A receiving hosts and B devices on each:

    send_recv          the sender sends all of it to each device              A B t
    local_all_gather   1/B to each device of a host, exchanged inside it      A t
    global_all_gather  1/(A B) to each device, ring all-gather over all       t + t (A - 1) / A
    broadcast          a chain over the hosts in K chunks                     t + (A - 1) t / K

Receivers on a sender's own host get the slice from there by its fast links, whatever the way.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from interlace.reshard.planning.hops import HELD, Loads
from interlace.reshard.planning.tasks import Bundle, Chunk

IntoChunks = Callable[[Bundle, int], Sequence[Chunk]]
"""A bundle in so many chunks, or more if they would be too large."""


def send_recv(loads: Loads, bundle: Bundle, senders: Sequence[int], cut: IntoChunks) -> None:
    """Device by device; each takes the sender whose port has sent least."""
    chunks = [loads.hops.new_chunk(chunk) for chunk in cut(bundle, 1)]
    serve_own_hosts(loads, bundle, chunks)
    for receiver in remote_receivers(loads, bundle):
        sender = loads.least_sent(senders)
        for chunk in chunks:
            loads.across(sender, receiver, chunk)


def local_all_gather(loads: Loads, bundle: Bundle, senders: Sequence[int], cut: IntoChunks) -> None:
    """Host by host: a share to each of its devices, which exchange them."""
    hosts = loads.links.by_host(remote_receivers(loads, bundle))
    sizes = {len(ranks) for ranks in hosts.values()} or {1}
    shares = {size: _numbered(loads, cut(bundle, size)) for size in sorted(sizes)}
    serve_own_hosts(loads, bundle, shares[max(sizes)])
    for ranks in hosts.values():
        sender = loads.least_sent(senders)
        chunks = shares[len(ranks)]
        owners = [ranks[i * len(ranks) // len(chunks)] for i in range(len(chunks))]
        arrivals = [
            loads.across(sender, owner, chunk) for owner, chunk in zip(owners, chunks, strict=True)
        ]
        for owner, chunk, arrival in zip(owners, chunks, arrivals, strict=True):
            for other in ranks:
                if other != owner:
                    loads.inside(owner, other, chunk, arrival)


def global_all_gather(
    loads: Loads, bundle: Bundle, senders: Sequence[int], cut: IntoChunks
) -> None:
    """A share to each device, then a ring over all devices, host after host."""
    hosts = loads.links.by_host(remote_receivers(loads, bundle))
    ring = [rank for ranks in hosts.values() for rank in ranks]
    chunks = _numbered(loads, cut(bundle, max(len(ring), 1)))
    serve_own_hosts(loads, bundle, chunks)
    if not ring:
        return
    sender = loads.least_sent(senders)
    owners = [i * len(ring) // len(chunks) for i in range(len(chunks))]
    last = [
        loads.across(sender, ring[owner], chunk)
        for owner, chunk in zip(owners, chunks, strict=True)
    ]
    for step in range(1, len(ring)):
        for i, (owner, chunk) in enumerate(zip(owners, chunks, strict=True)):
            at, to = ring[(owner + step - 1) % len(ring)], ring[(owner + step) % len(ring)]
            last[i] = loads.send(at, to, chunk, last[i])


def chain(loads: Loads, bundle: Bundle, senders: Sequence[int], cut: IntoChunks) -> None:
    """Chunk by chunk along the hosts; inside a host along its devices."""
    chunks = _numbered(loads, cut(bundle, 1))
    serve_own_hosts(loads, bundle, chunks)
    hosts = loads.links.by_host(remote_receivers(loads, bundle))
    if not hosts:
        return
    for chunk in chunks:
        at, before = loads.least_sent(senders), HELD
        entries = []
        for ranks in hosts.values():
            before = loads.across(at, ranks[0], chunk, before)
            at = ranks[0]
            entries.append(before)
        for ranks, entry in zip(hosts.values(), entries, strict=True):
            for sender, receiver in pairwise(ranks):
                entry = loads.inside(sender, receiver, chunk, entry)  # noqa: PLW2901


WAYS = {
    "send_recv": send_recv,
    "local_all_gather": local_all_gather,
    "global_all_gather": global_all_gather,
    "broadcast": chain,
}
"""The function of each strategy, by its name."""


def remote_receivers(loads: Loads, bundle: Bundle) -> list[int]:
    """Receivers on hosts that hold nothing of the bundle."""
    host = loads.links.host
    holding = {host[rank] for rank in bundle.senders}
    return [rank for rank in bundle.receivers if host[rank] not in holding]


def serve_own_hosts(loads: Loads, bundle: Bundle, chunks: Sequence[int]) -> None:
    """Receivers on a host that holds the bundle get it inside that host."""
    holders = loads.links.by_host(bundle.senders)
    needers = loads.links.by_host(bundle.receivers)
    for host in sorted(holders.keys() & needers.keys()):
        for chunk in chunks:
            loads.spread(dict.fromkeys(holders[host], HELD), needers[host], chunk)


def _numbered(loads: Loads, chunks: Sequence[Chunk]) -> list[int]:
    return [loads.hops.new_chunk(chunk) for chunk in chunks]
