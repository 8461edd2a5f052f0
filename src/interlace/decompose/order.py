"""In which order a rank visits the slices of all ranks, and where each slice travels.

Rows are cut into one slice per rank, its owner, and each slice into parts. A gather visits the own
slice first and a scatter the own slice last, so that no transfer comes before the first compute
and none is left after the last (CommFuse, arXiv 2604.24013, algorithms 1, 2 and 4).

    ring            slices, or partial sums of slices, travel from rank to next rank
    direct          each step exchanges with another peer: slices come straight from their owner,
                    partial sums go straight to their owner, who adds them up
    bidirectional   two rings in opposite directions, each with a half of every slice: transfers
                    take half as long where the two neighbours are behind links of their own

With two ranks there is one peer and one order, so all three are the ring.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Variant = Literal["ring", "direct", "bidirectional"]
VARIANTS: tuple[Variant, ...] = ("ring", "direct", "bidirectional")
"""Orders of sends that `overlap.decompose` names."""


class RowPart(NamedTuple):
    """Rows [start, stop) of the rows of all ranks."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many; may be 0."""
        return self.stop - self.start


class Hop(NamedTuple):
    """Ranks of the group that a step sends to and receives from."""

    to: int
    source: int


def cut(rows: int, parts: int) -> list[RowPart]:
    """`rows` in `parts` parts whose lengths differ by at most one."""
    return [RowPart(rows * i // parts, rows * (i + 1) // parts) for i in range(parts)]


def gathered_owner(rank: int, ranks: int, step: int, direction: int = 1) -> int:
    """Whose slice a gather visits in a step: the own one first, then as slices arrive."""
    return (rank - direction * step) % ranks


def scattered_owner(
    rank: int, ranks: int, step: int, direction: int = 1, *, straight: bool = False
) -> int:
    """Whose slice a scatter visits in a step: the own one last."""
    away = direction * (step + 1)
    return (rank + (away if straight else -away)) % ranks


def hop(rank: int, ranks: int, distance: int) -> Hop:
    """The ranks `distance` above, which is sent to, and as far below, which is received from."""
    return Hop((rank + distance) % ranks, (rank - distance) % ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of one rank. Step i visits, for each piece in turn and in each lane, one part of
    some owner's slice; lanes are the directions of a bidirectional ring."""

    variant: Variant
    rank: int
    rows: tuple[int, ...]
    """Of each rank's slice."""
    pieces: int = 1

    @property
    def ranks(self) -> int:
        """Size of the group, and number of steps."""
        return len(self.rows)

    @property
    def directions(self) -> tuple[int, ...]:
        """Per lane, +1 if slices travel to higher ranks."""
        return (1, -1) if self.variant == "bidirectional" and self.ranks > 2 else (1,)

    @property
    def straight(self) -> bool:
        """Whether slices travel between their owner and all others without stops."""
        return self.variant == "direct" and self.ranks > 2

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.rows)

    @property
    def own(self) -> RowPart:
        """The slice of this rank."""
        start = sum(self.rows[: self.rank])
        return RowPart(start, start + self.rows[self.rank])

    @property
    def parts(self) -> int:
        """Parts of a slice."""
        return self.pieces * len(self.directions)

    @property
    def longest(self) -> int:
        """Rows of the longest part."""
        return -(-max(self.rows) // self.parts)

    def index(self, lane: int, piece: int) -> int:
        """Which part of its slice a lane visits with a piece."""
        return lane * self.pieces + piece

    def part(self, owner: int, index: int) -> RowPart:
        """Part `index` of the slice of `owner`."""
        first = sum(self.rows[:owner])
        start, stop = cut(self.rows[owner], self.parts)[index]
        return RowPart(first + start, first + stop)

    def gathered(self, step: int, lane: int, piece: int) -> RowPart:
        """What a gather visits: own slice first, then as slices arrive."""
        owner = gathered_owner(self.rank, self.ranks, step, self.directions[lane])
        return self.part(owner, self.index(lane, piece))

    def scattered(self, step: int, lane: int, piece: int) -> RowPart:
        """What a scatter visits: own slice last."""
        direction = self.directions[lane]
        owner = scattered_owner(self.rank, self.ranks, step, direction, straight=self.straight)
        return self.part(owner, self.index(lane, piece))

    def hop(self, step: int, lane: int) -> Hop:
        """The transfer between `step` and `step` + 1: in a gather it brings what the latter visits,
        in a scatter it takes away what the former computed."""
        distance = step + 1 if self.straight else self.directions[lane]
        return hop(self.rank, self.ranks, distance)
