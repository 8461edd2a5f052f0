"""The paper's randomised greedy order for large instances.

Again and again the best of 100 random maximal sets of tasks that can run together is taken: the one
with most tasks; of equal ones the one after which the senders' loads differ least.
"""

import random
from collections.abc import Sequence
from statistics import pstdev

from interlace.reshard.planning.ordering import HostTask, Sequenced

DRAWS = 100
"""Random sets that are drawn each time, of which the best is taken."""
VISITS = 20_000_000
"""Tasks looked at in all draws together, about; a choice that bounds the time. With more than some
450 tasks there are fewer draws."""


def random_greedy(tasks: Sequence[HostTask], *, seed: int = 0) -> Sequenced:
    """An order of all tasks with their senders; the same for the same seed."""
    draw = random.Random(seed)
    hosts = sorted({host for task in tasks for host in task.senders})
    load = dict.fromkeys(hosts, 0)
    todo = list(range(len(tasks)))
    draws = max(1, min(DRAWS, VISITS // max(1, len(todo)) ** 2))
    sequence: list[tuple[int, int]] = []
    while todo:
        best: list[tuple[int, int]] = []
        best_key = (0, 0.0)
        for _ in range(draws):
            chosen = _maximal_set(tasks, todo, load, draw)
            added = dict(load)
            for i, sender in chosen:
                added[sender] += tasks[i].duration_ns
            key = (-len(chosen), pstdev(added.values()))
            if not best or key < best_key:
                best, best_key = chosen, key
        for i, sender in best:
            load[sender] += tasks[i].duration_ns
        sequence += best
        placed = {i for i, _ in best}
        todo = [i for i in todo if i not in placed]
    return tuple(sequence)


def _maximal_set(
    tasks: Sequence[HostTask], todo: Sequence[int], load: dict[int, int], draw: random.Random
) -> list[tuple[int, int]]:
    """Tasks without a common host, in random order; a sender that has sent less is likelier."""
    sending: set[int] = set()
    receiving: set[int] = set()
    most = max(load.values())
    chosen = []
    for i in draw.sample(todo, len(todo)):
        task = tasks[i]
        if not receiving.isdisjoint(task.receivers):
            continue
        free = [host for host in task.senders if host not in sending]
        if not free:
            continue
        (sender,) = draw.choices(free, weights=[most - load[host] + 1 for host in free])
        sending.add(sender)
        receiving.update(task.receivers)
        chosen.append((i, sender))
        if len(sending) == len(load):
            break
    return chosen
