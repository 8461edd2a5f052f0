"""Messages between the chunks of a model that lie on different ranks, and who reads whom.

send forward_0>1 2 to rank 1         activations of micro-batch 2, from chunk 0 to chunk 1
receive backward_1>0 2 from rank 1   their gradients
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from interlace.ir.actions import Action, Direction, Share


@dataclass(frozen=True, slots=True)
class StageMessage:
    """What a chunk hands to another one for a micro-batch."""

    direction: Direction
    """Forward: activations; backward: their gradients."""
    source: int
    to: int
    micro_batch: int

    def __str__(self) -> str:
        """`forward_0>1 2`."""
        return f"{self.direction}_{self.source}>{self.to} {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Give a message to another rank, without waiting until it has arrived."""

    message: StageMessage
    rank: int
    """The other rank."""

    def __str__(self) -> str:
        """`send forward_0>1 2 to rank 1`."""
        return f"send {self.message} to rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Be ready for a message of another rank. The action that needs it waits for it."""

    message: StageMessage
    rank: int
    """The other rank."""

    def __str__(self) -> str:
        """`receive forward_0>1 2 from rank 0`."""
        return f"receive {self.message} from rank {self.rank}"


Item = Action | Send | Receive
"""What stands in the list of a rank."""
Edge = tuple[int, int]
"""(chunk, chunk that reads what it makes)."""


def chain(chunks: int) -> tuple[Edge, ...]:
    """The edges of a model whose chunks each read the one before."""
    return tuple((chunk, chunk + 1) for chunk in range(chunks - 1))


def chunks_of(ranks: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The rank of each chunk, as its actions say. A chunk without a number is chunk 0."""
    return {
        slot.strand.chunk or 0: rank
        for rank, actions in enumerate(ranks)
        for action in actions
        for slot in action.slots
    }


class Wiring:
    """Which messages the actions of a schedule give and take."""

    def __init__(self, ranks: Sequence[Sequence[Action]], edges: Collection[Edge]) -> None:
        self.rank_of = chunks_of(ranks)
        """By chunk."""
        across = [(s, t) for s, t in edges if self.rank_of[s] != self.rank_of[t]]
        self._readers: dict[int, list[int]] = {}
        self._read: dict[int, list[int]] = {}
        for source, reader in across:
            self._readers.setdefault(source, []).append(reader)
            self._read.setdefault(reader, []).append(source)

    def sent(self, action: Action) -> list[StageMessage]:
        """What other ranks need of an action: of a forward its outputs, of a backward the gradients
        of its inputs."""
        found = []
        for slot in action.slots:
            strand = slot.strand
            if strand.share != Share.WEIGHT:  # gradients of weights stay where they are
                chunk, way = strand.chunk or 0, strand.direction
                others = self._readers if way == Direction.FORWARD else self._read
                for other in others.get(chunk, ()):
                    found.append(StageMessage(way, chunk, other, slot.micro_batch))
        return found

    def needed(self, action: Action) -> list[StageMessage]:
        """What an action needs of other ranks: a forward what it reads, a backward the gradients of
        what its forward made."""
        found = []
        for slot in action.slots:
            strand = slot.strand
            if strand.share != Share.WEIGHT:
                chunk, way = strand.chunk or 0, strand.direction
                others = self._read if way == Direction.FORWARD else self._readers
                for other in others.get(chunk, ()):
                    found.append(StageMessage(way, other, chunk, slot.micro_batch))
        return found
