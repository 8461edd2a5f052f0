"""When the actions of a pipeline run, as numbers: the rules of `sim.pipeline_step`, which draws it.

Phases, messages and links are numbered once, so that a schedule can be timed many times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from interlace.ir.actions import Action, Direction, Share, Slot
from interlace.ir.phase_numbers import PhaseNumbers
from interlace.ir.stage_messages import Edge, StageMessage, Wiring
from interlace.schedules.verify import order_of_run
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts

Taken = Sequence[Sequence[tuple[int, int]]]
"""By rank and action: how long it takes, and how long its rank is busy behind it."""


class Sent(NamedTuple):
    """A message that leaves behind an action."""

    number: int
    hop: int
    """Which of `ListedActions.hops` it makes."""
    link: int
    """Which it takes: of two ranks, in one direction."""
    to: int
    """The rank that it goes to."""
    micro_batch: int


class Listed(NamedTuple):
    """An action with its messages."""

    rank: int
    index: int
    """Its place in the list of its rank."""
    phase: int
    needed: tuple[int, ...]
    """Numbers of the messages that it waits for."""
    sent: tuple[Sent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    """When actions run, in the order of `ListedActions.order`, and messages by number, in ns."""

    starts: Sequence[int]
    waited: Sequence[int]
    """How long the rank did nothing before."""
    ends: Sequence[int]
    leave: Sequence[int]
    arrive: Sequence[int]


class ListedActions:
    """The actions of all ranks in an order in which they can run, with their messages. The actions
    are sound (`schedules.verify`)."""

    def __init__(self, ranks: Sequence[Sequence[Action]], edges: Sequence[Edge]) -> None:
        self.ranks = ranks
        self.phases = PhaseNumbers(ranks)
        self._count = 1 + max(s.micro_batch for own in ranks for a in own for s in a.slots)
        self.hops: list[StageMessage] = []
        """What messages of each micro-batch there are; here of none."""
        self._links: dict[tuple[int, int], int] = {}
        self.order = self._in_order(self._listed(Wiring(ranks, edges)), edges)

    def times(self, costs: PipelineCosts, taken: Taken | None = None) -> ActionTimes:
        """When all of them run. `taken` is what actions take, where that is not to be what `costs`
        says."""
        lasting = [
            (costs.action_ns(action), costs.between_ns.get(name, 0))
            for name, action in self.phases.first.items()
        ]
        hop_ns = [costs.message_ns(hop) for hop in self.hops]
        free = list(costs.before_ns or [0] * len(self.ranks))
        links = [0] * len(self._links)
        leave, arrive = ([0] * (len(self.hops) * self._count) for _ in range(2))
        starts, waited, ends = list[int](), list[int](), list[int]()
        for rank, index, phase, needed, sent in self.order:
            lasts, behind = lasting[phase] if taken is None else taken[rank][index]
            start = was = free[rank]
            for number in needed:
                start = max(start, arrive[number])
            end = start + lasts
            free[rank] = end + behind
            starts.append(start)
            waited.append(start - was)
            ends.append(end)
            for number, hop, link, _, _ in sent:
                leave[number] = begin = max(end, links[link])
                arrive[number] = links[link] = begin + hop_ns[hop]
        return ActionTimes(starts=starts, waited=waited, ends=ends, leave=leave, arrive=arrive)

    def ends(self, times: ActionTimes) -> list[tuple[int, int]]:
        """By rank: the end of its last action, and that of its last message if it is later."""
        last = [0] * len(self.ranks)
        for each, end in zip(self.order, times.ends, strict=True):
            last[each.rank] = end
        over, count = [*last], self._count
        for number, hop in enumerate(self.hops):
            rank = self.phases.rank_of[hop.source]
            over[rank] = max(over[rank], *times.arrive[number * count : (number + 1) * count])
        return list(zip(last, over, strict=True))

    @cached_property
    def last_backwards(self) -> list[dict[int, int]]:
        """By rank and chunk: the place in `order` behind which all its gradients are there."""
        chunks = [
            {s.strand.chunk or 0 for s in a.slots if s.strand.direction != Direction.FORWARD}
            for a in self.phases.actions
        ]
        found: list[dict[int, int]] = [{} for _ in self.ranks]
        for place, each in enumerate(self.order):
            for chunk in chunks[each.phase]:
                found[each.rank][chunk] = place
        return found

    def peaks(self, costs: PipelineCosts) -> list[tuple[int, int]]:
        """By rank, (bytes, forwards): the most that is kept at a time."""
        return most_kept(self.phases, costs.chunks)

    def _listed(self, wiring: Wiring) -> list[list[Listed]]:
        """By rank."""
        numbers: dict[tuple[Direction, int, int], int] = {}

        def hop_of(message: StageMessage) -> int:
            key = message.direction, message.source, message.to
            if key not in numbers:
                numbers[key] = len(self.hops)
                self.hops.append(StageMessage(*key, micro_batch=0))
            return numbers[key]

        def sent_by(slot: Slot) -> list[tuple[int, int, int]]:
            found = []
            for message in wiring.sent(Action((slot,))):
                to = wiring.rank_of[message.to]
                pair = wiring.rank_of[message.source], to
                link = self._links.setdefault(pair, len(self._links))
                found.append((hop_of(message), link, to))
            return found

        # By phase and slot: messages of micro-batch 0, and hops, links and ranks.
        needed = [
            [[hop_of(m) * self._count for m in wiring.needed(Action((s,)))] for s in a.slots]
            for a in self.phases.actions
        ]
        sent = [[sent_by(slot) for slot in action.slots] for action in self.phases.actions]
        found = []
        for rank, (own, phases) in enumerate(zip(self.ranks, self.phases.of_ranks, strict=True)):
            found.append([])
            for index, (action, phase) in enumerate(zip(own, phases, strict=True)):
                reads, gives = list[int](), list[Sent]()
                for slot, first, out in zip(action.slots, needed[phase], sent[phase], strict=True):
                    number = slot.micro_batch
                    reads += [base + number for base in first]
                    for hop, link, to in out:
                        gives.append(Sent(hop * self._count + number, hop, link, to, number))
                found[-1].append(Listed(rank, index, phase, tuple(reads), tuple(gives)))
        return found

    def _in_order(self, listed: list[list[Listed]], edges: Sequence[Edge]) -> list[Listed]:
        """Each rank as far as messages let it, then on from where one came that it waits for."""
        there = bytearray(len(self.hops) * self._count)
        waiting: dict[int, int] = {}
        at = [0] * len(listed)
        ready = list(range(len(listed)))[::-1]
        order = list[Listed]()
        while ready:
            rank = ready.pop()
            own = listed[rank]
            while at[rank] < len(own):
                each = own[at[rank]]
                missing = next((number for number in each.needed if not there[number]), None)
                if missing is not None:
                    waiting[missing] = rank
                    break
                order.append(each)
                at[rank] += 1
                for sent in each.sent:
                    there[sent.number] = 1
                    if sent.number in waiting:
                        ready.append(waiting.pop(sent.number))
        if waiting:  # name the ranks that wait for each other
            list(order_of_run(self.ranks, edges))
        return order


def most_kept(phases: PhaseNumbers, chunks: Sequence[ChunkCosts]) -> list[tuple[int, int]]:
    """By rank, (bytes, forwards): the most that is kept at a time. What an action saves is there
    from its start, what it needs no more is freed at its end."""
    changes = [_changes(action, chunks) for action in phases.actions]
    return [_peak([changes[phase] for phase in own]) for own in phases.of_ranks]


def _changes(action: Action, chunks: Sequence[ChunkCosts]) -> tuple[int, int, int, int]:
    """(bytes more at its start, forwards more, bytes less at its end, forwards less)."""
    more = count = less = over = 0
    for slot in action.slots:
        chunk, share = chunks[slot.strand.chunk or 0], slot.strand.share
        if slot.strand.direction == Direction.FORWARD:
            more, count = more + chunk.saved_bytes, count + 1
        elif share == Share.INPUT:
            more += max(0, chunk.kept_bytes - chunk.saved_bytes)
            less += max(0, chunk.saved_bytes - chunk.kept_bytes)
        else:
            less += chunk.kept_bytes if share == Share.WEIGHT else chunk.saved_bytes
            over += 1
    return more, count, less, over


def _peak(changes: Sequence[tuple[int, int, int, int]]) -> tuple[int, int]:
    now = count = most = many = 0
    for more, forwards, less, over in changes:
        now += more
        count += forwards
        most, many = max(most, now), max(many, count)
        now -= less
        count -= over
    return most, many
