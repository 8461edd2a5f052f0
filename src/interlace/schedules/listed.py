"""A schedule that is a list and no rule: actions of a step of so many micro-batches, as a file or a
search gives them.

A step of fewer micro-batches runs the same list without those that it has not: no pass needs one of
a later micro-batch, so what is left is sound and keeps its order. More are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import Item, chunks_of
from interlace.schedules.schedule_text import read_schedule, read_split_at
from interlace.schedules.sends_receives import without_messages
from interlace.schedules.torch_csv import from_csv

READERS = {".txt": read_schedule, ".csv": from_csv}
"""What reads a schedule, by the end of the file's name."""


@dataclass(frozen=True)
class ListedSchedule:
    """A schedule function `(ranks, micro_batches, chunks) -> for each rank a tuple of actions`."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """By rank: the actions of a step of `micro_batches`."""
    split_at: tuple[str, ...] = ()
    """The sub-modules with which chunks begin, but the first, where it was made for one cut."""

    @property
    def micro_batches(self) -> int:
        """Most micro-batches of a step."""
        return max(slot.micro_batch for own in self.ranks for a in own for slot in a.slots)

    @property
    def chunks(self) -> int:
        """Chunks of a rank, on average."""
        return self._all_chunks // len(self.ranks)

    @property
    def _all_chunks(self) -> int:
        return 1 + max(chunks_of(self.ranks))

    def __post_init__(self) -> None:
        if not self.ranks or not all(self.ranks):
            raise InputError(
                f"schedule {self.name!r} has a rank without actions", hint="write a line for each"
            )
        if self._all_chunks % len(self.ranks):
            raise InputError(
                f"schedule {self.name!r} has {self._all_chunks} chunks on {len(self.ranks)} ranks",
                hint="give a multiple of the ranks; they need not lie equally on them",
            )

    def __call__(
        self, ranks: int, micro_batches: int, chunks: int
    ) -> tuple[tuple[Action, ...], ...]:
        """The actions of a step. Raises InputError for other ranks or chunks, and for more
        micro-batches than it was made for."""
        if (ranks, chunks) != (len(self.ranks), self.chunks):
            raise InputError(
                f"schedule {self.name!r} is made for {len(self.ranks)} ranks of {self.chunks} "
                f"chunks, not for {ranks} of {chunks}",
                hint="search or write another one",
            )
        if micro_batches > self.micro_batches:
            raise InputError(
                f"schedule {self.name!r} is made for steps of up to {self.micro_batches} "
                f"micro-batches, not {micro_batches}",
                hint="search or write one for more",
            )
        return tuple(tuple(_without(own, micro_batches)) for own in self.ranks)


def _without(own: Sequence[Action], last: int) -> list[Action]:
    """The actions without micro-batches behind `last`."""
    kept = [tuple(slot for slot in action.slots if slot.micro_batch <= last) for action in own]
    return [Action(slots) for slots in kept if slots]


def read_items(path: Path) -> tuple[tuple[Item, ...], ...]:
    """The lists of a .txt or .csv file, with messages if it has them. Raises InputError that names
    the file and the line."""
    return READERS[path.suffix](_text(path), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(
            f"cannot read {path}: {reason}",
            hint="give a name, or a .txt or .csv file of interlace schedule NAME --form text",
        ) from error


def file_split_at(path: Path) -> tuple[str, ...]:
    """With which sub-modules chunks begin, but the first, if the file says it: a .csv cannot."""
    return read_split_at(_text(path)) if path.suffix == ".txt" else ()


def read_listed(path: Path) -> ListedSchedule:
    """The schedule in a file; messages in it are left out, as runtimes add their own."""
    return ListedSchedule(str(path), without_messages(read_items(path)), file_split_at(path))
