"""Cuts of a model into chunks, and chunks on ranks: `ChunkLayout`.

Cuts are balanced by dynamic programming: of all cuts into so many chunks it finds one whose longest
chunk is shortest. Where a rank has several chunks it is their sum that counts, so unit by unit is
then moved over a boundary as long as that makes the busiest rank less busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random

from interlace.ir.actions import Action
from interlace.ir.stage_messages import chain
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where a model is cut, and which rank has which chunk."""

    starts: tuple[int, ...]
    """By chunk: the number of its first unit. The first is 0, and each is greater than the one
    before."""
    rank_of: tuple[int, ...]
    """By chunk: its rank. Every rank has one chunk at least."""

    def of_chunk(self, units: Sequence[ModelUnit], chunk: int) -> Sequence[ModelUnit]:
        """The units of a chunk."""
        return units[self.starts[chunk] : (*self.starts, len(units))[chunk + 1]]

    def split_at(self, units: Sequence[ModelUnit]) -> tuple[str, ...]:
        """The names of the units with which chunks begin, but the first, as `compile_step` takes
        them."""
        return tuple(units[start].name for start in self.starts[1:])

    def held_bytes(self, problem: PipelineProblem) -> list[int]:
        """By rank: what it has all the time."""
        held = [problem.everywhere_bytes] * problem.ranks
        for chunk, rank in enumerate(self.rank_of):
            held[rank] += sum(unit.held_bytes for unit in self.of_chunk(problem.units, chunk))
        return held

    def loads_ns(self, units: Sequence[ModelUnit], ranks: int) -> list[int]:
        """By rank: the time of its passes of one micro-batch."""
        found = [0] * ranks
        for chunk, rank in enumerate(self.rank_of):
            found[rank] += sum(unit.work_ns for unit in self.of_chunk(units, chunk))
        return found

    def chunk_costs(self, units: Sequence[ModelUnit]) -> tuple[ChunkCosts, ...]:
        """What the passes of each chunk cost."""
        names = ("forward_ns", "input_ns", "weight_ns", "saved_bytes", "kept_bytes")
        return tuple(
            ChunkCosts(**{n: sum(getattr(u, n) for u in self.of_chunk(units, chunk))
                          for n in names})
            for chunk in range(len(self.starts))
        )  # fmt: skip

    def costs(
        self, problem: PipelineProblem, ranks: Sequence[Sequence[Action]] = ()
    ) -> PipelineCosts:
        """What the simulator takes, with the times of all pairs of passes in these actions."""
        chunks = self.chunk_costs(problem.units)
        plain = PipelineCosts(chunks=chunks)
        pairs: dict[str, int] = {}
        for action in {action.phase: action for own in ranks for action in own}.values():
            if len(action.slots) > 1:
                alone = [plain.action_ns(Action((slot,))) for slot in action.slots]
                pairs[action.phase] = pair_ns(alone, problem.overlap)
        ends = [self.of_chunk(problem.units, chunk)[-1] for chunk in range(len(chunks))]
        messages = {edge: ends[edge[0]].boundary_ns for edge in chain(len(chunks))}
        return PipelineCosts(chunks=chunks, pairs_ns=pairs, messages_ns=messages)


