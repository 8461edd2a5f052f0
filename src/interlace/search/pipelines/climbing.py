"""A layout and rules improved together, one change at a time: a boundary of chunks moved, two
chunks exchanged between ranks or one given away, another rule.

A change is kept if it makes the step no longer, and at first also if it makes it a little longer
(threshold accepting, Dueck and Scheuer 1990), as many changes gain only together with another one.
Memory counts a little, or it would grow with every change that costs no time.
Draws are those of a given generator, so a search repeats itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from random import Random

from interlace.search.pipelines.chunk_layouts import BusiestRank, ChunkLayout
from interlace.search.pipelines.greedy_orders import Rules, greedy_order
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.step_clock import PassLists, StepClock

_FARTHEST = 2
"""Units by which a boundary moves at most in one change; a choice."""
_PATIENCE = (0.0, 0.25, 0.5, 1.0, 2.0)
"""What is tried for `Rules.patience`; a choice."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline that fits into memory."""

    length_ns: int
    layout: ChunkLayout
    lists: PassLists
    rules: Rules | None
    """What made the lists; None for those of a schedule with a name."""
    origin: str
    """Where the search came from."""
    peak_bytes: int
    """The most that a rank holds and keeps at a time."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Sorts: the shortest, of those the one with least memory, then with fewest actions."""
        return self.length_ns, self.peak_bytes, sum(map(len, self.lists))


def ruled(
    problem: PipelineProblem, layout: ChunkLayout, rules: Rules, origin: str
) -> Candidate | None:
    """The pipeline that these rules make; None if it does not fit into memory."""
    clock = StepClock(problem, layout)
    if not has_room(clock):
        return None
    found = greedy_order(clock, rules)
    if found is None and not rules.promised:
        rules = replace(rules, promised=True)
        found = greedy_order(clock, rules)
    if found is None:
        return None
    return Candidate(found[0], layout, found[1], rules, origin, clock.most_bytes(found[1]))


def has_room(clock: StepClock) -> bool:
    """Whether every rank can keep one micro-batch of all of its chunks."""
    return all(need <= room for need, room in zip(least_bytes(clock), clock.room, strict=True))


def least_bytes(clock: StepClock) -> list[int]:
    """By rank: what one micro-batch keeps, through all of its chunks."""
    return [sum(max(clock.saved[c], clock.kept[c]) for c in own) for own in clock.own]


def climb(problem: PipelineProblem, start: Candidate, tries: int, draw: Random) -> Candidate:
    """The best of so many changes, one after the other."""
    assert start.rules is not None
    best, now, rules = start, start, start.rules
    busiest = BusiestRank(problem)

    def score(found: Candidate) -> float:
        return found.length_ns * (1 + MEMORY * found.peak_bytes / max(1, start.peak_bytes))

    for done in range(tries):
        longest = start.length_ns * _WORSE * (1 - done / tries)
        layout, changed = now.layout, rules
        way = draw.random()
        if way < _LAYOUTS + _BOTH:
            layout = _promising(layout, problem, busiest, now.length_ns + longest, draw)
        if way >= _LAYOUTS:
            changed = _ruled_otherwise(rules, problem, draw)
        if (layout, changed) == (now.layout, rules):
            continue
        found = ruled(problem, layout, changed, start.origin)
        if found is not None and score(found) <= score(now) + longest:
            assert found.rules is not None
            now, rules = found, found.rules
            best = min(best, now, key=score)
    return best


_WORSE = 0.01
"""By how much longer than the first step a change may make it at first; falls to 0. A choice."""
MEMORY = 0.003
"""What share of a step's time is worth as much memory as the first pipeline takes; a choice."""


def trimmed(problem: PipelineProblem, start: Candidate) -> Candidate:
    """With fewer micro-batches under way wherever the step becomes no longer, so that less memory
    is kept: chunk by chunk the least number, by bisection."""
    now = start
    for chunk in range(len(start.layout.starts)):
        assert now.rules is not None
        low, high = 1, min(now.rules.ahead[chunk], problem.micro_batches)
        while low < high:
            middle = (low + high) // 2
            ahead = (*now.rules.ahead[:chunk], middle, *now.rules.ahead[chunk + 1 :])
            rules = replace(now.rules, ahead=ahead)
            found = ruled(problem, now.layout, rules, now.origin)
            if found is not None and found.key <= now.key:
                now, high = found, middle
            else:
                low = middle + 1
    return now


