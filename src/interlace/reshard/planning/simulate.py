"""Runs a plan's list on paper: proves that it can run, and says when every message starts and ends.

Each port and each device link takes its messages in list order, one at a time and direction. A
message starts when both its ends are free and its sender has the parts, and may be forwarded
`latency_ns` after its end. Because every sender has what it sends by messages earlier in the list,
the first message that has not ended can always go on, even if every send waited for its receive:
no cycle of waiting exists.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.hardware.topology import Topology
from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.transfer_plan import Part, Task, Transfer, TransferPlan


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times of a plan's transfers, in its order."""

    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    """When the last byte is sent."""
    makespan_ns: int
    """When the last byte has arrived."""


def simulate(plan: TransferPlan) -> Simulation:
    """Times of all transfers. InputError if a rank would send what it does not have, or a receiver
    would lack or get twice anything that it needs."""
    sizes: dict[int, int] = {}
    for transfer in plan.transfers:
        if id(transfer.parts) not in sizes:
            sizes[id(transfer.parts)] = plan.transfer_bytes(transfer)
    return run(plan.tasks, plan.transfers, sizes, plan.topology)


def run(
    tasks: Sequence[Task],
    transfers: Sequence[Transfer],
    sizes: dict[int, int],
    topology: Topology,
) -> Simulation:
    """As `simulate`; `sizes` has the bytes of every `parts` tuple, by its `id`."""
    links = Links(topology)
    free = [0] * links.ends
    stock = _Stock(tasks)
    start_ns, end_ns = [], []
    for i, transfer in enumerate(transfers):
        ready = stock.ready_ns(i, transfer)
        out, into = links.ends_of(transfer.sender, transfer.receiver)
        start = max(free[out], free[into], ready)
        took = links.time_ns(transfer.sender, transfer.receiver, sizes[id(transfer.parts)])
        free[out] = free[into] = end = start + took
        stock.arrive(i, transfer, end + topology.latency_ns)
        start_ns.append(start)
        end_ns.append(end)
    stock.check_complete()
    makespan = max(end_ns) + topology.latency_ns if end_ns else 0
    return Simulation(tuple(start_ns), tuple(end_ns), makespan)


class _Stock:
    """What every rank has received. Transfers of one chunk share one `parts` tuple, so most
    questions are one look-up by its identity."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.got: dict[int, dict[int, tuple[tuple[Part, ...], int]]] = {}
        self.holders: dict[int, frozenset[int]] = {}

    def ready_ns(self, i: int, transfer: Transfer) -> int:
        parts, sender = transfer.parts, transfer.sender
        if sender in self._holders(parts):
            return 0
        got = self.got.get(sender, {})
        if id(parts) in got:
            return got[id(parts)][1]
        return max((self._part_ready_ns(i, part, sender) for part in parts), default=0)

    def arrive(self, i: int, transfer: Transfer, at_ns: int) -> None:
        got = self.got.setdefault(transfer.receiver, {})
        if id(transfer.parts) in got:
            raise InputError(
                f"transfer {i}: rank {transfer.receiver} already has {transfer.parts[0]}",
                hint="plans come from make_plan; send every part to a receiver once",
            )
        got[id(transfer.parts)] = (transfer.parts, at_ns)

    def check_complete(self) -> None:
        """Every receiver has every element of its tasks exactly once. Replicas get the same chunks,
        so the elements of a set of chunks are counted once."""
        needs: dict[int, list[int]] = {}
        for number, task in enumerate(self.tasks):
            for rank in task.receivers:
                needs.setdefault(rank, []).append(number)
        known: dict[frozenset[int], dict[int, int]] = {}
        for rank in sorted(needs.keys() | self.got.keys()):
            got = self.got.get(rank, {})
            key = frozenset(got)
            if key not in known:
                known[key] = _in_place(part for parts, _ in got.values() for part in parts)
            self._check_rank(rank, needs.get(rank, []), known[key])

    def _check_rank(self, rank: int, needs: list[int], in_place: dict[int, int]) -> None:
        hint = "plans come from make_plan; send each part to each receiver of its task once"
        for number in needs:
            if in_place.get(number, 0) != self.tasks[number].elements:
                raise InputError(
                    f"rank {rank} would not get task {number} whole, each element once", hint=hint
                )
        foreign = in_place.keys() - set(needs)
        if foreign:
            raise InputError(
                f"rank {rank} would get task {min(foreign)}, which it does not need", hint=hint
            )

    def _holders(self, parts: tuple[Part, ...]) -> frozenset[int]:
        """Ranks that hold all of the parts from the start."""
        found = self.holders.get(id(parts))
        if found is None:
            senders = {id(self.tasks[p.task].senders): p.task for p in parts}
            sets = [frozenset(self.tasks[task].senders) for task in senders.values()]
            found = self.holders[id(parts)] = frozenset.intersection(*sets)
        return found

    def _part_ready_ns(self, i: int, part: Part, sender: int) -> int:
        """When all elements of a part that was cut differently have arrived."""
        if sender in self.tasks[part.task].senders:
            return 0
        runs = sorted(
            (own.start, own.stop, at_ns)
            for parts, at_ns in self.got.get(sender, {}).values()
            for own in parts
            if own.task == part.task and own.start < part.stop and own.stop > part.start
        )
        at, ready = part.start, 0
        for start, stop, at_ns in runs:
            if start > at:
                break
            at, ready = max(at, stop), max(ready, at_ns)
        if at < part.stop:
            raise InputError(
                f"transfer {i}: rank {sender} would send element {at} of task {part.task} before "
                "it has it",
                hint="plans come from make_plan; order a forward after its arrival",
            )
        return ready


def _in_place(parts: Iterable[Part]) -> dict[int, int]:
    """Elements of each task that the parts cover from its start; -1 with a gap or an overlap."""
    reached: dict[int, int] = {}
    for part in sorted(parts, key=lambda part: (part.task, part.start)):
        at = reached.setdefault(part.task, 0)
        if at != part.start:
            reached[part.task] = -1
        else:
            reached[part.task] = part.stop
    return reached
