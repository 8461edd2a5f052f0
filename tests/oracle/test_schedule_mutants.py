"""The verifier of schedules against ranks that run: 10,000 lists with one thing wrong or moved.

`outcome` runs the lists of all ranks with real values, and knows nothing of the verifier: every
pass makes a value that says what it was made of, messages go from rank to rank in the order in
which both sides come to them, and carry what the sender has, whatever the receiver believes it to
be. What comes out right must be accepted, all else refused.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from interlace.errors import InputError
from interlace.ir.actions import Action, Share, Slot
from interlace.ir.stage_messages import Item, Receive, Send, chain
from interlace.schedules.finder import find, names
from interlace.schedules.sends_receives import check_messages, with_messages, without_messages
from interlace.schedules.verify import check_ranks

MUTANTS = 10_000
CASES = 40
"""Schedules, ranks and micro-batches from which mutants are made."""


class _Wrong(Exception):
    """A rank cannot go on, or makes something else than it should."""


class _Rank:
    """One rank that runs its list as far as it can."""

    def __init__(self, items: Sequence[Item], chunks: int, micro_batches: int) -> None:
        self.items = deque(items)
        self.chunks = chunks
        self.micro_batches = micro_batches
        self.queue: deque[Send | Receive] = deque()
        self.values: dict[tuple[str, int, int], str] = {}
        """By direction, chunk and micro-batch: activations and gradients, own and received."""
        self.posted: set[tuple[str, int, int]] = set()
        self.sums: dict[int, list[int]] = {}
        self.ran: set[int] = set()
        self.cut: set[tuple[int, int]] = set()

    def go(self) -> bool:
        """Run items until one waits; whether any ran."""
        count = len(self.items)
        while self.items and self._run(self.items[0]):
            self.items.popleft()
        return len(self.items) < count

    def _run(self, item: Item) -> bool:
        if not isinstance(item, Action):
            key = _key(item)
            if isinstance(item, Send) and key not in self.values:
                raise _Wrong("nothing to send")
            if isinstance(item, Receive):
                self.posted.add(key)
            self.queue.append(item)
            return True
        before = dict(self.values)
        if len({slot.strand for slot in item.slots}) < len(item.slots):
            raise _Wrong("one graph twice")
        for slot in item.slots:
            for key in self._reads(slot):
                if key not in before:
                    if key in self.posted:
                        return False
                    raise _Wrong(f"{key} is not there")
        for slot in item.slots:
            self._pass(slot, before)
        return True

    def _reads(self, slot: Slot) -> list[tuple[str, int, int]]:
        c, m = slot.strand.chunk or 0, slot.micro_batch
        if slot.strand.direction == "forward":
            return [("forward", c - 1, m)] if c else []
        if slot.strand.share == Share.WEIGHT:
            return [("half", c, m)]
        return [("forward", c, m)] + ([("backward", c + 1, m)] if c + 1 < self.chunks else [])

    def _pass(self, slot: Slot, before: dict[tuple[str, int, int], str]) -> None:
        c, m, share = slot.strand.chunk or 0, slot.micro_batch, slot.strand.share
        if not 1 <= m <= self.micro_batches:
            raise _Wrong("no such micro-batch")
        way = str(slot.strand.direction)
        if share != Share.WEIGHT:
            if (way, c, m) in self.values:
                raise _Wrong("made twice")
            self.values[way, c, m] = " ".join(
                [f"{way}{c}.{m}", *(before[k] for k in self._reads(slot))]
            )
        if share == Share.INPUT:
            self.values["half", c, m] = "half"
        elif way == "backward":
            self.values.pop(("half", c, m), None)
            self.sums.setdefault(c, []).append(m)


def _key(item: Send | Receive) -> tuple[str, int, int]:
    message = item.message
    return str(message.direction), message.source, message.micro_batch


def outcome(lists: Sequence[Sequence[Item]], chunks: int, micro_batches: int) -> bool:
    """Whether all ranks come to their ends, with the right values, sums in order and nothing
    left."""
    ranks = [_Rank(items, chunks, micro_batches) for items in lists]
    try:
        while any([rank.go() for rank in ranks]) or _exchange(ranks):  # noqa: C419 - all of them
            pass
    except _Wrong:
        return False
    if any(rank.items or rank.queue for rank in ranks):
        return False
    for chunk in range(chunks):
        home = next((rank for rank in ranks if chunk in rank.sums), None)
        if home is None or home.sums[chunk] != list(range(1, micro_batches + 1)):
            return False
        for m in range(1, micro_batches + 1):
            if home.values.get(("backward", chunk, m)) != _right(chunk, m, chunks):
                return False
    used = {key for items in lists for item in items if isinstance(item, Action)
            for slot in item.slots for key in ranks[0]._reads(slot)}  # fmt: skip
    return all(_key(i) in used for items in lists for i in items if isinstance(i, Receive))


def _right(chunk: int, m: int, chunks: int) -> str:
    """The value that a backward gives if all goes well."""

    def forward(c: int) -> str:
        return f"forward{c}.{m}" + (f" {forward(c - 1)}" if c else "")

    def backward(c: int) -> str:
        return f"backward{c}.{m} {forward(c)}" + (f" {backward(c + 1)}" if c + 1 < chunks else "")

    return backward(chunk)


def _exchange(ranks: Sequence[_Rank]) -> bool:
    """One message through, if both sides have come to each other."""
    for number, rank in enumerate(ranks):
        if not rank.queue or not isinstance(rank.queue[0], Send):
            continue
        other = ranks[rank.queue[0].rank] if rank.queue[0].rank < len(ranks) else None
        theirs = other.queue[0] if other is not None and other.queue else None
        if other is None or not isinstance(theirs, Receive) or theirs.rank != number:
            continue
        if _key(theirs) in other.values:
            raise _Wrong("received twice")
        other.values[_key(theirs)] = rank.values[_key(rank.queue[0])]
        rank.queue.popleft()
        other.queue.popleft()
        return True
    return False


def verdict(lists: Sequence[Sequence[Item]], chunks: int, micro_batches: int) -> bool:
    """What the verifier says."""
    try:
        check_ranks(without_messages(lists), micro_batches=micro_batches, chunks=chunks, name="m")
        check_messages(lists, edges=chain(chunks), name="m")
    except InputError:
        return False
    return True


def mutant(lists: Sequence[Sequence[Item]], draw: random.Random) -> list[list[Item]]:
    """The lists with one change."""
    found = [list(items) for items in lists]
    items = found[draw.randrange(len(found))]
    at, other = draw.randrange(len(items)), draw.randrange(len(items))
    kind = draw.choice(
        ["drop", "duplicate", "swap", "neighbours", "move", "number", "peer", "split"]
    )
    item = items[at]
    if kind == "drop":
        del items[at]
    elif kind == "duplicate":
        items.insert(other, item)
    elif kind == "swap":
        items[at], items[other] = items[other], items[at]
    elif kind == "neighbours" and at + 1 < len(items):
        items[at : at + 2] = reversed(items[at : at + 2])
    elif kind == "move":
        items.insert(other, items.pop(at))
    elif kind == "number":
        items[at] = _renumbered(item, draw.choice([-1, 1]))
    elif kind == "peer" and not isinstance(item, Action):
        items[at] = replace(item, rank=draw.randrange(len(found)))
    elif kind == "split" and isinstance(item, Action):
        items[at : at + 1] = [Action((slot,)) for slot in item.slots]
    return found


def _renumbered(item: Item, by: int) -> Item:
    if isinstance(item, Action):
        first, *others = item.slots
        return Action((replace(first, micro_batch=first.micro_batch + by), *others))
    message = item.message
    return replace(item, message=replace(message, micro_batch=message.micro_batch + by))


@pytest.mark.parametrize("part", range(4))
def test_wrong_lists_are_refused_and_no_others(part: int) -> None:
    """10,000 changes in all: both verdicts are the same for each."""
    draw = random.Random(part)
    counts = {True: 0, False: 0}
    pipelines = [name for name in names() if name != "two_strand"]
    for _ in range(CASES // 4):
        schedule = find(draw.choice(pipelines))
        ranks, count = draw.randint(2, 4), draw.randint(1, 5)
        chunks = ranks * schedule.chunks
        lists = with_messages(schedule.of_ranks(ranks, count), chain(chunks))
        assert outcome(lists, chunks, count)
        for _ in range(MUTANTS // CASES):
            changed = mutant(lists, draw)
            right = outcome(changed, chunks, count)
            assert verdict(changed, chunks, count) == right, changed
            counts[right] += 1
    assert min(counts.values()) > 100, counts
