"""How large messages are, and our own order of them.

Ours: all bundles in chunks, every chunk on its own tree, so that all ports are equally busy.

The chunks of all bundles are dealt out in turn, each bundle in proportion to its size. A chunk
goes to its receiving hosts one after the other; whoever has it and whose port has sent least sends
it next, senders and receivers alike. So a slice that several hosts hold leaves all of them in
shares, and hosts that are busy sending do not forward. Dealt out in small chunks this tends to the
fractional optimum of the largest port load: a bundle never adds to a port while another that could
send it has less.

The first receiving host changes from chunk to chunk, so no host is always the last, who forwards
nothing. Receiving hosts beyond `CHAIN` form trees instead of chains: a port may get ahead of the
others by two chunks, and among those within that the one nearest to the source sends.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import log2

from interlace.errors import InputError
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.hops import HELD, Loads
from interlace.reshard.planning.strategies import IntoChunks, remote_receivers, serve_own_hosts
from interlace.reshard.planning.tasks import Bundle, Chunk, cut
from interlace.reshard.planning.transfer_plan import Task, TensorSpec

CHAIN = 8
"""Receiving hosts up to which chunks go along chains, and beyond which along trees; a choice: the
last host of a long chain begins late."""
CANDIDATES = 32
"""Holders that are considered for one chunk, others for the next; a choice that bounds the time of
planning."""


def balance(loads: Loads, bundles: Sequence[Bundle], cut: IntoChunks) -> None:
    """Add the hops of all bundles."""
    dealt = []
    for b, bundle in enumerate(bundles):
        chunks = [loads.hops.new_chunk(chunk) for chunk in cut(bundle, 1)]
        dealt += [((2 * k + 1) / len(chunks), b, k, chunk) for k, chunk in enumerate(chunks)]
    dealt.sort()
    remote = [loads.links.by_host(remote_receivers(loads, bundle)) for bundle in bundles]
    first_of_port = [_one_per_port(loads, bundle.senders) for bundle in bundles]
    turn = 0
    for _, b, k, chunk in dealt:
        serve_own_hosts(loads, bundles[b], (chunk,))
        if remote[b]:
            hosts = list(remote[b].values())
            start = (b + k) % len(hosts)
            senders = first_of_port[b]
            if len(senders) > CANDIDATES:
                at = turn % len(senders)
                senders = (senders[at:] + senders[:at])[:CANDIDATES]
                turn += CANDIDATES
            _grow(loads, senders, hosts[start:] + hosts[:start], chunk)


def _grow(loads: Loads, senders: Sequence[int], hosts: Sequence[Sequence[int]], chunk: int) -> None:
    """One chunk's tree over the receiving hosts, and inside each over its devices."""
    nic, sent = loads.links.nic, loads.sent
    grain = 2 * loads.hops.chunks[chunk].size_bytes if len(hosts) > CHAIN else 1
    able = [(sent[nic[rank]] // grain, 0, i, rank, HELD) for i, rank in enumerate(senders)]
    heapify(able)
    number = len(able)
    for ranks in hosts:
        _, depth, i, sender, before = heappop(able)
        entry = loads.least_received(ranks)
        arrival = loads.across(sender, entry, chunk, before)
        heappush(able, (sent[nic[sender]] // grain, depth, i, sender, before))
        have = {entry: arrival}
        at = ranks.index(entry)
        loads.spread(have, [*ranks[at + 1 :], *ranks[:at]], chunk)
        for rank in _one_per_port(loads, have):
            heappush(able, (sent[nic[rank]] // grain, depth + 1, number, rank, have[rank]))
            number += 1


def _one_per_port(loads: Loads, ranks: Sequence[int] | dict[int, int]) -> list[int]:
    """The first of the ranks at each network port."""
    found: dict[int, int] = {}
    for rank in ranks:
        found.setdefault(loads.links.nic[rank], rank)
    return list(found.values())


FILL = 0.02
"""Share of the busiest port's time in which chains may fill and drain; a choice."""
LEAST_BYTES = 64 * 1024
"""Least size of a chunk: smaller messages cost more in calls than they gain; a choice."""
MANY = 100_000
"""Messages at which chunks get larger instead; a choice: about 2 s of planning."""
MOST = 8_000_000
"""Most messages that a plan may have; a choice: about 3 GB of memory."""


class Cutter:
    """Cuts bundles into chunks of up to `chunk_bytes`, one element at least."""

    def __init__(
        self, specs: Sequence[TensorSpec], tasks: Sequence[Task], chunk_bytes: int
    ) -> None:
        self.specs, self.tasks, self.chunk_bytes = specs, tasks, chunk_bytes

    def __call__(self, bundle: Bundle, shares: int) -> list[Chunk]:
        """`shares` chunks, or the least multiple of them whose chunks are small enough."""
        each = -(-bundle.size_bytes // shares)
        pieces = shares * -(-each // self.chunk_bytes)
        return cut(self.specs, self.tasks, bundle, pieces)


def default_chunk_bytes(bundles: Sequence[Bundle], links: Links) -> int:
    """Chunks by which the longest chain fills within `FILL` of the busiest port's time."""
    into: dict[int, float] = {}
    depth = 1.0
    for bundle in bundles:
        holding = {links.host[rank] for rank in bundle.senders}
        hosts = links.by_host(bundle.receivers)
        remote = [ranks for host, ranks in hosts.items() if host not in holding]
        across = len(remote) if len(remote) <= CHAIN else 2 * log2(len(remote))
        inside = max(map(len, hosts.values())) - 1
        depth = max(depth, across + inside * links.inside_share)
        for ranks in remote:
            ports = {links.nic[rank] for rank in ranks}
            for port in ports:
                into[port] = into.get(port, 0.0) + bundle.size_bytes / len(ports)
    total = sum(bundle.size_bytes for bundle in bundles)
    busiest = max(into.values(), default=total)
    size = max(int(FILL * busiest / depth), LEAST_BYTES)
    fewest = messages(bundles, max(total, 1))
    while messages(bundles, size) > max(MANY, fewest):
        size *= 2
    return size


def messages(bundles: Sequence[Bundle], chunk_bytes: int) -> int:
    """Messages of a broadcast of all bundles in such chunks."""
    return sum(-(-b.size_bytes // chunk_bytes) * len(b.receivers) for b in bundles)


def check_count(bundles: Sequence[Bundle], chunk_bytes: int, *, given: bool) -> None:
    """InputError where a plan would have more than `MOST` messages."""
    count = messages(bundles, chunk_bytes)
    if count > MOST:
        raise InputError(
            f"{count} messages, more than {MOST}, in chunks of {chunk_bytes} bytes",
            hint=f"set chunk_bytes = {chunk_bytes * -(-count // MOST)} or more"
            if given
            else "move the tensors in several plans",
        )
