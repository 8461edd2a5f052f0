"""Actions of a schedule by number of their phase, as thousands of them have a few phases."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from interlace.ir.actions import Action, Strand


class PhaseNumbers:
    """The phases of the actions of all ranks, numbered as they appear."""

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None:
        numbers: dict[tuple[Strand, ...], int] = {}
        same: dict[tuple[int, ...], int] = {}  # by identity, as most actions share their strands
        self.actions: list[Action] = []
        """By phase: the first action of it."""
        self.of_ranks: list[list[int]] = []
        """By rank: the phase of each of its actions."""
        for own in ranks:
            found = []
            for action in own:
                ids = tuple([id(slot.strand) for slot in action.slots])
                number = same.get(ids)
                if number is None:
                    strands = tuple([slot.strand for slot in action.slots])
                    number = same[ids] = numbers.setdefault(strands, len(self.actions))
                    if number == len(self.actions):
                        self.actions.append(action)
                found.append(number)
            self.of_ranks.append(found)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """By phase."""
        return tuple(action.phase for action in self.actions)

    @cached_property
    def counts(self) -> tuple[Counter[str], ...]:
        """By rank: how many of its actions have which phase."""
        names = self.names
        return tuple(
            Counter({names[phase]: count for phase, count in Counter(own).items()})
            for own in self.of_ranks
        )

    @cached_property
    def first(self) -> dict[str, Action]:
        """By name: an action of the phase."""
        return dict(zip(self.names, self.actions, strict=True))

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each chunk; one without a number is chunk 0."""
        return {
            slot.strand.chunk or 0: rank
            for rank, own in enumerate(self.of_ranks)
            for phase in dict.fromkeys(own)
            for slot in self.actions[phase].slots
        }
