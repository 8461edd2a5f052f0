"""Lists improved by hand, as it were: an action moved to another place of its rank's list, a
backward cut or joined, a forward put beside a backward or taken away from it; and boundaries of
chunks moved under the lists. A change that makes the step no longer is kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from interlace.search.pipelines.climbing import Candidate, moved_boundary
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.step_clock import B, F, I, PassLists, PassNumbers, StepClock, W

_Own = list[tuple[PassNumbers, ...]]
"""The actions of a rank."""
_FARTHEST = 6
"""Places by which an action moves at most; a choice."""
_BOUNDARIES = 0.1
"""Share of changes that move boundaries; a choice."""


def swap(problem: PipelineProblem, start: Candidate, tries: int, draw: Random) -> Candidate:
    """The best of so many changes, one after the other."""
    now, clock = start, StepClock(problem, start.layout)
    for _ in range(tries):
        if draw.random() < _BOUNDARIES:
            layout = moved_boundary(now.layout, len(problem.units), draw)
            other, lists = StepClock(problem, layout), now.lists
        else:
            rank = draw.randrange(problem.ranks)
            own = _changed(now.lists[rank], clock, draw)
            if own is None:
                continue
            other, lists = clock, [*now.lists[:rank], own, *now.lists[rank + 1 :]]
        found = _timed(now, other, lists)
        if found is not None and found.key <= now.key:
            now, clock = found, other
    return now


def joined(problem: PipelineProblem, start: Candidate) -> Candidate:
    """With both halves of a backward in one action wherever they follow each other and the step
    becomes no longer: fewer actions, fewer calls of graphs."""
    clock, now = StepClock(problem, start.layout), start
    for rank in range(problem.ranks):
        for chunk in clock.own[rank]:
            own = _all_joined(now.lists[rank], chunk)
            found = _timed(now, clock, [*now.lists[:rank], own, *now.lists[rank + 1 :]])
            if found is not None and found.length_ns <= now.length_ns:
                now = found
    return now


def _timed(now: Candidate, clock: StepClock, lists: PassLists) -> Candidate | None:
    """The candidate with these lists; None if it is slower, does not run or does not fit."""
    length = clock.length_ns(lists)
    if length is None or length > now.length_ns or not clock.fits(lists):
        return None
    return replace(
        now, length_ns=length, layout=clock.layout, lists=lists, peak_bytes=clock.most_bytes(lists)
    )


def _all_joined(own: Sequence[tuple[PassNumbers, ...]], chunk: int) -> _Own:
    """All backwards of a chunk joined whose halves follow each other."""
    found: _Own = []
    for action in own:
        half = len(action) == 1 and action[0][0] == W and action[0][1] == chunk
        if half and found and found[-1] == ((I, *action[0][1:]),):
            found[-1] = ((B, *action[0][1:]),)
        else:
            found.append(action)
    return found


def _changed(own: Sequence[tuple[PassNumbers, ...]], clock: StepClock, draw: Random) -> _Own | None:
    """The list with a change; None where a draw makes none that is sound."""
    found = list(own)
    at = draw.randrange(len(found))
    way = draw.random()
    if way < _MOVES:
        action = found.pop(at)
        to = at + draw.choice((-1, 1)) * draw.randint(1, _FARTHEST)
        found.insert(max(0, min(len(found), to)), action)
    elif way < _MOVES + _CUTS:
        _cut_or_join(found, at)
    elif clock.overlap:
        _pair_or_part(found, at)
    return found if found != list(own) and _sums_in_order(found) else None


_MOVES, _CUTS = 0.7, 0.15
"""Shares of changes that move an action, and that cut or join a backward; a choice."""


def _cut_or_join(found: _Own, at: int) -> None:
    if len(found[at]) > 1:
        return
    what, *rest = found[at][0]
    chunk, number = rest
    if what == B:
        found[at : at + 1] = [((I, chunk, number),), ((W, chunk, number),)]
    elif what == I and found[at + 1 : at + 2] == [((W, chunk, number),)]:
        found[at : at + 2] = [((B, chunk, number),)]


def _pair_or_part(found: _Own, at: int) -> None:
    if len(found[at]) > 1:
        found[at : at + 1] = [(each,) for each in found[at]]
        return
    other = found[at + 1 : at + 2]
    if not other or len(other[0]) > 1:
        return
    both = sorted((found[at][0], other[0][0]))
    if both[0][0] == F and both[1][0] in (B, I):
        found[at : at + 2] = [tuple(both)]


def _sums_in_order(own: Sequence[tuple[PassNumbers, ...]]) -> bool:
    """Whether gradients of weights are added in the order of micro-batches, each behind those of
    its inputs."""
    last: dict[int, int] = {}
    cut: set[tuple[int, int]] = set()
    for action in own:
        for what, chunk, number in action:
            if what == I:
                cut.add((chunk, number))
            elif what in (B, W):
                if number != last.get(chunk, 0) + 1 or (what == W and (chunk, number) not in cut):
                    return False
                last[chunk] = number
    return True
