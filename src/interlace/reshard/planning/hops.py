"""Messages while a plan is being made: who sends which chunk to whom, and after which other."""

from dataclasses import dataclass, field

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
