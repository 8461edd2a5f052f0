"""Chunk-level order: an open shop in which a message occupies two ends and then frees them.

Whenever both ends of a waiting message are free it starts. Of several the most urgent one does:
what its partner end has left to do, so that the busiest port is never the one that waits, and the
time of the forwards behind the message, `WAIT` times over because each of them queues too. With
every end's load cut in many chunks, the longest load is nearly the length of the schedule, as in
the preemptive open shop, where it is exactly that (Gonzalez and Sahni, 1976).
"""

from functools import partial
from heapq import heappop, heappush

from interlace.reshard.planning.ends import Links
from interlace.reshard.planning.hops import HELD, Hops

FREED, ARRIVED = 0, 1
"""Events of the simulation: the ends of a message are free, a message can be forwarded."""
WAIT = 4
"""How many times over the forwards behind a message count. In moves of 405B weights schedules are
12 % longer with 0 and 3 % longer with 1: the last chunks leave their sources too late. Beyond 8,
schedules of 70B weights get longer."""


def order_hops(hops: Hops, links: Links) -> list[int]:
    """Hop numbers by start time."""
    return _OpenShop(hops, links).run()


class _OpenShop:
    def __init__(self, hops: Hops, links: Links) -> None:
        self.latency_ns = links.latency_ns
        pairs = list(zip(hops.sender, hops.receiver, strict=True))
        ends = {pair: links.ends_of(*pair) for pair in set(pairs)}
        self.ends = [ends[pair] for pair in pairs]
        self.time = [links.time_ns(a, b, hops.size_bytes(i)) for i, (a, b) in enumerate(pairs)]
        self.behind, self.after = _chains(hops)
        self.left = [0] * links.ends
        for (out, into), time in zip(self.ends, self.time, strict=True):
            self.left[out] += time
            self.left[into] += time
        self.free = [True] * links.ends
        self.waiting: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(links.ends)]
        self.events: list[tuple[int, int, int]] = []
        self.order: list[int] = []
        self.now = 0
        self.first = [i for i, before in enumerate(hops.before) if before == HELD]

    def run(self) -> list[int]:
        touched: set[int] = set()
        for i in self.first:
            self._queue(i, touched)
        self._dispatch(touched)
        while self.events:
            self.now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == self.now:
                _, what, i = heappop(self.events)
                if what == FREED:
                    for end in self.ends[i]:
                        self.free[end] = True
                        touched.add(end)
                else:
                    for follower in self.after.get(i, ()):
                        self._queue(follower, touched)
            self._dispatch(touched)
        return self.order

    def _queue(self, i: int, touched: set[int]) -> None:
        out, into = self.ends[i]
        heap = self.waiting[out].get(into)
        if heap is None:
            heap = self.waiting[out][into] = self.waiting[into][out] = []
        heappush(heap, (-self.behind[i], i))
        touched.add(out)
        touched.add(into)

    def _dispatch(self, touched: set[int]) -> None:
        """Start what can start at the ends that changed, the busiest end first."""
        left, free = self.left, self.free
        for end in sorted(touched, key=lambda end: (-left[end], end)):
            if not free[end]:
                continue
            partners = [other for other in self.waiting[end] if free[other]]
            if partners:
                self._start(end, max(partners, key=partial(self._urgency, end)))

    def _urgency(self, end: int, other: int) -> tuple[int, int, int]:
        heap = self.waiting[end][other]
        behind, i = heap[0]
        return self.left[other] - WAIT * behind * self.time[i], len(heap), -other

    def _start(self, end: int, other: int) -> None:
        heap = self.waiting[end][other]
        i = heappop(heap)[1]
        if not heap:
            del self.waiting[end][other], self.waiting[other][end]
        self.free[end] = self.free[other] = False
        self.left[end] -= self.time[i]
        self.left[other] -= self.time[i]
        done = self.now + self.time[i]
        self.order.append(i)
        heappush(self.events, (done, FREED, i))
        if i in self.after:
            heappush(self.events, (done + self.latency_ns, ARRIVED, i))


def _chains(hops: Hops) -> tuple[list[int], dict[int, list[int]]]:
    """Longest chain of forwards behind each hop; the hops that wait for it."""
    behind = [0] * len(hops)
    after: dict[int, list[int]] = {}
    for i in reversed(range(len(hops))):
        before = hops.before[i]
        if before != HELD:
            behind[before] = max(behind[before], behind[i] + 1)
            after.setdefault(before, []).append(i)
    return behind, after
