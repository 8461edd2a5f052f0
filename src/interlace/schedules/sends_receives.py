"""Adds to the actions of each rank what it sends and receives, and proves that nobody waits for
ever.

Messages stand in the lists of both ranks in the order of one run of all ranks, so they meet in this
order. `check_messages` judges any such lists, by the strictest rule that a transport has: all
messages of a rank go through one queue in the order of its list, as in a stream of NCCL, and none
is kept under way (links of capacity 0), so each waits until the other side has come to it.
"""

from collections import deque
from collections.abc import Collection, Sequence

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import Edge, Item, Receive, Send, StageMessage, Wiring
from interlace.schedules.verify import ScheduleError, order_of_run

_Queue = deque[Send | Receive]
"""The messages that a rank has come to and that are not through."""


def with_messages(
    ranks: Sequence[Sequence[Action]], edges: Collection[Edge]
) -> tuple[tuple[Item, ...], ...]:
    """The lists of all ranks with their sends and receives. The actions are sound
    (`schedules.verify`). A receive stands where its rank is when the message leaves, so it is
    posted as early as the order of messages allows."""
    wiring = Wiring(ranks, edges)
    lists: list[list[Item]] = [[] for _ in ranks]
    for rank, index in order_of_run(ranks, edges):
        action = ranks[rank][index]
        lists[rank].append(action)
        for message in wiring.sent(action):
            to = wiring.rank_of[message.to]
            lists[rank].append(Send(message, to))
            lists[to].append(Receive(message, rank))
    return tuple(tuple(items) for items in lists)


def with_early_receives(items: Sequence[Item], actions: int) -> tuple[Item, ...]:
    """The list of a rank with each receive so many actions earlier, in the same order. For a
    transport that begins to move a message when both sides have come to it, and lets no message
    wait for another one, as gloo: a rank in an action comes to nothing meanwhile."""
    found: list[Item] = []
    last = 0
    for item in items:
        if not isinstance(item, Receive):
            found.append(item)
            continue
        place, left = len(found), actions
        while place > last and (left or not isinstance(found[place - 1], Action)):
            place -= 1
            left -= isinstance(found[place], Action)
        found.insert(place, item)
        last = place + 1
    return tuple(found)


def without_messages(lists: Sequence[Sequence[Item]]) -> tuple[tuple[Action, ...], ...]:
    """The actions alone."""
    return tuple(tuple(item for item in items if isinstance(item, Action)) for items in lists)


def check_messages(lists: Sequence[Sequence[Item]], *, edges: Collection[Edge], name: str) -> None:
    """Raise ScheduleError unless every message that an action needs is sent behind what makes it,
    by the right rank, received once, in time and in the order in which it is sent, and nobody waits
    for ever. The actions are sound."""
    _Messages(lists, edges, name).check()


