"""Bytes that every end has been given so far, and choices of the one that has least."""

from collections.abc import Sequence

from interlace.reshard.planning.hops import HELD, Hops
from interlace.reshard.planning.links import Links


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
