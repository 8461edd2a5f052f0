"""Put fillers into the idle moments of the compute lane."""

from collections.abc import Mapping, Sequence

from interlace.ir.graph import OpGraph


def insert_fillers(
    graph: OpGraph,
    main: Sequence[str],
    fillers: Sequence[str],
    solo_ns: Mapping[str, int],
    *,
    issue_ns: int,
    overshoot: float,
) -> tuple[str, ...]:
    """`main` with all of `fillers` placed: wherever `main` would wait for a collective, the longest
    ready filler that fits runs; one that does not fit runs if less than the share `overshoot`
    of it sticks out. What is left runs at the end."""
    walk = _Filling(graph, fillers, solo_ns, issue_ns)
    for name in main:
        walk.fill_until(walk.ready_at(name), overshoot)
        walk.issue(name)
    while walk.waiting:
        walk.fill_until(None, overshoot)
    return tuple(walk.order)


class _Filling:
    def __init__(
        self, graph: OpGraph, fillers: Sequence[str], solo_ns: Mapping[str, int], issue_ns: int
    ) -> None:
        self.graph = graph
        self.solo_ns = solo_ns
        self.issue_ns = issue_ns
        self.now = 0
        self.lane_free: dict[str, int] = {}
        self.finish: dict[str, int] = {}
        self.order: list[str] = []
        self.waiting: set[str] = set(fillers)
        self.missing = {name: len(graph.by_id[name].inputs) for name in fillers}
        self.users: dict[str, list[str]] = {}
        for name in fillers:
            for source in graph.by_id[name].inputs:
                self.users.setdefault(source, []).append(name)
        self.ready = [name for name in fillers if not self.missing[name]]

    def ready_at(self, name: str) -> int:
        """When the inputs of an operator are there."""
        return max((self.finish[i] for i in self.graph.by_id[name].inputs), default=0)

    def issue(self, name: str) -> None:
        """Put an operator next in the order."""
        op = self.graph.by_id[name]
        self.now = max(self.now, self.ready_at(name))
        if op.is_collective:
            start = max(self.now, self.lane_free.get(op.lane, 0))
            self.finish[name] = self.lane_free[op.lane] = start + self.solo_ns[name]
            self.now += self.issue_ns
        else:
            self.now += self.solo_ns[name]
            self.finish[name] = self.now
        self.order.append(name)
        for user in self.users.get(name, ()):
            self.missing[user] -= 1
            if not self.missing[user]:
                self.ready.append(user)

    def fill_until(self, until: int | None, overshoot: float) -> None:
        """Run fillers up to `until`, or all that are ready."""
        while until is None or self.now < until:
            able = [name for name in self.ready if self.ready_at(name) <= self.now]
            name = self._choose(able, until, overshoot)
            if not name:
                later = [self.ready_at(n) for n in self.ready if self.ready_at(n) > self.now]
                jump = min(later, default=until)
                if jump is None or (until is not None and jump >= until):
                    return
                self.now = jump
                continue
            self.ready.remove(name)
            self.waiting.discard(name)
            self.issue(name)

    def _choose(self, able: list[str], until: int | None, overshoot: float) -> str:
        if not able or until is None:
            return able[0] if able else ""
        room = until - self.now
        fitting = [name for name in able if self.solo_ns[name] <= room]
        if fitting:
            return max(fitting, key=lambda name: self.solo_ns[name])
        shortest = min(able, key=lambda name: self.solo_ns[name])
        sticks_out = self.solo_ns[shortest] - room
        return shortest if sticks_out < overshoot * self.solo_ns[shortest] else ""
