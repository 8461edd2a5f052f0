"""Orders as lists of operator numbers: how long they take, fast."""

from collections.abc import Iterable, Mapping, Sequence

from interlace.ir.graph import OpGraph


class Evaluator:
    """Length of an order; `sim.lanes.simulate` without spans and without contention."""

    def __init__(self, graph: OpGraph, solo_ns: Mapping[str, int], issue_ns: int) -> None:
        number = {op.id: i for i, op in enumerate(graph.operators)}
        lanes = {lane: i for i, lane in enumerate(graph.lanes)}
        self.graph = graph
        self.names = [op.id for op in graph.operators]
        self.number = number
        self.issue_ns = issue_ns
        self.inputs = [tuple(number[i] for i in op.inputs) for op in graph.operators]
        self.lane = [lanes[op.lane] for op in graph.operators]
        self.slow_inputs = [tuple(i for i in own if self.lane[i]) for own in self.inputs]
        self.time = [solo_ns[op.id] for op in graph.operators]
        self.lanes = len(lanes)
        self.users: list[list[int]] = [[] for _ in self.names]
        for i, sources in enumerate(self.inputs):
            for source in sources:
                self.users[source].append(i)

    def numbers(self, order: Iterable[str]) -> list[int]:
        """An order of names as numbers."""
        return [self.number[name] for name in order]

    def order(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """The names of an order of numbers."""
        return tuple(self.names[i] for i in numbers)

    def length(self, order: Sequence[int]) -> tuple[int, list[int]]:
        """(length in ns, positions in the order at which the compute lane waited)."""
        now = 0
        finish = [0] * len(self.names)
        free = [0] * self.lanes
        waits = []
        for position, i in enumerate(order):
            for source in self.slow_inputs[i]:
                if finish[source] > now:
                    now = finish[source]
                    if not waits or waits[-1] != position:
                        waits.append(position)
            lane = self.lane[i]
            if lane:
                begin = free[lane] if free[lane] > now else now
                finish[i] = free[lane] = begin + self.time[i]
                now += self.issue_ns
            else:
                now += self.time[i]
        return max(now, *free), waits

    def length_ns(self, order: Iterable[str]) -> int:
        """Length of an order of names."""
        return self.length(self.numbers(order))[0]