_LAYOUTS, _BOTH = 0.45, 0.1
"""Shares of changes that move chunks, and that change rules as well; a choice."""


def _promising(
    layout: ChunkLayout,
    problem: PipelineProblem,
    busiest: BusiestRank,
    most_ns: float,
    draw: Random,
) -> ChunkLayout:
    """A layout some moves away whose busiest rank leaves room for a step of `most_ns`; the same
    where few draws find none. Of moves of one boundary most make a rank too busy, and are not worth
    a step."""
    for _ in range(_DRAWS):
        other = layout
        for _ in range(draw.randint(1, _MOVES)):
            other = _moved(other, problem, draw)
        if other != layout and busiest.least_ns(other) <= most_ns:
            return other
    return layout


_DRAWS, _MOVES = 50, 4
"""Layouts that are drawn for one that is tried, and the most moves of each; a choice. To draw 50
takes about as long as to time one step."""


def _moved(layout: ChunkLayout, problem: PipelineProblem, draw: Random) -> ChunkLayout:
    """Another layout, or the same where a draw makes none."""
    chunks = len(layout.starts)
    if chunks > 1 and draw.random() < _BOUNDARIES:
        return moved_boundary(layout, len(problem.units), draw)
    rank_of = list(layout.rank_of)
    first, second = draw.randrange(chunks), draw.randrange(chunks)
    if draw.random() < _EXCHANGES:
        rank_of[first], rank_of[second] = rank_of[second], rank_of[first]
    else:
        rank_of[first] = draw.randrange(problem.ranks)
    if len(set(rank_of)) < problem.ranks:
        return layout
    return ChunkLayout(layout.starts, tuple(rank_of))


_BOUNDARIES, _EXCHANGES = 0.7, 0.7
"""Shares of moves that are of boundaries, and, of the others, exchanges; a choice."""


def moved_boundary(layout: ChunkLayout, units: int, draw: Random) -> ChunkLayout:
    """The layout with a boundary elsewhere, or the same where a chunk would be empty."""
    starts = list(layout.starts)
    if len(starts) == 1:
        return layout
    starts[draw.randrange(1, len(starts))] += draw.choice((-1, 1)) * draw.randint(1, _FARTHEST)
    if not all(a < b for a, b in pairwise((*starts, units))):
        return layout
    return ChunkLayout(tuple(starts), layout.rank_of)


def _ruled_otherwise(rules: Rules, problem: PipelineProblem, draw: Random) -> Rules:
    if draw.random() < _AHEAD:
        ahead = list(rules.ahead)
        chunk = draw.randrange(len(ahead))
        ahead[chunk] = max(1, ahead[chunk] + draw.choice((-1, 1)))
        return replace(rules, ahead=tuple(ahead))
    ranks, count = problem.ranks, problem.micro_batches
    values: dict[str, Callable[[], object]] = {
        "deep_forwards": lambda: not rules.deep_forwards,
        "deep_backwards": lambda: not rules.deep_backwards,
        "forwards_first": lambda: not rules.forwards_first,
        "cut_first": lambda: draw.choice((0, ranks, 2 * ranks, count)),
        "cut_last": lambda: draw.choice((0, ranks, 2 * ranks, 3 * ranks)),
        "patience": lambda: draw.choice(_PATIENCE),
        "pair_patience": lambda: draw.choice(_PATIENCE),
        "most_waiting": lambda: draw.choice((0, 1, 2, ranks, 2 * ranks, 1 << 62)),
        "promised": lambda: not rules.promised,
    }
    name = draw.choice([field.name for field in fields(Rules) if field.name in values])
    changed: dict[str, object] = {name: values[name]()}
    return replace(rules, **changed)  # type: ignore[arg-type]


_AHEAD = 0.5
"""Share of changes of rules that change how far ahead a chunk is; a choice."""
