"""Proven optima of small problems, by dynamic programming over sets of issued operators.

Two orders of the same operators differ, for what comes after, only in a few times: that of the
compute lane, those at which links are free, and the ends of collectives that somebody still waits
for. Of states with the same operators issued only those that no other beats in all of these
times are kept. A state whose remaining work cannot end before the best known order is dropped.
"""

from dataclasses import dataclass

from interlace.search.polish import Evaluator
from interlace.search.problem import Problem

MAX_STATES = 20_000
"""States looked at before giving up, about half a second."""


@dataclass(slots=True)
class _State:
    times: tuple[int, ...]
    """Compute lane, links, ends of live collectives in order of their number."""
    parent: "_State | None"
    operator: int


def order_optimal(
    problem: Problem, upper: tuple[str, ...], *, max_states: int = MAX_STATES
) -> tuple[str, ...] | None:
    """An optimal order, `upper` itself if nothing is shorter, or None if the problem is too
    large to tell within `max_states`."""
    world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    best, _ = world.length([world.number[name] for name in upper])
    count = len(world.names)
    level = {0: [_State((0,) * world.lanes, None, -1)]}
    looked_at = 0
    for _ in range(count):
        following: dict[int, list[_State]] = {}
        for mask, states in level.items():
            for operator in _ready(world, mask):
                grown = mask | 1 << operator
                for state in states:
                    looked_at += 1
                    if looked_at > max_states:
                        return None
                    times = _issue(world, mask, state.times, operator)
                    if _remaining(world, grown, times) < best:
                        _keep(following.setdefault(grown, []), _State(times, state, operator))
        level = {mask: states for mask, states in following.items() if states}
    if not level:
        return upper
    ends = [state for states in level.values() for state in states]
    return _order(world, min(ends, key=lambda state: max(state.times[: world.lanes])))


def _ready(world: Evaluator, mask: int) -> list[int]:
    return [
        i
        for i in range(len(world.names))
        if not mask >> i & 1 and all(mask >> source & 1 for source in world.inputs[i])
    ]


def _live(world: Evaluator, mask: int) -> list[int]:
    """Issued collectives with a reader that has not been issued."""
    return [
        i
        for i in range(len(world.names))
        if world.lane[i] and mask >> i & 1 and any(not mask >> u & 1 for u in world.users[i])
    ]


def _issue(world: Evaluator, mask: int, times: tuple[int, ...], operator: int) -> tuple[int, ...]:
    free = list(times[: world.lanes])
    ends = dict(zip(_live(world, mask), times[world.lanes :], strict=True))
    now = max([free[0], *(ends[source] for source in world.slow_inputs[operator])])
    lane = world.lane[operator]
    if lane:
        free[lane] = ends[operator] = max(now, free[lane]) + world.time[operator]
        now += world.issue_ns
    else:
        now += world.time[operator]
    free[0] = now
    return (*free, *(ends[i] for i in _live(world, mask | 1 << operator)))


def _remaining(world: Evaluator, mask: int, times: tuple[int, ...]) -> int:
    """A time before which no continuation can end."""
    left = list(times[: world.lanes])
    for i, lane in enumerate(world.lane):
        if not mask >> i & 1:
            left[lane] += world.time[i]
            if lane:
                left[0] += world.issue_ns
    return max(left)


def _keep(cell: list[_State], new: _State) -> None:
    if any(_beats(state.times, new.times) for state in cell):
        return
    cell[:] = [state for state in cell if not _beats(new.times, state.times)]
    cell.append(new)


def _beats(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(first, second, strict=True))


def _order(world: Evaluator, state: _State | None) -> tuple[str, ...]:
    found = []
    while state is not None and state.parent is not None:
        found.append(world.names[state.operator])
        state = state.parent
    return tuple(reversed(found))