class _Messages:
    def __init__(self, lists: Sequence[Sequence[Item]], edges: Collection[Edge], name: str) -> None:
        self.lists = lists
        self.name = name
        self.wiring = Wiring(without_messages(lists), edges)
        self.places: dict[type, dict[StageMessage, tuple[int, int]]] = {Send: {}, Receive: {}}
        """Where each message is sent and received."""
        self.needed: list[dict[int, list[StageMessage]]] = [{} for _ in lists]
        """By rank and index in its list: what an action needs of other ranks."""

    def check(self) -> None:
        """All of it."""
        self._note_places()
        self._each_action()
        self._run()

    def _note_places(self) -> None:
        for rank, items in enumerate(self.lists):
            for index, item in enumerate(items):
                if isinstance(item, Action):
                    continue
                message, sends = item.message, isinstance(item, Send)
                own, other = (message.source, message.to) if sends else (message.to, message.source)
                rank_of = self.wiring.rank_of
                if rank_of.get(own) != rank or rank_of.get(other) != item.rank:
                    raise self._error(rank, index, "is not between the ranks of these chunks")
                if rank == item.rank:
                    raise self._error(rank, index, "goes to its own rank")
                if message in self.places[type(item)]:
                    raise self._error(rank, index, "stands there a second time")
                self.places[type(item)][message] = rank, index

    def _each_action(self) -> None:
        """Every message is made before it is sent and received before it is needed."""
        sends, receives = self.places[Send], self.places[Receive]
        made: list[StageMessage] = []
        needed: list[StageMessage] = []
        for rank, items in enumerate(self.lists):
            own = self.needed[rank]
            for index, item in enumerate(items):
                if not isinstance(item, Action):
                    continue
                for message in self.wiring.sent(item):
                    made.append(message)
                    if (place := sends.get(message)) is None:
                        raise self._error(rank, index, f"has a message that is not sent: {message}")
                    if place[1] < index:
                        raise self._error(*place, "stands before the action that makes it")
                own[index] = needs = self.wiring.needed(item)
                for message in needs:
                    needed.append(message)
                    if (place := receives.get(message)) is None:
                        raise self._error(
                            rank, index, f"has a message that is not received: {message}"
                        )
                    if place[1] > index:
                        raise self._error(*place, "stands behind the action that needs it")
        for places, known, word in ((sends, made, "made"), (receives, needed, "needed")):
            if len(known) < len(places):
                extra = min(places.keys() - known, key=lambda message: places[message])
                raise self._error(*places[extra], f"is {word} by no action")

    def _run(self) -> None:
        """Each rank goes through its list; an action waits for what it needs, and a rank's messages
        for each other."""
        at = [0] * len(self.lists)
        queues: list[_Queue] = [deque() for _ in self.lists]
        arrived: set[StageMessage] = set()
        going = True
        while going:
            going = False
            for rank in range(len(at)):
                going |= self._advance(rank, at, queues, arrived)
            for rank in range(len(at)):
                going |= self._exchange(rank, queues, arrived)
        for rank, items in enumerate(self.lists):
            if at[rank] < len(items) or queues[rank]:
                raise self._stuck(at, queues)

    def _advance(
        self,
        rank: int,
        at: list[int],
        queues: list[_Queue],
        arrived: set[StageMessage],
    ) -> bool:
        """Run what this rank can; whether there was something."""
        start = index = at[rank]
        items, needed = self.lists[rank], self.needed[rank]
        while index < len(items):
            item = items[index]
            if not isinstance(item, Action):
                queues[rank].append(item)
            elif not arrived.issuperset(needed[index]):
                break
            index += 1
        at[rank] = index
        return index > start

    def _exchange(self, rank: int, queues: list[_Queue], arrived: set[StageMessage]) -> bool:
        """Pass messages on while the first of this rank is the first of the other one too."""
        count = 0
        while queues[rank]:
            mine = queues[rank][0]
            theirs = queues[mine.rank][0] if queues[mine.rank] else None
            if theirs is None or theirs.rank != rank or theirs.message != mine.message:
                break
            arrived.add(mine.message)
            queues[rank].popleft()
            queues[mine.rank].popleft()
            count += 1
        return count > 0

    def _stuck(self, at: Sequence[int], queues: Sequence[_Queue]) -> ScheduleError:
        parts, places = [], []
        for rank, queue in enumerate(queues):
            if queue:
                place = self.places[type(queue[0])][queue[0].message]
                parts.append(f"rank {rank} waits to {queue[0]} (its item {place[1] + 1})")
                places.append(place)
            elif at[rank] < len(self.lists[rank]):
                parts.append(f"rank {rank} waits to run {self.lists[rank][at[rank]]}")
                places.append((rank, at[rank]))
        return ScheduleError(
            f"schedule {self.name!r} would never end: " + ", ".join(parts),
            "both sides of a message must come to it in the same order",
            places,
        )

    def _error(self, rank: int, index: int, what: str) -> InputError:
        item = self.lists[rank][index]
        return ScheduleError(
            f"schedule {self.name!r}, rank {rank}, item {index + 1} ({item}) {what}",
            "let schedules.sends_receives.with_messages place what is sent and received",
            [(rank, index)],
        )
