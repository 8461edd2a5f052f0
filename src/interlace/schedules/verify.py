"""Proves of the actions of all ranks that they can run, and that sums keep their order.

The actions are run once, rank beside rank, each as soon as it has what it needs: a forward the
chunks that it reads, a backward its own forward and the chunks that read what it made. Passes in
one action share an issue order that is searched later, so none may need another. Gradients of a
chunk are added micro-batch by micro-batch, in the order of their numbers: another order would give
other bits than one strand. What cannot go on is named: a pass before what it needs, or the ranks
that wait for each other.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from interlace.errors import InputError
from interlace.ir.actions import Action, Direction, Share, Slot
from interlace.ir.stage_messages import Edge, chain, chunks_of

PassKey = tuple[str, int, int]
"""(F, B, I or W; chunk; micro-batch)."""
LETTERS = {
    (Direction.FORWARD, Share.WHOLE): "F",
    (Direction.BACKWARD, Share.WHOLE): "B",
    (Direction.BACKWARD, Share.INPUT): "I",
    (Direction.BACKWARD, Share.WEIGHT): "W",
}
"""What a schedule may name, and what the field calls it."""
_WORDS = {
    "F": "the forward",
    "B": "the backward",
    "I": "the gradients of inputs in the backward",
    "W": "the gradients of weights in the backward",
}
"""How messages begin to speak of a pass."""
_SAME_WORK = {"F": "F", "B": "BIW", "I": "BI", "W": "BW"}
"""Which passes would compute, in whole or in part, what each one does."""


class ScheduleError(InputError):
    """A schedule that cannot run."""

    def __init__(self, message: str, hint: str, places: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message, hint=hint)
        self.places = tuple(places)
        """(rank, index in its list) of what is wrong, for `schedules.grid`."""


def check_ranks(
    ranks: Sequence[Sequence[Action]],
    *,
    micro_batches: int,
    chunks: int,
    name: str,
    edges: Collection[Edge] | None = None,
) -> tuple[int, ...]:
    """The rank of each chunk. Raises ScheduleError unless each pass of each micro-batch through
    each of the chunks of the model, which are counted over all ranks, runs once, on one rank for
    each chunk, and the ranks come to their ends. `edges` say which chunk reads which, by default
    each the one before."""
    check = _Check(ranks, micro_batches, chunks, name, chain(chunks) if edges is None else edges)
    check.each_action()
    for _ in check.run():
        pass
    check.each_pass()
    return tuple(check.rank_of[chunk] for chunk in range(chunks))


def order_of_run(
    ranks: Sequence[Sequence[Action]], edges: Collection[Edge]
) -> Iterator[tuple[int, int]]:
    """(rank, index of its action) in an order in which sound actions can run, ranks in turn."""
    check = _Check(ranks, 0, 1 + max(chunks_of(ranks)), "", edges)
    for rank, actions in enumerate(check.passes):
        check.where.update({each: (rank, i) for i, own in enumerate(actions) for each in own})
    yield from check.run()


def pass_of(slot: Slot) -> PassKey:
    """What a slot runs. A chunk without a number is chunk 0; a share of a pass that schedules do
    not name has no letter."""
    strand = slot.strand
    letter = LETTERS.get((strand.direction, strand.share), "")
    return letter, strand.chunk or 0, slot.micro_batch


class _Check:
    def __init__(
        self,
        ranks: Sequence[Sequence[Action]],
        micro_batches: int,
        chunks: int,
        name: str,
        edges: Collection[Edge],
    ) -> None:
        self.ranks = ranks
        self.passes = [[[pass_of(slot) for slot in a.slots] for a in own] for own in ranks]
        """By rank and action."""
        self.micro_batches = micro_batches
        self.chunks = chunks
        self.name = name
        self.reads = {c: [source for source, to in edges if to == c] for c in range(chunks)}
        self.read_by = {c: [to for source, to in edges if source == c] for c in range(chunks)}
        self.where: dict[PassKey, tuple[int, int]] = {}
        """Where each pass runs."""
        self.rank_of: dict[int, int] = {}
        """By chunk."""
        self.missing: list[PassKey | None] = [None] * len(ranks)
        """By rank: what its next action was seen to wait for."""
        wrong = [(s, t) for s, t in edges if not 0 <= s < t < chunks]
        if wrong:
            raise ScheduleError(
                f"chunk {wrong[0][1]} of {chunks} cannot read chunk {wrong[0][0]}",
                "an edge goes from a chunk to a later one: there is no skip into the past",
            )

    def each_action(self) -> None:
        """Check what can be said of each action alone, and note where passes and chunks are."""
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                if not action.slots:
                    raise self._error(rank, index, "runs nothing", "leave it out")
                if len({slot.strand for slot in action.slots}) < len(action.slots):
                    raise self._error(
                        rank, index, "runs one graph for two micro-batches",
                        "put them into two actions: a strand's operators have one name each",
                    )  # fmt: skip
                for slot, each in zip(action.slots, self.passes[rank][index], strict=True):
                    self._note(slot, each, rank, index)

    def each_pass(self) -> None:
        """Check that every pass runs, forward, and backward whole or in halves."""
        for index in range(1, self.micro_batches + 1):
            for chunk in range(self.chunks):
                for missing in (("F", chunk, index), *self._backwards(chunk, index)):
                    if missing not in self.where:
                        raise ScheduleError(
                            f"schedule {self.name!r} never runs {words(missing)}",
                            f"of {self.micro_batches} micro-batches each passes every chunk "
                            "forward and backward",
                        )

    def run(self) -> Iterator[tuple[int, int]]:
        """(rank, index) in the order of a run in which ranks take turns. Raises ScheduleError where
        no rank can go on."""
        at = [0] * len(self.ranks)
        done: set[PassKey] = set()
        going = True
        while going:
            going = False
            ready = [rank for rank in range(len(at)) if self._can_run(rank, at[rank], done)]
            for rank in ready:
                yield rank, at[rank]
                done.update(self.passes[rank][at[rank]])
                at[rank] += 1
                going = True
        if any(index < len(actions) for index, actions in zip(at, self.ranks, strict=True)):
            raise self._stuck(at, done)

    def _note(self, slot: Slot, found: PassKey, rank: int, index: int) -> None:
        strand, chunk = slot.strand, slot.strand.chunk or 0
        if (strand.direction, strand.share) not in LETTERS:
            raise self._error(
                rank, index, f"runs {strand.text!r}, a share of a pass",
                "a schedule names whole passes, or gradients of inputs and of weights; heads, ends "
                "and what is exchanged once a step are added to it",
            )  # fmt: skip
        if not 1 <= slot.micro_batch <= self.micro_batches:
            raise self._error(
                rank, index, f"there is no micro-batch {slot.micro_batch} of {self.micro_batches}",
                "micro-batches count from 1",
            )  # fmt: skip
        if (strand.chunk is None) != (self.chunks == 1) or not 0 <= chunk < self.chunks:
            raise self._error(
                rank, index, f"{strand.text!r} is not one of {self.chunks} chunks",
                "chunks count from 0; with one chunk leave the number out",
            )  # fmt: skip
        if self.rank_of.setdefault(chunk, rank) != rank:
            raise self._error(
                rank, index, f"runs chunk {chunk}, which rank {self.rank_of[chunk]} has",
                "each chunk lies on one rank",
            )  # fmt: skip
        letter, _, number = found
        for other in [(each, chunk, number) for each in _SAME_WORK[letter]]:
            if other in self.where:
                again = "a second time" if other == found else "that it also runs in another way"
                raise self._error(rank, index, f"runs {words(found)} {again}", "run each pass once")
        self.where[found] = rank, index

    def _backwards(self, chunk: int, micro_batch: int) -> tuple[PassKey, ...]:
        """The passes that a micro-batch's backward through a chunk consists of."""
        halves = ("I", chunk, micro_batch), ("W", chunk, micro_batch)
        is_cut = halves[0] in self.where or halves[1] in self.where
        return halves if is_cut else (("B", chunk, micro_batch),)

    def _needs(self, each: PassKey) -> list[PassKey]:
        """What must have run before: its inputs and, for sums of gradients, the micro-batch
        before."""
        letter, chunk, number = each
        if letter == "F":
            return [("F", source, number) for source in self.reads[chunk]]
        if letter == "W":
            needs = [("I", chunk, number)]
        else:
            needs = [("F", chunk, number)]
            needs += [self._backwards(reader, number)[0] for reader in self.read_by[chunk]]
        if number > 1 and letter != "I":
            needs.append(self._backwards(chunk, number - 1)[-1])
        return needs

    def _can_run(self, rank: int, index: int, done: set[PassKey]) -> bool:
        if index == len(self.ranks[rank]):
            return False
        first = self.missing[rank]
        if first is not None and first not in done:
            return False  # it still waits for what it waited for
        for each in self.passes[rank][index]:
            for need in self._needs(each):
                if need not in done:
                    self.missing[rank] = need
                    return False
        self.missing[rank] = None
        return True

    def _stuck(self, at: Sequence[int], done: set[PassKey]) -> ScheduleError:
        """Why no rank can go on."""
        waits: dict[int, tuple[PassKey, PassKey]] = {}
        for rank, index in enumerate(at):
            if index == len(self.ranks[rank]):
                continue
            passes = self.passes[rank][index]
            for each in passes:
                for need in self._needs(each):
                    if need in passes:
                        return self._error(
                            rank, index, f"runs {words(each)} beside {words(need)}, which it needs",
                            "put them into two actions",
                        )  # fmt: skip
                    place = self.where.get(need)
                    if place is None or (need not in done and place[0] == rank):
                        never = ", which never runs" if place is None else ""
                        return self._error(
                            rank, index, f"runs {words(each)} before {words(need)}{never}",
                            "turn them round", also=[place] if place else [],
                        )  # fmt: skip
                    if need not in done:
                        waits.setdefault(rank, (each, need))
        return self._cycle(at, waits)

    def _cycle(self, at: Sequence[int], waits: dict[int, tuple[PassKey, PassKey]]) -> ScheduleError:
        walk = [next(iter(waits))]
        while (following := self.where[waits[walk[-1]][1]][0]) not in walk:
            walk.append(following)
        ring = [*walk[walk.index(following) :], following]
        parts = [
            f"rank {rank} cannot run {words(waits[rank][0])} (its action {at[rank] + 1}) before "
            f"rank {other} has run {words(waits[rank][1])}"
            for rank, other in pairwise(ring)
        ]
        return ScheduleError(
            f"schedule {self.name!r} would never end: " + ", and ".join(parts),
            "change the order of one of these ranks",
            [(rank, at[rank]) for rank in ring[:-1]],
        )

    def _error(
        self, rank: int, index: int, what: str, hint: str, also: Sequence[tuple[int, int]] = ()
    ) -> ScheduleError:
        number = f"action {index + 1} ({self.ranks[rank][index]})"
        if len(self.ranks) > 1:
            number = f"rank {rank}, {number}"
        joined = ":" if what.startswith(("there", "'")) else ""
        return ScheduleError(
            f"schedule {self.name!r}, {number}{joined} {what}", hint, [(rank, index), *also]
        )


def words(each: PassKey) -> str:
    """`the backward of micro-batch 1 through chunk 0`."""
    letter, chunk, micro_batch = each
    return f"{_WORDS[letter]} of micro-batch {micro_batch} through chunk {chunk}"
