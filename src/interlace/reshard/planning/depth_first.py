"""The paper's depth-first search over (next task, its sender), pruned by a heuristic.

The heuristic adds the remaining tasks one by one to their receivers and to the sender that would be
free first, so it may prune the best order: `exact` does not. The time limit is counted in nodes, so
that all ranks stop at the same one.
"""

from collections.abc import Sequence

from interlace.errors import InputError
from interlace.reshard.planning.ordering import (
    Clocks,
    HostTask,
    Sequenced,
    load_balance,
    paper_makespan,
)

NODES_PER_S = 20_000
"""Nodes of ten tasks that one core looks at in a second, about; with more tasks fewer are
counted."""
MOST_TASKS = 300
"""Most tasks of a problem; a choice: with more, a depth-first search sees only the end of one
order."""


def search(tasks: Sequence[HostTask], *, time_limit_s: float = 1.0) -> Sequenced:
    """The best order found, at least as good as `load_balance`. InputError if there are too many
    tasks."""
    if len(tasks) > MOST_TASKS:
        raise InputError(
            f"order = 'search' with {len(tasks)} tasks, more than {MOST_TASKS}",
            hint="use order = 'random_greedy' or 'auto'",
        )
    nodes = int(time_limit_s * NODES_PER_S * 10 / max(10, len(tasks)))
    return _Search(tasks, nodes).run()


class _Search:
    def __init__(self, tasks: Sequence[HostTask], nodes: int) -> None:
        self.tasks = tasks
        self.nodes = nodes
        self.best = load_balance(tasks)
        self.best_ns = paper_makespan(tasks, self.best)
        self.clocks = Clocks(tasks)
        self.sequence: list[tuple[int, int]] = [
            (i, task.senders[0]) for i, task in enumerate(tasks) if not task.receivers
        ]

    def run(self) -> Sequenced:
        self._visit([i for i, task in enumerate(self.tasks) if task.receivers], 0)
        return self.best

    def _visit(self, todo: list[int], end_ns: int) -> None:
        if not todo:
            if end_ns < self.best_ns:
                self.best, self.best_ns = tuple(self.sequence), end_ns
            return
        self.nodes -= 1
        if self.nodes < 0 or max(end_ns, self._heuristic_ns(todo)) >= self.best_ns:
            return
        clocks = self.clocks
        for at, i in enumerate(todo):
            rest = todo[:at] + todo[at + 1 :]
            for sender in sorted(self.tasks[i].senders, key=clocks.out.__getitem__):
                out, into = clocks.out[:], clocks.into[:]
                self.sequence.append((i, sender))
                self._visit(rest, max(end_ns, clocks.run(i, sender)))
                self.sequence.pop()
                clocks.out, clocks.into = out, into
                if self.nodes < 0:
                    return

    def _heuristic_ns(self, todo: Sequence[int]) -> int:
        out, into = self.clocks.out[:], self.clocks.into[:]
        for i in todo:
            task = self.tasks[i]
            out[min(task.senders, key=out.__getitem__)] += task.duration_ns
            for receiver in task.receivers:
                into[receiver] += task.duration_ns
        return max(*out, *into)