def pair_ns(alone: Sequence[int], overlap: float) -> int:
    """The time of passes side by side: shorter by this share, but no shorter than the longest."""
    return max(*alone, round(sum(alone) * (1 - overlap)))


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Rank r has the chunks r, r + ranks, ... of so many on each rank."""
    return tuple(chunk % ranks for chunk in range(ranks * chunks))


def zigzag(ranks: int, chunks: int) -> tuple[int, ...]:
    """There and back: with two chunks on each rank the fold."""
    there = tuple(range(ranks))
    return tuple(rank for turn in range(chunks) for rank in (there, there[::-1])[turn % 2])


def equal_layers(problem: PipelineProblem, rank_of: Sequence[int]) -> ChunkLayout:
    """As users cut who count layers: of the units that are alike in kind most often, each chunk has
    the same number (the first ones one more); what stands before the first of them goes with the
    first chunk, what stands behind the last with the last."""
    layers = _layers(problem.units)
    count = len(rank_of)
    if len(layers) < count:
        layers = list(range(len(problem.units)))
    places = [len(layers) * chunk // count for chunk in range(count)]
    return ChunkLayout((0, *(layers[place] for place in places[1:])), tuple(rank_of))


def _layers(units: Sequence[ModelUnit]) -> list[int]:
    """Numbers of the units whose names differ in a number only, as `layers.0`, `layers.1`."""
    kinds: dict[str, list[int]] = {}
    for number, unit in enumerate(units):
        kinds.setdefault(unit.name.rstrip("0123456789"), []).append(number)
    return max(kinds.values(), key=len)


def balanced(problem: PipelineProblem, rank_of: Sequence[int]) -> ChunkLayout:
    """The chunks of these ranks, with about equal work on each rank."""
    units, count = problem.units, len(rank_of)
    work = [unit.work_ns for unit in units]
    starts = _shortest_longest(work, count)
    done = [0, *accumulate(work)]

    def measure(places: Sequence[int]) -> tuple[int, int]:
        loads, chunks = [0] * problem.ranks, []
        for rank, (first, last) in zip(rank_of, pairwise((*places, len(units))), strict=True):
            chunks.append(done[last] - done[first])
            loads[rank] += chunks[-1]
        return max(loads), sum(load * load for load in loads) + sum(c * c for c in chunks)

    best, better = measure(starts), True
    while better:
        better = False
        for moved in _moves(starts, len(units)):
            found = measure(moved)
            if found < best:
                starts, best, better = moved, found, True
    return ChunkLayout(tuple(starts), tuple(rank_of))


class BusiestRank:
    """How long the busiest rank of a layout takes at least."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.done = [0, *accumulate(unit.work_ns for unit in problem.units)]
        self.forwards = [0, *accumulate(unit.forward_ns for unit in problem.units)]
        self.count, self.ranks, self.overlap = (
            problem.micro_batches, problem.ranks, problem.overlap
        )  # fmt: skip

    @property
    def share_ns(self) -> float:
        """A rank's share of all work."""
        return self.count * self.done[-1] / self.ranks

    def least_ns(self, layout: ChunkLayout) -> float:
        """No step of this layout is shorter: a rank waits for the forwards before its first chunk,
        and then has all passes of its chunks to run."""
        loads, waits = [0] * self.ranks, [-1] * self.ranks
        ends = (*layout.starts[1:], len(self.done) - 1)
        for rank, first, last in zip(layout.rank_of, layout.starts, ends, strict=True):
            loads[rank] += self.done[last] - self.done[first]
            if waits[rank] < 0:
                waits[rank] = self.forwards[first]
        shorter = self.count * (1 - self.overlap)
        return max(wait + shorter * load for wait, load in zip(waits, loads, strict=True))


def evened(
    problem: PipelineProblem, layout: ChunkLayout, draw: Random, exchanges: float
) -> ChunkLayout:
    """A layout drawn around this one, whose busiest rank is hardly busier than others: boundaries
    moved, and ranks of two chunks exchanged in such a share of the changes. Only sums of times are
    looked at, so this is much faster than to simulate."""
    clock, count = BusiestRank(problem), len(layout.starts)
    now = best = (clock.least_ns(layout), layout)
    tries = _EVENING * len(problem.units)
    for step in range(tries):
        starts, rank_of = list(now[1].starts), list(now[1].rank_of)
        if draw.random() < exchanges:
            first, second = draw.randrange(count), draw.randrange(count)
            rank_of[first], rank_of[second] = rank_of[second], rank_of[first]
        elif count > 1:
            starts[draw.randrange(1, count)] += draw.choice((-2, -1, 1, 2))
            if not all(a < b for a, b in pairwise((*starts, len(problem.units)))):
                continue
        drawn = ChunkLayout(tuple(starts), tuple(rank_of))
        least_ns = clock.least_ns(drawn)
        if least_ns <= now[0] + _UNEVEN * (1 - step / tries) * clock.share_ns:
            now = least_ns, drawn
            best = min(best, now, key=lambda each: each[0])
    return best[1]


_EVENING, _UNEVEN = 150, 0.2
"""Changes that `evened` tries for each unit, and by what part of a rank's share of the work they
may make the busiest rank busier at first; choices."""


def _moves(starts: Sequence[int], units: int) -> list[list[int]]:
    """All ways to move one boundary, or two of them, by one unit."""
    sound = []
    for first in range(1, len(starts)):
        for second in range(first, len(starts)):
            for by in (-1, 1):
                for also in (-1, 1) if second > first else (0,):
                    moved = list(starts)
                    moved[first] += by
                    moved[second] += also
                    if all(a < b for a, b in pairwise((*moved, units))):
                        sound.append(moved)
    return sound


def _shortest_longest(work: Sequence[int], count: int) -> list[int]:
    """Where chunks start if the longest of so many is as short as can be."""
    done = [0, *accumulate(work)]
    units = len(work)
    best = [done[end] for end in range(units + 1)]
    cuts: list[list[int]] = []
    for chunk in range(1, count):
        longest, cut = [0] * (units + 1), [0] * (units + 1)
        for end in range(chunk + 1, units + 1):
            at = min(range(chunk, end), key=lambda at: (max(best[at], done[end] - done[at]), -at))
            longest[end], cut[end] = max(best[at], done[end] - done[at]), at
        best = longest
        cuts.append(cut)
    starts = [units]
    for cut in reversed(cuts):
        starts.insert(0, cut[starts[0]])
    return [0, *starts[:-1]]
