"""The watchdog of training, for the ranks of one resharding and for as long as it is under way.

The training watchdog begins and ends with the whole world, and every rank watches its neighbour.
Here a rank watches the peers that it waits for, since another may not have begun yet; what it
finds out ends all ranks of the transfer, through a verdict in the store, as in training.
"""

import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import torch.distributed as dist

from interlace.errors import InterlaceError, PeerError
from interlace.ranks.heartbeat import UNDECIDED, Observer, Peer, Verdict
from interlace.ranks.identity import ProcessIdentity
from interlace.ranks.launched import launcher_hosts_store
from interlace.ranks.silence import Limits
from interlace.ranks.watchdog import Watchdog
from interlace.reshard.meeting import Pauses

HEARTBEAT_S = 0.5
"""Seconds between heartbeats, as `watchdog.heartbeat_s` of a run file."""
DEAD_AFTER_S = 2.5
"""Seconds of silence after which a rank counts as dead, as `watchdog.dead_after_s`."""
LIMITS = Limits(heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_AFTER_S)
"""The host of the store counts as dead 0.5 s later, and ranks end at most 1.5 s after that: 5 s are
promised."""

_DONE = "done"
"""What a rank's beat says once it is done with the transfer."""
_LOOK_S = 0.3
"""Seconds for which the host of the store asks at once whether all are done; a choice, short enough
that the watchdog sees rounds go on."""
_HOST_STAYS_S = 60.0
"""Seconds for which the host of the store waits for the other ranks to be done; a choice."""


class PeerRing:
    """The heartbeats of the n-th transfer of a plan; only awaited peers are watched.

    It is to a transfer what `heartbeat.Ring` is to training. A beat is "n counter", or "n done".
    The keys serve all transfers of a plan. A peer that is between two transfers need not beat; one
    still in an earlier transfer must.
    """

    def __init__(
        self,
        store: dist.Store,
        people: Mapping[int, ProcessIdentity],
        rank: int,
        number: int,
        *,
        hosts_store: bool,
    ) -> None:
        self.has_met = True
        """A transfer waits for no other rank: `people` are known."""
        self.store_host = Peer(people[0], LIMITS) if 0 in people else None
        self.awaited: tuple[int, ...] = ()
        """The ranks that the main thread waits for; set by it."""
        self.broken = False
        """Whether a message to or from them broke: then one that was done may have died since."""
        self._store = store
        self._rank = rank
        self._rounds = 0
        self._marked_stopped = False
        self._observer = Observer(2 * HEARTBEAT_S)
        self._people = people
        self._number = number
        self._hosts_store = hosts_store
        self._heard: dict[int, str] = {}
        self._peers: dict[int, Peer] = {}
        self._stays_until = 0.0

    def join(self) -> None:
        """Writes the first beat of this transfer."""
        self._store.compare_set("verdict", "", UNDECIDED)
        self._beat("0")

    def round(self) -> Verdict | None:
        """One heartbeat and one look at the peers; the verdict if there is one by now."""
        if not self._marked_stopped:
            self._rounds += 1
            self._beat(str(self._rounds))
        if (verdict := Verdict.read(self._store.get("verdict"))) is not None:
            return verdict
        suspicion = self._suspect()
        if suspicion is None or self._suspect() is None:  # by now it may be done
            return None
        held = self.decide(suspicion)
        if held == suspicion and held.rank is not None:
            self._peers[held.rank].view.kill()  # paused on this host: its end frees who waits
        return held

    def decide(self, verdict: Verdict) -> Verdict:
        """Writes the verdict, unless another rank was first; returns the one that holds."""
        return verdict.decide(self._store)

    def stop(self) -> bool:
        """Says that this rank is done; True once it may go.

        The process that hosts the store stays until all ranks of the transfer are done, and
        watches them: any of them may be waiting for its next transfer meanwhile.
        """
        if not self._marked_stopped:
            self._marked_stopped = True
            self._beat(_DONE)
            self._store.add("done", 1)
            if self._hosts_store:
                self.awaited = tuple(rank for rank in self._people if rank != self._rank)
            self._stays_until = time.monotonic() + _HOST_STAYS_S
        if not self._hosts_store:
            return True
        return (
            self._reaches("done", self._number * len(self._people), _LOOK_S)
            or time.monotonic() > self._stays_until
        )

    def acknowledge(self, verdict: Verdict) -> None:
        """Counts this rank as one that knows; the host of the store lets the others read."""
        self._store.add("seen", 1)
        if self._hosts_store:
            others = len(self._people) - (verdict.rank not in (0, None))
            self._reaches("seen", others, 2.5 * HEARTBEAT_S)

    def pause_s(self) -> float:
        """Time until the next round: a heartbeat, or less if a peer is dead before."""
        left_s = (
            self._peers[peer].silence.left_s() for peer in self.awaited if peer in self._peers
        )
        return max(0.01, min([HEARTBEAT_S, *left_s]))

    def _beat(self, state: str) -> None:
        self._store.set(f"beat/{self._rank}", f"{self._number} {state}")

    def _reaches(self, counter: str, goal: int, timeout_s: float) -> bool:
        sleeps = Pauses(timeout_s)
        while self._store.add(counter, 0) < goal:
            if not sleeps.next():
                return False
        return True

    def _suspect(self) -> Verdict | None:
        """A suspicion about a peer that the main thread waits for."""
        observed_s = self._observer.since_last_look_s()
        awaited = self.awaited
        self._peers = {
            rank: self._peers.get(rank) or Peer(self._people[rank], LIMITS) for rank in awaited
        }
        for rank, peer in self._peers.items():
            key = f"beat/{rank}"
            beat = self._store.get(key).decode() if self._store.check([key]) else "0 "
            number, _, state = beat.partition(" ")
            done = int(number) > self._number or (int(number) == self._number and state == _DONE)
            if done and not self.broken:
                continue
            between = int(number) < self._number and state in ("", _DONE)
            alive = done or between or beat != self._heard.get(rank)
            self._heard[rank] = beat
            if (suspicion := peer.verdict(observed_s, heard=alive)) is not None:
                return suspicion
        return None


