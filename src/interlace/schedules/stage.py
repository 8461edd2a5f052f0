"""A schedule as one rank of a pipeline runs it."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

from interlace.ir.actions import Action, Direction
from interlace.ir.stage_messages import Edge, Item, Wiring, chunks_of
from interlace.schedules.finder import MOST, Schedule
from interlace.schedules.listed import ListedSchedule
from interlace.schedules.sends_receives import check_messages, with_messages


@dataclass(frozen=True)
class StageSchedule(Schedule):
    """What rank `rank` of `ranks` runs. Chunks are counted over all ranks."""

    is_alone: ClassVar[bool] = False
    ranks: int
    rank: int
    edges: tuple[Edge, ...] | None = None
    """Which chunk reads which; by default each the one before, until a model has been cut."""
    _made: dict[int, tuple[tuple[Action, ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By number of micro-batches: the actions of all ranks, which are proved once."""

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        found = chunks_of(self.of_ranks(self.ranks, self.seen, self.chunks))
        return tuple(found[chunk] for chunk in sorted(found))

    @property
    def cuts_backwards(self) -> bool:
        """Whether some rank runs the gradients of inputs and those of weights apart."""
        return self._cuts(self.of_ranks(self.ranks, self.seen, self.chunks))

    @property
    def interleaves(self) -> bool:
        """Whether some action of some rank runs two strands."""
        return any(
            len(action.slots) > 1
            for count in self.counts()
            for actions in self.of_ranks(self.ranks, count, self.chunks)
            for action in actions
        )

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of the graphs that this rank needs."""
        own = [chunk for chunk, rank in enumerate(self.rank_of) if rank == self.rank]
        return self._graphs_of(own)

    def with_edges(self, edges: tuple[Edge, ...]) -> "StageSchedule":
        """The same for a model whose chunks read each other so."""
        return replace(self, edges=edges)

    def actions(
        self, micro_batches: int, graphs: Collection[str], *, head: bool = False
    ) -> tuple[Action, ...]:
        """What this rank runs in a step. No operators run one action ahead, as they would need a
        message one action earlier.

        Raises InputError if the schedule cannot run so, naming the action."""
        own = self._all(micro_batches)[self.rank]
        self._check_halves(own, graphs)
        return own

    def items(self, micro_batches: int) -> tuple[Item, ...]:
        """The actions of this rank with what it sends and receives between them.

        Raises InputError if ranks would wait for each other for ever, or the schedule cannot
        run."""
        lists, edges = self._lists(micro_batches)
        found = with_messages(lists, edges)
        check_messages(found, edges=edges, name=self.name)
        return found[self.rank]

    def forward_items(self, micro_batches: int) -> tuple[Item, ...]:
        """The forwards of this rank alone, in the same order, with their messages."""
        lists, edges = self._lists(micro_batches)
        forwards = tuple(
            tuple(
                Action((slot,))
                for action in actions
                for slot in action.slots
                if slot.strand.direction == Direction.FORWARD
            )
            for actions in lists
        )
        return with_messages(forwards, edges)[self.rank]

    def wiring(self, micro_batches: int) -> Wiring:
        """Which messages its actions give and take."""
        return Wiring(*self._lists(micro_batches))

    def texts(self, micro_batches: int, graphs: Collection[str], *, head: bool) -> list[str]:
        """The actions of all ranks."""
        lists = self.lists(micro_batches)
        return [f"{rank}: {action}" for rank, own in enumerate(lists) for action in own]

    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches whose steps have all phases between them: few, and as many as
        keep all chunks busy; all that a list runs."""
        if isinstance(self.function, ListedSchedule):
            return super().counts()
        deep = 4 * self.ranks * self.chunks
        return tuple(sorted({deep, 2 * deep // 3, *range(1, MOST + 1)}, reverse=True))

    def lists(self, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """The actions of all ranks."""
        return self._lists(micro_batches)[0]

    def _lists(self, micro_batches: int) -> tuple[tuple[tuple[Action, ...], ...], Collection[Edge]]:
        assert self.edges is not None
        return self._all(micro_batches), self.edges

    def _all(self, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        if micro_batches not in self._made:
            self._made[micro_batches] = self.of_ranks(
                self.ranks, micro_batches, self.chunks, edges=self.edges
            )
        return self._made[micro_batches]
