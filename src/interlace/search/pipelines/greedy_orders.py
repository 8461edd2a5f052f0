"""Lists of passes by rules: an event loop over all ranks, in which a rank that is free takes the
best of what it could start now.

Each chunk may have so many micro-batches under way, from their forward to their backward, as
`Rules.ahead` says. By Little's law it takes (time from the forward of a chunk to its backward) /
(time of the busiest rank for a micro-batch) of them to keep that rank busy. Such limits cannot make
ranks wait for each other for ever: the last chunk always gets on, so the one before it does.
Limits of memory can, where a rank has filled its memory with forwards of an early chunk and a late
one needs more. `Rules.promised` rules that out: a rank begins a micro-batch only if all of its own
chunks' values of that micro-batch fit beside what it has promised to others before.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product

from interlace.search.pipelines.step_clock import B, F, I, PassLists, PassNumbers, StepClock, W

_WIDE = (1.0, 1.25, 1.6, 2.2)
"""How many times the micro-batches of Little's law are tried; a choice."""
_FULL = 1 << 62
"""No limit."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a rank prefers."""

    ahead: tuple[int, ...]
    """By chunk: most micro-batches that are between their forward and their backward."""
    deep_forwards: bool = True
    """Of several forwards the one of the latest chunk; else of the earliest micro-batch."""
    deep_backwards: bool = False
    """The same for backwards."""
    forwards_first: bool = False
    """Forwards before backwards."""
    cut_first: int = 0
    """Backwards of so many first micro-batches are cut in two."""
    cut_last: int = 0
    """The same of the last ones."""
    patience: float = 0.0
    """A rank rather waits for what arrives within such a share of a pass's time than begin
    gradients of weights, which nobody waits for."""
    pair_patience: float = 0.0
    """Where two passes are faster side by side: the same before a pass begins alone."""
    most_waiting: int = _FULL
    """More gradients of weights than this do not wait."""
    promised: bool = False
    """Whether memory is promised to a micro-batch before it begins."""


