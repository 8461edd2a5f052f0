"""Messages while a plan is being made: who sends which chunk to whom, and after which other; and
the bytes that every end has been given so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.tasks import Chunk

HELD = -1
"""In place of a hop: the sender holds the chunk from the start."""


@dataclass(slots=True)
class Hops:
    """Messages as columns; a hop's `before` is the hop that brings the chunk to its sender."""

    chunks: list[Chunk] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sender)

    def new_chunk(self, chunk: Chunk) -> int:
        """The number of a chunk from now on."""
        self.chunks.append(chunk)
        return len(self.chunks) - 1

    def add(self, sender: int, receiver: int, chunk: int, before: int = HELD) -> int:
        """Append one message; returns its number, larger than that of `before`."""
        self.sender.append(sender)
        self.receiver.append(receiver)
        self.chunk.append(chunk)
        self.before.append(before)
        return len(self.sender) - 1

    def size_bytes(self, hop: int) -> int:
        """Bytes of one message."""
        return self.chunks[self.chunk[hop]].size_bytes

    def in_order(self, order: list[int]) -> "Hops":
        """The same hops in another order, numbered anew."""
        place = [0] * len(order)
        for new, old in enumerate(order):
            place[old] = new
        return Hops(
            self.chunks,
            [self.sender[i] for i in order],
            [self.receiver[i] for i in order],
            [self.chunk[i] for i in order],
            [HELD if self.before[i] == HELD else place[self.before[i]] for i in order],
        )


class Loads:
    """Adds hops and counts what their ends carry."""

    def __init__(self, hops: Hops, links: Links) -> None:
        self.hops = hops
        self.links = links
        self.sent = [0] * links.nics
        self.received = [0] * links.nics
        self.passed = dict.fromkeys(links.host, 0)
        """Bytes that a device has sent inside its host."""

    def across(self, sender: int, receiver: int, chunk: int, before: int = HELD) -> int:
        """A message to another host."""
        size = self.hops.chunks[chunk].size_bytes
        self.sent[self.links.nic[sender]] += size
        self.received[self.links.nic[receiver]] += size
        return self.hops.add(sender, receiver, chunk, before)

    def inside(self, sender: int, receiver: int, chunk: int, before: int = HELD) -> int:
        """A message inside a host."""
        self.passed[sender] += self.hops.chunks[chunk].size_bytes
        return self.hops.add(sender, receiver, chunk, before)

    def send(self, sender: int, receiver: int, chunk: int, before: int = HELD) -> int:
        """A message to wherever the receiver is."""
        local = self.links.host[sender] == self.links.host[receiver]
        return (self.inside if local else self.across)(sender, receiver, chunk, before)

    def least_sent(self, ranks: Sequence[int]) -> int:
        """The rank whose port has sent least, then the one that has passed on least."""
        nic, sent, passed = self.links.nic, self.sent, self.passed
        return min(ranks, key=lambda rank: (sent[nic[rank]], passed[rank]))

    def least_received(self, ranks: Sequence[int]) -> int:
        """The rank whose port has received least, then the one that has passed on least."""
        nic, received, passed = self.links.nic, self.received, self.passed
        return min(ranks, key=lambda rank: (received[nic[rank]], passed[rank]))

    def spread(self, have: dict[int, int], needers: Sequence[int], chunk: int) -> None:
        """Inside a host: whoever has the chunk and has passed on least serves the next needer.

        `have` maps ranks to the hop that brought the chunk, and grows.
        """
        for rank in needers:
            sender = min(have, key=self.passed.__getitem__)
            have[rank] = self.inside(sender, rank, chunk, have[sender])
