"""Proven optima of small problems, by dynamic programming over sets of issued operators.

Two orders of the same operators differ, for what comes after, only in a few times: that of the
compute lane, those at which links are free, and the ends of collectives that somebody still waits
for. Of states with the same operators issued only those that no other beats in all of these
times are kept. A state whose remaining work cannot end before the best known order is dropped.
What is alive depends on the set alone, so a memory bound only forbids some of the steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from interlace.search.bounds import longest_paths
from interlace.search.evaluator import Evaluator
from interlace.search.memory import Alive, Liveness

MAX_STATES = 20_000
"""States looked at before giving up; a choice, some tenths of a second."""
MAX_OPERATORS = 64
"""Operators beyond which a problem is too large for proven optima, since their sets are too many; a
choice."""


@dataclass(slots=True)
class _State:
    times: tuple[int, ...]
    """Compute lane, links, ends of live collectives in order of their number."""
    parent: "_State | None"
    operator: int


@dataclass(slots=True)
class _Set:
    """A set of issued operators and its best states."""

    ready: tuple[int, ...]
    live: tuple[int, ...]
    """Issued collectives with a reader that has not been issued."""
    left: tuple[int, ...]
    """Work of each lane that has not been issued, in ns."""
    alive: Alive
    states: list[_State]


def order_optimal(
    world: Evaluator,
    upper: Sequence[int] | None,
    *,
    values: Liveness | None = None,
    bound: int = 0,
    max_states: int = MAX_STATES,
) -> list[int] | None:
    """An optimal order, `upper` itself if nothing is shorter, or None if the problem is too
    large to tell within `max_states`.

    With `values`, of orders with at most `bound` bytes alive; if there are none, an empty list."""
    if len(world.names) > MAX_OPERATORS:
        return None
    walk = _Sets(world, values, bound)
    best = world.length(upper)[0] if upper is not None else None
    level = {0: walk.start()}
    looked_at = 0
    for _ in world.names:
        following: dict[int, _Set] = {}
        for mask, own in level.items():
            for operator in walk.steps(own):
                grown = mask | 1 << operator
                after = following.get(grown) or walk.grow(own, operator, grown)
                for state in own.states:
                    looked_at += 1
                    if looked_at > max_states:
                        return None
                    times = walk.issue(own, state.times, operator, after.live)
                    if best is None or walk.end(after, times, operator) < best:
                        _keep(after.states, _State(times, state, operator))
                if after.states:
                    following[grown] = after
        level = following
    ends = [state for own in level.values() for state in own.states]
    if not ends:
        return list(upper or ())
    return _order(min(ends, key=lambda state: max(state.times[: world.lanes])))


def smallest_peak_order(
    world: Evaluator, values: Liveness, *, max_states: int = MAX_STATES
) -> list[int] | None:
    """An order with the lowest peak of all, or None if the problem is too large to tell."""
    if len(world.names) > MAX_OPERATORS:
        return None
    walk = _Sets(world, values, sum(values.size))
    level: dict[int, tuple[int, list[int], _Set]] = {0: (values.start, [], walk.start())}
    looked_at = 0
    for _ in world.names:
        following: dict[int, tuple[int, list[int], _Set]] = {}
        for mask, (peak, order, own) in level.items():
            for operator in own.ready:
                looked_at += 1
                if looked_at > max_states:
                    return None
                grown = mask | 1 << operator
                higher = max(peak, own.alive.bytes + values.size[operator])
                known = following.get(grown)
                if known is None or higher < known[0]:
                    after = known[2] if known else walk.grow(own, operator, grown)
                    following[grown] = (higher, [*order, operator], after)
        level = following
    return min(level.values(), key=lambda end: end[0])[1]


class _Sets:
    def __init__(self, world: Evaluator, values: Liveness | None, bound: int) -> None:
        self.world = world
        self.values = values or Liveness(world.graph)
        self.bound = bound if values else sum(self.values.size)
        self.inputs = [sum(1 << source for source in own) for own in world.inputs]
        self.users = [sum(1 << user for user in own) for own in map(set, world.users)]
        paths = longest_paths(world.graph, dict(zip(world.names, world.time, strict=True)))
        self.after = [paths[name] - world.time[i] for i, name in enumerate(world.names)]

    def start(self) -> _Set:
        world = self.world
        left = [0] * world.lanes
        for i, lane in enumerate(world.lane):
            left[lane] += world.time[i]
            if lane:
                left[0] += world.issue_ns
        ready = tuple(i for i, own in enumerate(self.inputs) if not own)
        states = [_State((0,) * world.lanes, None, -1)]
        return _Set(ready, (), tuple(left), Alive(self.values), states)

    def steps(self, own: _Set) -> Iterator[int]:
        """Ready operators that fit into memory."""
        for i in own.ready:
            if max(own.alive.peak, own.alive.bytes + self.values.size[i]) <= self.bound:
                yield i

    def grow(self, own: _Set, operator: int, grown: int) -> _Set:
        """The set with `operator` issued too, without states."""
        world = self.world
        opened = [u for u in set(world.users[operator]) if self.inputs[u] & ~grown == 0]
        ready = (*(i for i in own.ready if i != operator), *opened)
        waited = [i for i in (*own.live, operator) if world.lane[i] and self.users[i] & ~grown]
        left = list(own.left)
        left[world.lane[operator]] -= world.time[operator]
        if world.lane[operator]:
            left[0] -= world.issue_ns
        alive = own.alive.copy()
        alive.issue(operator)
        return _Set(tuple(sorted(ready)), tuple(sorted(waited)), tuple(left), alive, [])

    def issue(
        self, own: _Set, times: tuple[int, ...], operator: int, live: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The times after `operator`, with the ends of the collectives that are `live` then."""
        world = self.world
        free = list(times[: world.lanes])
        ends = dict(zip(own.live, times[world.lanes :], strict=True))
        now = max([free[0], *(ends[source] for source in world.slow_inputs[operator])])
        lane = world.lane[operator]
        if lane:
            free[lane] = ends[operator] = max(now, free[lane]) + world.time[operator]
            now += world.issue_ns
        else:
            now += world.time[operator]
        free[0] = now
        return (*free, *(ends[i] if ends[i] > now else now for i in live))

    def end(self, after: _Set, times: tuple[int, ...], operator: int) -> int:
        """A time before which no continuation can end."""
        lanes = [time + left for time, left in zip(times, after.left, strict=False)]
        lane = self.world.lane[operator]
        return max(*lanes, times[lane] + self.after[operator])


def _keep(states: list[_State], new: _State) -> None:
    if any(_beats(state.times, new.times) for state in states):
        return
    states[:] = [state for state in states if not _beats(new.times, state.times)]
    states.append(new)


def _beats(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(first, second, strict=True))


def _order(state: _State | None) -> list[int]:
    found = []
    while state is not None and state.parent is not None:
        found.append(state.operator)
        state = state.parent
    return found[::-1]
