"""What all plans of a world share on one rank."""

from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from interlace.reshard.roll import Roll


class World:
    """The plans and transfers that live on this rank, by the number of the plan.

    Plans are numbered in the order in which they were made, alike on all ranks.
    """

    def __init__(self) -> None:
        self.failure = ""
        """Message of the last transfer that failed, of which a later drop may be a consequence."""
        self._left: list[object] = []
        self._watch_connection: dist.Store | None = None
        self._rolls: WeakValueDictionary[int, Roll] = WeakValueDictionary()
        self._under_way: WeakValueDictionary[int, object] = WeakValueDictionary()
        self._turns: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()

    @staticmethod
    def current() -> "World":
        """That of the default process group."""
        group = dist.group.WORLD
        assert group is not None
        return _WORLDS.setdefault(group, World())

    def watch_connection(self) -> dist.Store:
        """A connection of its own to the store of the default group, one for all transfers.

        A new connection to the store asks a name server on both ends: a burst of them, one per
        transfer, stood still for 5 s at a time.
        """
        if self._watch_connection is None:
            clone = getattr(default_store(), "clone")  # noqa: B009 - the type stub lacks it
            self._watch_connection = clone()
        assert self._watch_connection is not None
        return self._watch_connection

    def keep(self, messages: Iterable[object]) -> None:
        """Keeps the messages of a transfer that failed, and their memory, while the group exists.

        gloo stops reading from a rank once a message of it arrives whose memory is gone: every
        later message of that rank, also of other plans and of collectives, would be waited for in
        vain.
        """
        self._left.extend(messages)

    def add_plan(self, plan: int, roll: Roll) -> None:
        """Knows a plan for as long as it exists."""
        self._rolls[plan] = roll

    def begun_instead(self, peer: int) -> list[str]:
        """The transfers that a peer has begun and this rank has not."""
        found = (roll.ahead(peer) for _, roll in sorted(self._rolls.items()))
        return [transfer for transfer in found if transfer]

    def add_transfer(self, plan: int, handle: object) -> None:
        """Knows the handle of a transfer under way."""
        self._under_way[plan] = handle

    def remove_transfer(self, plan: int) -> None:
        """Forgets the transfer of a plan, which has ended."""
        self._under_way.pop(plan, None)

    def transfers_before(self, plan: int) -> list[object]:
        """The handles of those under way whose plans were made before, in that order."""
        return [handle for at, handle in sorted(self._under_way.items()) if at < plan]

    def next_turns(self, group: dist.ProcessGroup, peers: Iterable[int]) -> dict[int, int]:
        """Counts one more transfer with each peer in a group; returns how many each has by now."""
        counts = self._turns.setdefault(group, Counter())
        counts.update(peers)
        return {peer: counts[peer] for peer in peers}


_WORLDS: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()
"""The World of each default group, for as long as the group exists."""


def default_store() -> dist.Store:
    """The store of the default group: it reaches every rank, also those of no common group."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()
