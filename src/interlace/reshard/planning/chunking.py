"""How large messages are."""

from collections.abc import Sequence
from math import log2

from interlace.errors import InputError
from interlace.reshard.planning.balance import CHAIN
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.tasks import Bundle, Chunk, cut
from interlace.reshard.planning.transfer_plan import Task, TensorSpec

FILL = 0.02
"""Share of the busiest port's time in which chains may fill and drain."""
LEAST_BYTES = 64 * 1024
"""Smaller messages cost more in calls than they gain."""
MANY = 100_000
"""Messages at which chunks get larger instead; about 2 s of planning."""
MOST = 8_000_000
"""Messages that a plan may have: about 3 GB of memory."""


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
