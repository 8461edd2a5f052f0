"""Simulate one rank's issue order on one compute lane and one queue per link lane.

The rank issues operators in order. A compute operator starts when the compute lane is free and
the collectives that it needs are done; waiting for them is exposed communication. A collective is
issued without blocking and takes its lane in issue order.

Contention makes this a fluid model: while a compute operator and a transfer are both under way
each goes on at 1 / factor of its speed, factors of several transfers adding up, and transfers on
lanes of one link share its bandwidth evenly, unless they stand in one queue. Speeds change only
when something starts or ends. A transfer close behind another may take longer than after a pause.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from interlace.ir.actions import shown
from interlace.ir.costs import Contention
from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.ir.timeline import WAIT, Span, Timeline

DONE_NS = 1e-3
"""Work, in ns, below which what is left is rounding error of the speeds; a choice."""


@dataclass(slots=True, eq=False)
class RunningTransfer:
    """One collective under way; times in ns, work in ns at full speed."""

    op: Operator
    strand: str
    micro_batch: int
    left: float
    issue: float
    start: float
    end: float = -1.0


class Rank:
    """The compute lane and the links of one rank, advanced operator by operator."""

    def __init__(self, issue_ns: int = 0, contention: Contention | None = None) -> None:
        self.issue_ns = issue_ns
        self.factors = contention.factors if contention else {}
        self.links = contention.links if contention else {}
        self.behind_ns = contention.behind_ns if contention else {}
        self.queue_of = contention.queues if contention else {}
        self.alone = contention is None or contention.is_none
        """Whether everything goes at full speed, whatever runs beside it."""
        self.rests: dict[str, float] = {}
        """Since when a queue is empty; one that never was in use has rested for long."""
        self.now = 0.0
        self.queues: dict[str, deque[RunningTransfer]] = {}
        """Transfers by queue in issue order; of those that are over only some that nothing slowed
        down are left."""
        self.log: list[Span | RunningTransfer] = []
        self.unseen = False
        """Whether the log lacks operators."""

    def collective(self, op: Operator, ns: int, strand: str, micro_batch: int) -> RunningTransfer:
        """Issue a collective, which holds the compute lane for `issue_ns`."""
        name = self._queue(op)
        queue = self.queues.setdefault(name, deque())
        transfer = RunningTransfer(op, strand, micro_batch, float(ns), self.now, self.now)
        if self.alone:  # its end is known already
            while queue and queue[0].end <= self.now:
                queue.popleft()
            if queue:
                transfer.start = queue[-1].end
            transfer.end = transfer.start + ns
        elif self.behind_ns:
            rested = 0.0 if queue else self.now - self.rests.get(name, -math.inf)
            transfer.left += max(0.0, self.behind_ns.get(op.key, 0) - rested)
        queue.append(transfer)
        self.log.append(transfer)
        if self.issue_ns:
            self._compute_lane(op, None, self.issue_ns, strand, micro_batch)
        return transfer

    def compute(self, op: Operator, ns: int, strand: str, micro_batch: int) -> None:
        """Run a compute operator to its end."""
        self._compute_lane(op, op.kind, ns, strand, micro_batch)

    def compute_unseen(self, ns: int) -> None:
        """Run operators that the log will lack. Only where nothing slows anything down."""
        self.now += ns
        self.unseen = True

    def wait(self, transfers: Iterable[RunningTransfer]) -> None:
        """Idle until all of them are over."""
        for transfer in transfers:
            begin = self.now
            self._idle_until(transfer)
            self._log(transfer.op.id, WAIT, begin, transfer.strand, transfer.micro_batch)

    def pause(self, ns: int) -> None:
        """Idle for so long; nothing is in flight."""
        begin = self.now
        self.now += ns
        self._log("barrier", WAIT, begin, "", 0)

    def in_flight(self) -> list[RunningTransfer]:
        """Collectives that are not over, lane by lane in issue order."""
        flying = (transfer for queue in self.queues.values() for transfer in queue)
        return [transfer for transfer in flying if transfer.end < 0 or transfer.end > self.now]

    def finish(self) -> tuple[Span, ...]:
        """Wait for everything; all spans, in order of issue."""
        begin = self.now
        for transfer in self.in_flight():
            self._idle_until(transfer)
        self._log("end", WAIT, begin, "", 0)
        if self.unseen:  # so that the timeline is as long as it was
            now = round(self.now)
            self.log.append(Span("end", Kind.OTHER, COMPUTE_LANE, now, now))
        return tuple(
            _span(each) if isinstance(each, RunningTransfer) else each for each in self.log
        )

    def _compute_lane(
        self, op: Operator, kind: Kind | None, ns: int, strand: str, micro_batch: int
    ) -> None:
        begin, work = self.now, float(ns)
        while work > DONE_NS:
            heads = [] if self.alone else self._heads()
            if not heads:
                self.now += work
                break
            slow = 1.0 + sum(self._factors(kind, transfer)[0] - 1.0 for transfer in heads)
            slowed = [self._slow(kind, transfer, heads) for transfer in heads]
            lasts = (t.left * factor for t, factor in zip(heads, slowed, strict=True))
            step = min(work * slow, *lasts)
            self._step(heads, slowed, step)
            work -= step / slow
        ends = (round(begin), round(self.now))
        self.log.append(Span(op.id, op.kind, COMPUTE_LANE, *ends, strand, micro_batch))

    def _idle_until(self, transfer: RunningTransfer) -> None:
        self.now = max(self.now, transfer.end)
        while transfer.end < 0:
            heads = self._heads()
            slowed = [self._slow(None, other, heads) for other in heads]
            lasts = (t.left * factor for t, factor in zip(heads, slowed, strict=True))
            self._step(heads, slowed, min(lasts))

    def _step(self, heads: list[RunningTransfer], slowed: list[float], step: float) -> None:
        """Let `step` ns pass, in which nothing starts and nothing ends before the end; each of the
        transfers takes so many times as long as alone."""
        self.now += step
        for transfer, factor in zip(heads, slowed, strict=True):
            transfer.left -= step / factor
            if transfer.left <= DONE_NS:
                transfer.end = self.now
                name = self._queue(transfer.op)
                self.queues[name].popleft()
                self.rests[name] = self.now
                if self.queues[name]:
                    self.queues[name][0].start = self.now

    def _log(self, name: str, kind: str, begin: float, strand: str, micro_batch: int) -> None:
        """A span on the compute lane from `begin` to now, if that takes time."""
        start, end = round(begin), round(self.now)
        if end > start:
            self.log.append(Span(name, kind, COMPUTE_LANE, start, end, strand, micro_batch))

    def _heads(self) -> list[RunningTransfer]:
        return [queue[0] for queue in self.queues.values() if queue]

    def _factors(self, kind: Kind | None, transfer: RunningTransfer) -> tuple[float, float]:
        return self.factors.get((kind, transfer.op.kind), (1.0, 1.0)) if kind else (1.0, 1.0)

    def _slow(
        self, kind: Kind | None, transfer: RunningTransfer, heads: list[RunningTransfer]
    ) -> float:
        """How much longer than alone this transfer takes at the moment."""
        factor = self._factors(kind, transfer)[1]
        link = self._link(transfer)
        if link is None:
            return factor
        return factor * sum(self._link(other) == link for other in heads)

    def _queue(self, op: Operator) -> str:
        return self.queue_of.get(op.lane, op.lane)

    def _link(self, transfer: RunningTransfer) -> str | None:
        return self.links.get(self._queue(transfer.op))


def _span(transfer: RunningTransfer) -> Span:
    op = transfer.op
    return Span(
        op.id,
        op.kind,
        op.lane,
        round(transfer.start),
        round(transfer.end),
        transfer.strand,
        transfer.micro_batch,
        round(transfer.issue),
        max(op.bytes_in, op.bytes_out),
    )


def simulate(
    graph: OpGraph,
    order: Sequence[str],
    solo_ns: Mapping[str, int],
    *,
    issue_ns: int = 0,
    contention: Contention | None = None,
    barriers: Collection[str] = (),
    barrier_ns: int = 0,
    label: str = "predicted",
) -> Timeline:
    """The timeline of `order`. `issue_ns` is the compute lane's time to start a collective; after
    each operator in `barriers` the rank waits for everything in flight, and `barrier_ns` more."""
    rank = Rank(issue_ns, contention)
    flying: dict[str, RunningTransfer] = {}
    stops = frozenset(barriers)
    for name in order:
        op = graph.by_id[name]
        strand = shown(name.partition(".")[0] if "." in name else graph.name)
        rank.wait(flying[source] for source in op.inputs if source in flying)
        if op.is_collective:
            flying[name] = rank.collective(op, solo_ns[name], strand, 0)
        else:
            rank.compute(op, solo_ns[name], strand, 0)
        if name in stops:
            rank.wait(rank.in_flight())
            rank.pause(barrier_ns)
    return Timeline(label, 0, rank.finish())
