"""How long orders take under contention: `sim.lanes.simulate` without spans, some times faster."""

import math
from collections import deque
from collections.abc import Sequence

from interlace.ir.graph import COMPUTE_LANE
from interlace.search.evaluator import Evaluator
from interlace.search.problem import Problem
from interlace.sim.lanes import DONE_NS

_NO_KIND = 0


class ContendedLength:
    """Lengths of orders of operator numbers (`Evaluator`) under a problem's contention."""

    def __init__(self, world: Evaluator, problem: Problem) -> None:
        contention = problem.contention
        assert contention is not None
        operators = problem.graph.operators
        self._world = world
        queues: dict[str, int] = {}
        for op in operators:
            if op.lane != COMPUTE_LANE:
                queues.setdefault(contention.queues.get(op.lane, op.lane), len(queues))
        self._queue = [queues.get(contention.queues.get(op.lane, op.lane), -1) for op in operators]
        links = [contention.links.get(name) for name in queues]
        self._beside = [
            [other for other, link in enumerate(links) if link == own and link is not None]
            for own in links
        ]
        """By queue: those on its link, itself too; none if its link is its own."""
        self._behind = [contention.behind_ns.get(op.key, 0) for op in operators]
        kinds = sorted({op.kind for op in operators})
        numbers = {kind: number for number, kind in enumerate(kinds, start=_NO_KIND + 1)}
        self._kind = [numbers[op.kind] for op in operators]
        pairs, none = contention.factors, (1.0, 1.0)
        self._factors = [[none] * (len(kinds) + 1)]
        """By kind of what is computed and of the transfer beside it."""
        for one in kinds:
            self._factors.append([none, *(pairs.get((one, other), none) for other in kinds)])

    def of(self, order: Sequence[int]) -> tuple[int, list[int]]:
        """(ns, positions before which the compute lane waited; the last one for the end)."""
        run = _Run(self._queue, self._beside, self._kind, self._factors, len(self._beside))
        world, waits = self._world, []
        lanes, times, slow_inputs, issue = world.lane, world.time, world.slow_inputs, world.issue_ns
        for position, i in enumerate(order):
            begin = run.now
            for source in slow_inputs[i]:
                run.idle_until(source)
            if round(run.now) > round(begin):
                waits.append(position)
            if lanes[i]:
                run.start(i, times[i], self._behind[i])
                if issue:
                    run.compute(issue, _NO_KIND)
            else:
                run.compute(times[i], self._kind[i])
        begin = run.now
        run.finish()
        if round(run.now) > round(begin):
            waits.append(len(order) - 1)
        return round(run.now), list(dict.fromkeys(waits))


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        queue: list[int],
        beside: list[list[int]],
        kind: list[int],
        factors: list[list[tuple[float, float]]],
        queues: int,
    ) -> None:
        self.now = 0.0
        self._queue, self._beside, self._kind, self._factors = queue, beside, kind, factors
        self._standing: list[deque[int]] = [deque() for _ in range(queues)]
        self._rests = [-math.inf] * queues
        self._left: dict[int, float] = {}
        """Work of transfers that are not over, in ns at full speed."""

    def start(self, transfer: int, ns: int, behind_ns: int) -> None:
        """Put a transfer into its queue."""
        queue, left = self._queue[transfer], float(ns)
        if behind_ns:
            rested = 0.0 if self._standing[queue] else self.now - self._rests[queue]
            left += max(0.0, behind_ns - rested)
        self._left[transfer] = left
        self._standing[queue].append(transfer)

    def compute(self, ns: int, kind: int) -> None:
        """Run an operator to its end."""
        work, factors = float(ns), self._factors[kind]
        while work > DONE_NS:
            heads = [standing[0] for standing in self._standing if standing]
            if not heads:
                self.now += work
                return
            slow = 1.0
            for head in heads:
                slow += factors[self._kind[head]][0] - 1.0
            step = self._pass(heads, factors, work * slow)
            work -= step / slow

    def idle_until(self, transfer: int) -> None:
        """Wait for a transfer; none that was not started is waited for."""
        nothing = self._factors[_NO_KIND]
        while transfer in self._left:
            heads = [standing[0] for standing in self._standing if standing]
            self._pass(heads, nothing, math.inf)

    def finish(self) -> None:
        """Wait for all."""
        for transfer in list(self._left):
            self.idle_until(transfer)

    def _pass(self, heads: list[int], factors: list[tuple[float, float]], longest: float) -> float:
        """Let time pass until a transfer ends, `longest` ns at most; how much did."""
        left, slowed = self._left, []
        step = longest
        for head in heads:
            factor = factors[self._kind[head]][1]
            beside = self._beside[self._queue[head]]
            if len(beside) > 1:
                factor *= sum(1 for queue in beside if self._standing[queue])
            slowed.append(factor)
            step = min(step, left[head] * factor)
        self.now += step
        for head, factor in zip(heads, slowed, strict=True):
            left[head] -= step / factor
            if left[head] <= DONE_NS:
                del left[head]
                queue = self._queue[head]
                self._standing[queue].popleft()
                self._rests[queue] = self.now
        return step
