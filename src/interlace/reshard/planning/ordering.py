"""The paper's model of a resharding, and its two simple orders (section 3.2).

One port per host and direction. A task occupies its sender's host and all of its receivers' hosts
for its whole duration; tasks that share one run one after the other, as submitted. Which host
sends each task, and in which order, is to be chosen; the time of the last end is to be minimal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.tasks import Bundle

Sequenced = tuple[tuple[int, int], ...]
"""(task, host that sends it), in the order of submission."""


@dataclass(frozen=True, slots=True)
class HostTask:
    """A task with devices collapsed to hosts."""

    duration_ns: int
    senders: tuple[int, ...]
    """Hosts that hold the slice."""
    receivers: tuple[int, ...]
    """Hosts that need it and hold nothing of it."""


class Clocks:
    """When every host's sending and receiving side is free again."""

    def __init__(self, tasks: Sequence[HostTask]) -> None:
        hosts = 1 + max((max(*task.senders, *task.receivers, 0) for task in tasks), default=0)
        self.tasks = tasks
        self.out = [0] * hosts
        self.into = [0] * hosts

    def start_ns(self, task: int, sender: int) -> int:
        """When this task could start."""
        return max(self.out[sender], *(self.into[r] for r in self.tasks[task].receivers))

    def run(self, task: int, sender: int) -> int:
        """Submit a task; returns when it ends."""
        end = self.start_ns(task, sender) + self.tasks[task].duration_ns
        self.out[sender] = end
        for receiver in self.tasks[task].receivers:
            self.into[receiver] = end
        return end


def host_tasks(bundles: Sequence[Bundle], links: Links) -> list[HostTask]:
    """Bundles as tasks between hosts; one that crosses no port has no receiver, takes no time."""
    tasks = []
    for bundle in bundles:
        senders = tuple(links.by_host(bundle.senders))
        receivers = tuple(host for host in links.by_host(bundle.receivers) if host not in senders)
        duration_ns = links.port_ns(bundle.size_bytes) if receivers else 0
        tasks.append(HostTask(duration_ns, senders, receivers))
    return tasks


def paper_makespan(tasks: Sequence[HostTask], sequence: Sequenced) -> int:
    """The time of the last end, in nanoseconds."""
    clocks = Clocks(tasks)
    return max(
        (clocks.run(task, sender) for task, sender in sequence if tasks[task].receivers), default=0
    )


def naive(tasks: Sequence[HostTask]) -> Sequenced:
    """Tile order, the first replica sends."""
    return tuple((i, task.senders[0]) for i, task in enumerate(tasks))


def load_balance(tasks: Sequence[HostTask]) -> Sequenced:
    """Tile order; the sender that has least to send so far, the first of equals."""
    load: dict[int, int] = {}
    sequence = []
    for i, task in enumerate(tasks):
        sender = min(task.senders, key=lambda host: load.get(host, 0))
        load[sender] = load.get(sender, 0) + task.duration_ns
        sequence.append((i, sender))
    return tuple(sequence)
