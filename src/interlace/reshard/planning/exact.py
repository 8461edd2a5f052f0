"""The shortest order of the paper's model, by branch and bound, proved where the limit allows.

Tasks are submitted in the order of their starts, and only those that start before any other could
have ended: every other schedule can be moved left into one of these (Giffler and Thompson, 1960).
Of equal tasks the first goes first. Sides of hosts that are free before the last start count as
free then, so states that differ only in the past are the same and are visited once.
"""

from collections.abc import Iterator, Sequence

from interlace.errors import InputError
from interlace.reshard.planning.depth_first import MOST_TASKS, search
from interlace.reshard.planning.move_bounds import least_load
from interlace.reshard.planning.ordering import Clocks, HostTask, Sequenced, paper_makespan
from interlace.reshard.planning.random_greedy import random_greedy

NODES_PER_S = 10_000
"""Nodes that one core visits in a second, about. Nodes are counted, not seconds, so that all ranks
stop at the same one."""


def exact(tasks: Sequence[HostTask], *, time_limit_s: float = 1.0, seed: int = 0) -> Sequenced:
    """An order that no other beats. InputError if that is not proved within the limit."""
    found = [random_greedy(tasks, seed=seed)]
    if len(tasks) <= MOST_TASKS:
        found.append(search(tasks, time_limit_s=time_limit_s / 4))
    best = min(found, key=lambda sequence: paper_makespan(tasks, sequence))
    bound_ns = paper_bound_ns(tasks)
    if paper_makespan(tasks, best) == bound_ns:
        return best
    proof = _Proof(tasks, best, bound_ns, int(time_limit_s * NODES_PER_S))
    if len(tasks) > MOST_TASKS or not proof.run():
        raise InputError(
            f"order = 'exact': {len(tasks)} tasks are too many to prove an order within "
            f"{time_limit_s} s; the best one found takes {proof.best_ns} ns, the lower bound is "
            f"{bound_ns} ns",
            hint="give more time, or use order = 'auto', which cuts tasks and needs no proof",
        )
    return proof.best


def paper_bound_ns(tasks: Sequence[HostTask]) -> int:
    """No order is shorter: the largest load of a receiver, or of senders that share their tasks
    at best."""
    into: dict[int, int] = {}
    for task in tasks:
        for receiver in task.receivers:
            into[receiver] = into.get(receiver, 0) + task.duration_ns
    sending = least_load([(task.duration_ns, task.senders) for task in tasks if task.receivers])
    return max([sending, *into.values(), *(task.duration_ns for task in tasks)], default=0)


class _Proof:
    def __init__(
        self, tasks: Sequence[HostTask], best: Sequenced, bound_ns: int, nodes: int
    ) -> None:
        self.tasks = tasks
        self.best = best
        self.best_ns = paper_makespan(tasks, best)
        self.bound_ns = bound_ns
        self.nodes = nodes
        self.clocks = Clocks(tasks)
        self.sequence: list[tuple[int, int]] = [
            (i, task.senders[0]) for i, task in enumerate(tasks) if not task.receivers
        ]
        self.seen: set[tuple[object, ...]] = set()

    def run(self) -> bool:
        """Whether `best` is proved; it may have been improved."""
        self._visit(tuple(i for i, task in enumerate(self.tasks) if task.receivers), 0, 0)
        return self.nodes >= 0 or self.best_ns == self.bound_ns

    def _visit(self, todo: tuple[int, ...], last_ns: int, end_ns: int) -> None:
        if not todo:
            if end_ns < self.best_ns:
                self.best, self.best_ns = tuple(self.sequence), end_ns
            return
        self.nodes -= 1
        clocks = self.clocks
        clocks.out = [max(at, last_ns) for at in clocks.out]
        clocks.into = [max(at, last_ns) for at in clocks.into]
        if self.nodes < 0 or max(end_ns, self._bound_ns(todo)) >= self.best_ns:
            return
        state = (todo, *clocks.out, *clocks.into)
        if state in self.seen:
            return
        self.seen.add(state)
        for i, sender, start_ns in list(self._choices(todo)):
            out, into = clocks.out[:], clocks.into[:]
            self.sequence.append((i, sender))
            end = clocks.run(i, sender)
            self._visit(tuple(j for j in todo if j != i), start_ns, max(end_ns, end))
            self.sequence.pop()
            clocks.out, clocks.into = out, into
            if self.nodes < 0 or self.best_ns == self.bound_ns:
                return

    def _choices(self, todo: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(task, sender, start) worth trying next, the earliest start first, then the longest."""
        found = []
        equal: set[HostTask] = set()
        first_end = None
        for i in todo:
            task = self.tasks[i]
            if task in equal:
                continue
            equal.add(task)
            for sender in task.senders:
                start = self.clocks.start_ns(i, sender)
                found.append((start, -task.duration_ns, i, sender))
                end = start + task.duration_ns
                first_end = end if first_end is None else min(first_end, end)
        for start, _, i, sender in sorted(found):
            if first_end is not None and start < first_end:
                yield i, sender, start

    def _bound_ns(self, todo: Sequence[int]) -> int:
        """Loads still to come on top of the clocks; tasks with several senders are spread evenly
        over all the hosts that can send any of them."""
        out, into = self.clocks.out[:], self.clocks.into[:]
        able: set[int] = set()
        shared = 0
        for i in todo:
            task = self.tasks[i]
            for receiver in task.receivers:
                into[receiver] += task.duration_ns
            if len(task.senders) == 1:
                out[task.senders[0]] += task.duration_ns
            else:
                able.update(task.senders)
                shared += task.duration_ns
        mean = -(-(sum(out[host] for host in able) + shared) // len(able)) if able else 0
        return max(mean, *out, *into)