def rules_to_try(clock: StepClock) -> list[Rules]:
    """From few micro-batches under way to many, with whole backwards and cut ones."""
    every = clock.micro_batches
    waits = _round_trips_ns(clock)
    period = max(1, *_loads_ns(clock))
    found = []
    cuts = [(every, 0), (0, 0), (0, clock.ranks)]
    if clock.overlap:
        cuts += [(0, 2 * clock.ranks), (clock.ranks, 2 * clock.ranks)]
    for wide, more, deep, (first, last) in product(_WIDE, (0, 1), (True, False), cuts):
        if not deep and clock.chunks == clock.ranks:
            continue
        ahead = tuple(max(1, -int(-wide * wait // period)) + more for wait in waits)
        found.append(Rules(ahead, deep_forwards=deep, cut_first=first, cut_last=last))
    if clock.overlap:
        found += [replace(rules, pair_patience=0.5) for rules in found]
    return list(dict.fromkeys(found))


def greedy_order(clock: StepClock, rules: Rules) -> tuple[int, PassLists] | None:
    """(time of the step in ns, lists); None if ranks would wait for memory for ever."""
    lists = _Loop(clock, rules).run()
    if lists is None:
        return None
    # A rank that has waited for nothing starts earlier where its list is followed.
    length = clock.length_ns(lists)
    assert length is not None, "the loop ran them"
    return length, lists


def _round_trips_ns(clock: StepClock) -> list[int]:
    """By chunk: the time from its forward to the end of its gradients of inputs, alone."""
    total, found = 0, []
    for chunk in reversed(range(clock.chunks)):
        if chunk + 1 < clock.chunks:
            total += 2 * max(0, clock.hop_ns[chunk])
        total += clock.pass_ns[F][chunk] + clock.pass_ns[I][chunk]
        found.append(total)
    return found[::-1]


def _loads_ns(clock: StepClock) -> list[int]:
    return [
        sum(clock.pass_ns[F][chunk] + clock.pass_ns[B][chunk] for chunk in own) for own in clock.own
    ]


class _Loop:
    def __init__(self, clock: StepClock, rules: Rules) -> None:
        self.clock, self.rules = clock, rules
        chunks, count = clock.chunks, clock.micro_batches
        self.next = [[1] * chunks for _ in range(4)]
        """By what a pass is, then by chunk: the next micro-batch. I counts with B."""
        self.ready = [[[-1] * (count + 2) for _ in range(chunks)] for _ in range(2)]
        self.ready[0][0] = [0] * (count + 1) + [-1]
        self.under_way = [0] * chunks
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in clock.own]
        """By rank: (micro-batch, chunk) whose gradients of weights wait, the first to run first."""
        self.free = [0] * clock.ranks
        self.used = [0] * clock.ranks
        self.promised = [0] * clock.ranks
        self.most = [max(a, b) for a, b in zip(clock.saved, clock.kept, strict=True)]
        self.whole = [sum(self.most[chunk] for chunk in own) for own in clock.own]
        self.links: dict[int, int] = {}
        self.coming: list[list[tuple[int, int]]] = [[] for _ in clock.own]
        """By rank: when what a forward or a backward needs arrives, and which it is; a heap."""
        self.events = [(0, rank) for rank in range(clock.ranks)]
        self.lists: PassLists = [[] for _ in clock.own]
        self.after: list[list[PassNumbers]] = [[] for _ in clock.own]
        """By rank: the passes of its action, whose memory is freed when it ends."""

    def run(self) -> PassLists | None:
        """The lists; None if memory or limits keep all ranks from going on."""
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] > now:
                continue
            self._finish(rank)
            coming = self.coming[rank]
            while coming and coming[0][0] <= now:
                heappop(coming)
            action = self._choose(rank, now)
            if action:
                self._start(rank, now, action)
        last = self.clock.micro_batches + 1
        if any(number < last for way in (F, B, W) for number in self.next[way]):
            return None
        return self.lists

    def _choose(self, rank: int, now: int) -> tuple[PassNumbers, ...]:
        """What to run now; nothing if it is better to wait, or all that can be done."""
        rules, waiting = self.rules, self.waiting[rank]
        late = ((W, waiting[0][1], waiting[0][0]),) if waiting else ()
        if len(waiting) > rules.most_waiting:
            return late
        back = self._backward(rank, now)
        fore = self._forward(rank, now, back)
        if fore and back and self.clock.overlap:
            return fore, back
        one = (fore or back) if rules.forwards_first else (back or fore)
        if one is None and back is None and late:
            return () if self._soon(rank, now, late) else late
        if one is None:
            return late
        if self.clock.overlap and rules.pair_patience and self._partner(rank, now, one):
            return ()
        return (one,)

    def _soon(self, rank: int, now: int, action: tuple[PassNumbers, ...]) -> bool:
        """Whether something arrives so soon that the rank rather waits than begin this."""
        coming = self.coming[rank]
        wait = self.rules.patience * self.clock.action_ns(action)
        return bool(coming) and coming[0][0] - now < wait

    def _partner(self, rank: int, now: int, one: PassNumbers) -> bool:
        """Whether what can run beside this pass arrives soon."""
        until = now + self.rules.pair_patience * self.clock.action_ns((one,))
        return any(when < until and (what == F) != (one[0] == F)
                   for when, what in self.coming[rank])  # fmt: skip

    def _backward(self, rank: int, now: int) -> PassNumbers | None:
        found: tuple[tuple[int, int], PassNumbers] | None = None
        rules, clock = self.rules, self.clock
        for chunk in clock.own[rank]:
            number = self.next[B][chunk]
            when = self.ready[1][chunk][number]
            if when < 0 or when > now:
                continue
            cut = number <= rules.cut_first or number > clock.micro_batches - rules.cut_last
            cut = cut or self.next[W][chunk] < number
            grown = max(0, clock.kept[chunk] - clock.saved[chunk]) if cut else 0
            if self.used[rank] + grown > clock.room[rank]:
                continue
            key = (-chunk, 0) if rules.deep_backwards else (number, -chunk)
            if found is None or key < found[0]:
                found = key, (I if cut else B, chunk, number)
        return None if found is None else found[1]

    def _forward(self, rank: int, now: int, back: PassNumbers | None) -> PassNumbers | None:
        """The forward to run now, or beside this backward."""
        found: tuple[tuple[int, int], PassNumbers] | None = None
        rules, clock = self.rules, self.clock
        beside = back if clock.overlap else None
        grown = 0
        if beside is not None and beside[0] == I:
            grown = max(0, clock.kept[beside[1]] - clock.saved[beside[1]])
        for chunk in clock.own[rank]:
            number = self.next[F][chunk]
            when = self.ready[0][chunk][number]
            if when < 0 or when > now:
                continue
            gone = beside is not None and beside[1] == chunk
            if self.under_way[chunk] - gone >= rules.ahead[chunk]:
                continue
            if self.used[rank] + clock.saved[chunk] + grown > clock.room[rank]:
                continue
            begins = rules.promised and chunk == clock.own[rank][0]
            if begins and self.promised[rank] + self.whole[rank] > clock.room[rank]:
                continue
            key = (-chunk, 0) if rules.deep_forwards else (number, -chunk)
            if found is None or key < found[0]:
                found = key, (F, chunk, number)
        return None if found is None else found[1]

    def _start(self, rank: int, now: int, action: tuple[PassNumbers, ...]) -> None:
        clock = self.clock
        end = now + clock.action_ns(action)
        self.lists[rank].append(action)
        self.free[rank] = end
        self.after[rank] = list(action)
        for what, chunk, number in action:
            if what == F:
                self.next[F][chunk] += 1
                self.under_way[chunk] += 1
                self.used[rank] += clock.saved[chunk]
                if chunk == clock.own[rank][0]:
                    self.promised[rank] += self.whole[rank]
            elif what == W:
                self.next[W][chunk] += 1
                self.waiting[rank].pop(0)
            else:
                self.next[B][chunk] += 1
                if what == I:
                    self.used[rank] += max(0, clock.kept[chunk] - clock.saved[chunk])
                    self.waiting[rank].append((number, chunk))
                else:
                    self.next[W][chunk] += 1
            if what != W:
                self._hand_over((what, chunk, number), rank, end)
        heappush(self.events, (end, rank))

    def _finish(self, rank: int) -> None:
        """Free the memory of the action that has ended."""
        clock = self.clock
        for what, chunk, _ in self.after[rank]:
            if what == B:
                self.used[rank] -= clock.saved[chunk]
            elif what == I:
                self.used[rank] -= max(0, clock.saved[chunk] - clock.kept[chunk])
            elif what == W:
                self.used[rank] -= clock.kept[chunk]
            if what in (B, I):
                self.under_way[chunk] -= 1
            if what in (B, W):
                self.promised[rank] -= self.most[chunk]
        self.after[rank] = []

    def _hand_over(self, each: PassNumbers, rank: int, end: int) -> None:
        clock = self.clock
        what, chunk, number = each
        if what == F and chunk == clock.chunks - 1:
            self.ready[1][chunk][number] = end
            return
        if what != F and chunk == 0:
            return
        to = chunk + 1 if what == F else chunk - 1
        hop = clock.hop_ns[min(chunk, to)]
        other, when = rank, end
        if hop >= 0:
            other = clock.rank_of[to]
            link = rank * clock.ranks + other
            when = self.links[link] = max(end, self.links.get(link, 0)) + hop
        self.ready[what != F][to][number] = when
        heappush(self.coming[other], (when, what))
        heappush(self.events, (when, other))
