"""How long lists of passes take on a layout, and what memory they need: the rules of
`sim.pipeline_step`, without timelines. A test holds the two equal.

A pass is three numbers (what, chunk, micro-batch from 1), an action a tuple of passes.
"""

from collections.abc import Sequence

from interlace.ir.actions import Action, Slot, Strand
from interlace.schedules.torch_csv import MEANING
from interlace.schedules.verify import pass_of
from interlace.search.pipelines.chunk_layouts import ChunkLayout, pair_ns
from interlace.search.pipelines.model_units import PipelineProblem

F, B, I, W = range(4)  # noqa: E741  as the field calls them
"""What a pass is: forward, backward, gradients of inputs, of weights."""
_LETTERS = "FBIW"
"""The same as letters."""
PassNumbers = tuple[int, int, int]
"""(what, chunk, micro-batch)."""
PassLists = list[list[tuple[PassNumbers, ...]]]
"""By rank: its actions."""
_NOT_YET = -1
"""The time of what has not been made."""


class StepClock:
    """Times and memory of the passes of one layout."""

    def __init__(self, problem: PipelineProblem, layout: ChunkLayout) -> None:
        self.layout = layout
        self.rank_of = layout.rank_of
        self.ranks, self.micro_batches = problem.ranks, problem.micro_batches
        self.overlap = problem.overlap
        costs = layout.costs(problem)
        self.chunks = len(costs.chunks)
        forward, first, late = (
            [getattr(chunk, f"{name}_ns") for chunk in costs.chunks]
            for name in ("forward", "input", "weight")
        )
        whole = [a + b for a, b in zip(first, late, strict=True)]
        self.pass_ns = (forward, whole, first, late)
        """By what a pass is, then by chunk."""
        self.saved = [chunk.saved_bytes for chunk in costs.chunks]
        self.kept = [chunk.kept_bytes for chunk in costs.chunks]
        self.own = [
            [chunk for chunk, r in enumerate(self.rank_of) if r == rank]
            for rank in range(self.ranks)
        ]
        """By rank: its chunks."""
        self.hop_ns = [
            costs.messages_ns[a, a + 1] if self.rank_of[a] != self.rank_of[a + 1] else _NOT_YET
            for a in range(self.chunks - 1)
        ]
        """By chunk: the time of a message to the next; -1 on one rank."""
        self.held = layout.held_bytes(problem)
        limit = problem.memory_bytes or 1 << 62
        self.room = [limit - held for held in self.held]
        """By rank: bytes for what forwards save."""
        self._pairs: dict[tuple[int, ...], int] = {}

    def action_ns(self, action: Sequence[PassNumbers]) -> int:
        """How long an action takes."""
        if len(action) == 1:
            what, chunk, _ = action[0]
            return self.pass_ns[what][chunk]
        key = tuple(number for what, chunk, _ in action for number in (what, chunk))
        found = self._pairs.get(key)
        if found is None:
            alone = [self.pass_ns[what][chunk] for what, chunk, _ in action]
            found = self._pairs[key] = pair_ns(alone, self.overlap)
        return found

    def length_ns(self, lists: PassLists) -> int | None:
        """From the first start to the last end; None if ranks would wait for ever."""
        ready = [[[_NOT_YET] * (self.micro_batches + 1) for _ in range(self.chunks)]
                 for _ in range(2)]  # fmt: skip
        ready[0][0] = [0] * (self.micro_batches + 1)
        free, at = [0] * self.ranks, [0] * self.ranks
        links: dict[int, int] = {}
        awake = list(range(self.ranks))
        while awake:
            rank = awake.pop()
            own, index, now = lists[rank], at[rank], free[rank]
            told: set[int] = set()
            while index < len(own):
                action = own[index]
                start = now
                for what, chunk, number in action:
                    if what != W:
                        when = ready[what != F][chunk][number]
                        if when < 0:
                            start = _NOT_YET
                            break
                        start = max(start, when)
                if start < 0:
                    break
                now = start + self.action_ns(action)
                for each in action:
                    told.update(self._hand_over(each, rank, now, ready, links))
                index += 1
            at[rank], free[rank] = index, now
            awake += [other for other in told if other not in awake]
        if any(index < len(own) for index, own in zip(at, lists, strict=True)):
            return None
        return max(free)

    def _hand_over(
        self,
        each: PassNumbers,
        rank: int,
        end: int,
        ready: list[list[list[int]]],
        links: dict[int, int],
    ) -> tuple[int, ...]:
        """Note when what a pass made is where it is needed; the other rank, if it is one."""
        what, chunk, number = each
        if what == W:
            return ()
        if what == F:
            if chunk == self.chunks - 1:
                ready[1][chunk][number] = end
                return ()
            to, hop = chunk + 1, self.hop_ns[chunk]
        else:
            if chunk == 0:
                return ()
            to, hop = chunk - 1, self.hop_ns[chunk - 1]
        if hop < 0:
            ready[what != F][to][number] = end
            return ()
        other = self.rank_of[to]
        link = rank * self.ranks + other
        links[link] = ready[what != F][to][number] = max(end, links.get(link, 0)) + hop
        return (other,)

    def peak_bytes(self, actions: Sequence[Sequence[PassNumbers]]) -> int:
        """The most that saved values of a rank's actions take at a time."""
        now = most = 0
        for action in actions:
            for what, chunk, _ in action:
                if what == F:
                    now += self.saved[chunk]
                elif what == I:
                    now += max(0, self.kept[chunk] - self.saved[chunk])
            most = max(most, now)
            for what, chunk, _ in action:
                if what == B:
                    now -= self.saved[chunk]
                elif what == I:
                    now -= max(0, self.saved[chunk] - self.kept[chunk])
                elif what == W:
                    now -= self.kept[chunk]
        return most

    def most_bytes(self, lists: PassLists) -> int:
        """The most that a rank holds and keeps at a time."""
        return max(held + self.peak_bytes(own) for held, own in zip(self.held, lists, strict=True))

    def fits(self, lists: PassLists) -> bool:
        """Whether all ranks keep within their memory."""
        return all(self.peak_bytes(own) <= room for own, room in zip(lists, self.room, strict=True))


def as_actions(lists: PassLists, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Lists of passes as the package's actions. A single chunk has no number."""

    def slot(each: PassNumbers) -> Slot:
        what, chunk, number = each
        direction, share = MEANING[_LETTERS[what]]
        return Slot(Strand(direction, chunk if chunks > 1 else None, share), number)

    return tuple(
        tuple(Action(tuple(slot(each) for each in action)) for action in own) for own in lists
    )


def as_passes(ranks: Sequence[Sequence[Action]]) -> PassLists:
    """The other way round."""
    return [
        [
            tuple(
                (_LETTERS.index(letter), chunk, number)
                for letter, chunk, number in map(pass_of, action.slots)
            )
            for action in own
        ]
        for own in ranks
    ]
