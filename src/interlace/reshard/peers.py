"""Waiting for other ranks within a transfer."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from interlace.errors import PeerError
from interlace.reshard.meeting import Pauses
from interlace.reshard.roll import Roll
from interlace.reshard.watch import TransferWatch
from interlace.reshard.world import World

_BEGIN_HINT = "call start on every rank of both meshes, as often and in the same order"
"""Hint where a peer did not begin a transfer in time."""


class Peers:
    """Waits for other ranks in one transfer, never without a bound or a watchdog."""

    def __init__(
        self,
        roll: Roll,
        number: int,
        *,
        world: World,
        watch: TransferWatch | None,
        timeout_s: float,
    ) -> None:
        self.roll = roll
        self.number = number
        self.watch = watch
        self._world = world
        self._timeout_s = timeout_s
        self._begun: set[int] = set()

    def wait_for(self, work: dist.Work, peer: int) -> None:
        """Blocks until a message is done.

        Raises PeerError if the peer does not begin in time, dies, or breaks the connection.
        """
        with self.awaited([peer]):
            try:
                work.wait()
            except RuntimeError as error:
                raise self.explained(error, peer) from error

    def explained(self, error: RuntimeError, peer: int) -> PeerError:
        """Who is at fault when a message with `peer` broke; what gloo raises may blame others."""
        known = None
        if self.watch is not None:
            self.watch.waits_for([peer])
            known = self.watch.explain(error)
        return known or PeerError(
            f"the transfer with rank {peer} broke: {str(error)[:300]}",
            ranks=[peer],
            hint="see the end of its output",
        )

    @contextlib.contextmanager
    def awaited(self, peers: Sequence[int]) -> Iterator[None]:
        """A context around whatever blocks until these ranks do their part; first it waits until
        they have begun."""
        if self.watch is not None:
            self.watch.waits_for(peers)
        for peer in peers:
            if peer not in self._begun:
                self._await_start(peer)
        yield
        if self.watch is not None:
            self.watch.waits_for(())

    def _await_start(self, peer: int) -> None:
        sleeps = Pauses(self._timeout_s)
        while not self.roll.begun(peer, self.number):
            if self.watch is not None:
                self.watch.raise_verdict()
            if not sleeps.next():
                raise self._missing(peer)
        self._begun.add(peer)

    def _missing(self, peer: int) -> PeerError:
        """The error for a peer that did not begin, with what it has begun instead, if anything."""
        what = self.roll.transfer(self.number)
        message = f"rank {peer} has not begun {what} within {self._timeout_s:g} s"
        if instead := self._world.begun_instead(peer):
            message += f"; it has begun {' and '.join(instead)}, which this rank has not"
        return PeerError(message, ranks=[peer], hint=_BEGIN_HINT)