class TransferWatch:
    """Ends all ranks of one transfer within 5 s when a rank that is waited for dies or stalls.

    Entered by each rank before it says that it begins the transfer, so that it is heard by all who
    wait for its messages, without waiting for the others; left when it is done. On a fault it acts
    as `Watchdog`: a blocked process prints the error and exits with 43 (45 if the store is gone);
    otherwise the context raises PeerError.

    `store` is a connection that nobody else uses; `people` are the ranks of the plan.
    """

    def __init__(
        self, store: dist.Store, people: Mapping[int, ProcessIdentity], rank: int, number: int
    ) -> None:
        self.hosts_store = rank == 0 and not launcher_hosts_store(os.environ)
        self._peers = PeerRing(store, people, rank, number, hosts_store=self.hosts_store)
        self._watchdog = Watchdog(
            store,
            rank,
            len(people),
            heartbeat_s=HEARTBEAT_S,
            dead_after_s=DEAD_AFTER_S,
            heartbeats=self._peers,
        )

    def __enter__(self) -> Self:
        """Returns after the first beat. Raises PeerError if the store cannot be reached."""
        self._watchdog.enter_alone()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watchdog.__exit__(kind, error, trace)

    def stop(self) -> None:
        """Leaves in peace. Raises PeerError if another rank fails before that."""
        self._watchdog.stop()

    def waits_for(self, peers: Sequence[int]) -> None:
        """Names the ranks that the main thread is about to wait for; () if it waits no more."""
        self._peers.awaited = tuple(peers)

    def abandon(self, error: InterlaceError) -> None:
        """Ends the transfer on all other ranks by an error of this one, whose process goes on."""
        self._watchdog.abandon(error.message, hint=error.hint)

    def explain(self, error: BaseException) -> PeerError | None:
        """As in training; a peer that was done and has died since counts as well."""
        self._peers.broken = True
        return self._watchdog.explain(error)

    def raise_verdict(self) -> None:
        """Raises PeerError if the transfer has been given up."""
        self._watchdog.raise_verdict()
