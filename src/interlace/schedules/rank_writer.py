"""Writes the actions of one rank down, as rules for pipelines are stated: so many forwards, then in
turn a backward and a forward.

Each pass takes the next micro-batch of its chunk, and passes beyond the last micro-batch are left
out. A rule for many micro-batches so gives a sound schedule for few: what is left keeps its order.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from interlace.errors import InputError
from interlace.ir.actions import Action, Direction, Share, Slot, Strand

_INPUT, _WEIGHT = Share.INPUT, Share.WEIGHT  # found at once: a search writes a million actions


@dataclass(frozen=True)
class ChunkPasses:
    """The passes of one chunk, as a `RankWriter` takes them."""

    forward: Strand
    backward: Strand
    input: Strand
    """The gradients of its inputs alone."""
    weight: Strand
    """Those of its weights, of the first micro-batch that waits for them."""

    @classmethod
    def of(cls, number: int, chunks: int) -> "ChunkPasses":
        """Those of chunk `number` of so many. A single chunk has no number."""
        chunk = number if chunks > 1 else None
        return cls(
            Strand(Direction.FORWARD, chunk),
            Strand(Direction.BACKWARD, chunk),
            Strand(Direction.BACKWARD, chunk, Share.INPUT),
            Strand(Direction.BACKWARD, chunk, Share.WEIGHT),
        )


class RankWriter:
    """The actions of a rank, in the order of the calls of `run`."""

    def __init__(self, micro_batches: int) -> None:
        self._last = micro_batches
        self._ran: dict[tuple[Direction, int | None], int] = {}
        self._waiting: deque[Slot] = deque()
        self._actions: list[Action] = []

    @property
    def actions(self) -> tuple[Action, ...]:
        """What was written."""
        return tuple(self._actions)

    def run(self, *strands: Strand, times: int = 1) -> None:
        """So many actions, each of these strands on their next micro-batches."""
        for _ in range(times):
            slots = tuple([slot for slot in map(self._next, strands) if slot is not None])
            if slots:
                self._actions.append(Action(slots))

    def run_in_turn(self, *strands: Strand, times: int = 1) -> None:
        """The same, with an action for each of them."""
        for _ in range(times):
            for strand in strands:
                self.run(strand)

    def run_weights(self, count: int | None = None) -> None:
        """So many weights' gradients, or all that wait, those first that have waited longest."""
        for _ in range(len(self._waiting) if count is None else count):
            if self._waiting:
                self._actions.append(Action((self._waiting.popleft(),)))

    def _next(self, strand: Strand) -> Slot | None:
        share = strand.share
        if share is _WEIGHT:
            found = next((slot for slot in self._waiting if slot.strand == strand), None)
            if found is not None:
                self._waiting.remove(found)
            return found
        walk = strand.direction, strand.chunk
        number = self._ran.get(walk, 0) + 1
        if number > self._last:
            return None
        self._ran[walk] = number
        if share is _INPUT:
            self._waiting.append(Slot(_weight_of(strand), number))
        return Slot(strand, number)


@lru_cache(maxsize=1024)
def _weight_of(strand: Strand) -> Strand:
    """The other half of a backward, of which this is the gradients of inputs."""
    return Strand(strand.direction, strand.chunk, Share.WEIGHT)


def folded_chunks(rank: int, ranks: int) -> tuple[ChunkPasses, ChunkPasses]:
    """(front, back): of a model folded in the middle, each rank has one chunk on the way there and
    one on the way back, `rank` and `2 ranks - 1 - rank` (papers 1.6)."""
    chunks = 2 * ranks
    return ChunkPasses.of(rank, chunks), ChunkPasses.of(chunks - 1 - rank, chunks)


def need_chunks(schedule: str, chunks: int, wanted: int) -> None:
    """Raise InputError unless a rank has as many chunks as this schedule runs, one or two."""
    if chunks != wanted:
        each = "one chunk" if wanted == 1 else "two chunks"
        raise InputError(
            f"{schedule} runs {each} on each rank, not {chunks}",
            hint="gpipe takes any number, interleaved two or more; folded, eager_folded, "
            "dual_pipe_v, zb_v and stp take two, the others one",
        )
