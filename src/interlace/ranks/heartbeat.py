"""The heartbeat protocol of one rank: what it writes to and reads from the shared store.

Keys, below a prefix of this session: `beat/R` a counter, or "stopped" after a normal end;
`who/R` the process of rank R, written when it joins; `verdict` what ends the run, written once, by
the first to know; `stopped` and `seen` count the ranks that ended normally or have read the
verdict. Rank 0 sees the processes of the others to their ends (`Leavers`).
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, Self

import torch.distributed as dist

from interlace.errors import PeerError
from interlace.ranks.identity import ProcessIdentity, ProcessView
from interlace.ranks.silence import Limits, Silence

_STOPPED = b"stopped"
"""What `beat/R` holds after a normal end."""
UNDECIDED = "-"
"""What `verdict` holds while nothing is decided."""
_SEEN_POLL_S = 0.05
"""Seconds between two looks at how many ranks have read the verdict; a choice."""
_START_SLACK_S = 1.0
"""Seconds by which the others accuse later than rank 0, so that it is the first to say who is
missing and they read it; a choice."""
_MOST_NAMED = 8
"""Missing ranks that a message names one by one; a choice."""
_MEET_S = 0.05
"""Seconds between rounds while ranks join; a choice: they mostly do at the same time."""
_HURRY_TO_MEET_S = 2.0
"""Seconds for which rounds are that short, before they are heartbeats; a choice."""

DIED_HINT = "it was killed or crashed: see the end of its output, and dmesg (out of memory)"
"""Hint where the process of a rank has ended."""


class Leavers:
    """The ranks on this host that have said that they are done, until their processes end."""

    def __init__(self, people: Sequence[ProcessIdentity]) -> None:
        self._views = {who: ProcessView.of(who) for who in people}
        self._waited_s = 0.0
        self._paused_s = dict.fromkeys(self._views, 0.0)

    def all_ended(self) -> bool:
        """Whether no process is left that can be seen from here."""
        for who, view in list(self._views.items()):
            sight = view.look()
            if sight is None or sight.ended:
                del self._views[who]
        return not self._views

    def look(self, observed_s: float, limits: Limits) -> tuple[int, str, str] | None:
        """(rank, what it did, what to do) for one that is paused or takes too long to end."""
        self._waited_s += observed_s
        for who, view in self._views.items():
            sight = view.look()
            paused = sight is not None and sight.paused
            self._paused_s[who] = self._paused_s[who] + observed_s if paused else 0.0
            if self._paused_s[who] >= limits.dead_after_s:
                return (
                    who.rank,
                    f"{who} had finished, but is paused for {self._paused_s[who]:.1f} s",
                    "SIGSTOP, a debugger or the batch system paused it; its work is complete",
                )
            if self._waited_s >= limits.end_s and sight is not None and not sight.ended:
                return (
                    who.rank,
                    f"{who} had finished, but did not end within {limits.end_s:g} s",
                    "its work is complete; watchdog.end_s bounds this time",
                )
        return None

    def kill(self, rank: int) -> None:
        """SIGKILL to that rank."""
        for who, view in self._views.items():
            if who.rank == rank:
                view.kill()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ends the run: the rank at fault (None: the launcher), what happened, what to do."""

    rank: int | None
    message: str
    hint: str

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """The verdict that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """What the key `verdict` of the store says; None while nothing is decided."""
        return None if text.decode() == UNDECIDED else cls.from_json(text)

    def decide(self, store: dist.Store) -> "Verdict":
        """Writes the verdict, unless another rank was first; returns the one that holds."""
        return Verdict.from_json(store.compare_set("verdict", UNDECIDED, self.to_json()))

    def error(self) -> PeerError:
        """The verdict as the error that the main thread raises."""
        ranks = () if self.rank is None else (self.rank,)
        return PeerError(self.message, ranks=ranks, hint=self.hint)


class Peer:
    """Another rank as it is watched: its name, its process and its silence."""

    def __init__(self, who: ProcessIdentity, limits: Limits) -> None:
        self.who = who
        self.view = ProcessView.of(who)
        self.silence = Silence(limits.dead_after_s, limits.busy_s)

    def verdict(self, observed_s: float, *, heard: bool) -> Verdict | None:
        """The suspicion after one more look, `observed_s` after the last one."""
        sight = self.view.look()
        if sight is not None and sight.ended:
            return Verdict(self.who.rank, f"{self.who} died", DIED_HINT)
        self.silence.count(sight, observed_s, heard=heard)
        if not self.silence.is_over(self.view):
            return None
        what, hint = self.silence.text()
        return Verdict(self.who.rank, f"{self.who} {what}", hint)


class Observer:
    """Counts only time in which its caller looked: after a pause of its own it accuses nobody."""

    def __init__(self, most_s: float) -> None:
        """`most_s` is the most that counts for one look."""
        self._most_s = most_s
        self._last_look = time.monotonic()

    def begin(self) -> None:
        """Counts from now on."""
        self._last_look = time.monotonic()

    def since_last_look_s(self) -> float:
        """The time since the last look that counts."""
        now = time.monotonic()
        observed_s = min(now - self._last_look, self._most_s)
        self._last_look = now
        return observed_s


class Heartbeats(Protocol):
    """Who beats, and who watches whom: what a `Watchdog` needs of it. All but the two properties
    may raise RuntimeError (no connection to the store)."""

    @property
    def store_host(self) -> Peer | None:
        """Rank 0, whose process may host the store, once it is known."""
        ...

    @property
    def has_met(self) -> bool:
        """Whether all that this rank must be able to name have joined."""
        ...

    def join(self) -> None:
        """The first beat."""
        ...

    def round(self) -> Verdict | None:
        """One heartbeat and one look; the verdict if there is one by now."""
        ...

    def decide(self, verdict: Verdict) -> Verdict:
        """Writes the verdict, unless another rank was first; returns the one that holds."""
        ...

    def stop(self) -> bool:
        """Marks this rank as ended normally; True once its process may go."""
        ...

    def acknowledge(self, verdict: Verdict) -> None:
        """Counts this rank as one that knows the verdict."""
        ...

    def pause_s(self) -> float:
        """Time until the next round."""
        ...


class Ring:
    """Every rank beats, and watches the next rank that has not stopped.

    A round is two requests to the store at any world size. All methods may raise RuntimeError
    (no connection to the store), and may block while the store is paused. One thread at a time.
    All ranks `join`, each when it comes; who does not within `start_s` is named by the others.
    With `process_ends`, ranks end their process soon after they have stopped: rank 0 sees to it.
    """

    def __init__(
        self,
        store: dist.Store,
        identity: ProcessIdentity,
        world_size: int,
        limits: Limits,
        *,
        process_ends: bool = False,
    ) -> None:
        self._store = store
        self._identity = identity
        self._rank = identity.rank
        self._world_size = world_size
        self._limits = limits
        self._process_ends = process_ends
        self._rounds = 0
        self._watched = (self._rank + 1) % world_size
        self._peer: Peer | None = None
        self.store_host: Peer | None = None
        """Rank 0, whose process may host the store, once it has joined."""
        self._last_beat = b""
        self._observer = Observer(2 * limits.heartbeat_s)
        self._starting_s = 0.0
        self._leavers: Leavers | None = None
        self._marked_stopped = False

    @property
    def has_met(self) -> bool:
        """Whether the neighbour and rank 0 have joined."""
        known = self._peer is not None and self.store_host is not None
        return known or self._watched == self._rank

    def join(self) -> None:
        """Writes who this rank is, and its first beat."""
        self._store.compare_set("verdict", "", UNDECIDED)
        self._store.set(f"beat/{self._rank}", "0")
        self._store.set(f"who/{self._rank}", self._identity.to_json())
        self._observer.begin()

    def round(self) -> Verdict | None:
        """One heartbeat and one look at the neighbour; the verdict if there is one by now."""
        if not self._marked_stopped:
            self._rounds += 1
            self._store.set(f"beat/{self._rank}", str(self._rounds))
        verdict, suspicion = self._look()
        if suspicion is not None:  # by now it may have stopped, or the true cause be known
            verdict, suspicion = self._look()
        if verdict is not None or suspicion is None:
            return verdict
        held = self.decide(suspicion)
        if held == suspicion:
            self._kill(held.rank)  # paused on this host: its end frees whoever waits for it
        return held

    def decide(self, verdict: Verdict) -> Verdict:
        """Writes the verdict, unless another rank was first; returns the one that holds."""
        return verdict.decide(self._store)

    def stop(self) -> bool:
        """Marks this rank as ended normally; True once its process may go.

        Rank 0, whose process may host the store, beats until all others have stopped.
        """
        if self._rank == 0 and not self._others_left():
            return False
        if not self._marked_stopped:
            self._marked_stopped = True
            self._store.set(f"beat/{self._rank}", _STOPPED.decode())
            self._store.add("stopped", 1)
        return True

    def acknowledge(self, verdict: Verdict) -> None:
        """Counts this rank as one that knows. Rank 0 gives the others 2.5 heartbeats to read: one
        may pass before they look, and a loaded machine delayed a look by half of one more."""
        self._store.add("seen", 1)
        if self._rank != 0:
            return
        expected = self._world_size - (verdict.rank not in (0, None))
        give_up = time.monotonic() + 2.5 * self._limits.heartbeat_s
        while self._store.add("seen", 0) < expected and time.monotonic() < give_up:
            time.sleep(_SEEN_POLL_S)

    def pause_s(self) -> float:
        """Time until the next round: a heartbeat, or less if the neighbour is dead before."""
        heartbeat_s = self._limits.heartbeat_s
        if not self.has_met:  # ranks mostly join at the same time
            return _MEET_S if self._rounds * _MEET_S < _HURRY_TO_MEET_S else heartbeat_s
        left_s = heartbeat_s if self._peer is None else self._peer.silence.left_s()
        return max(0.01, min(heartbeat_s, left_s))

    def _others_left(self) -> bool:
        """Whether all others have stopped, and their processes on this host have ended if they
        are to."""
        if self._store.add("stopped", 0) < self._world_size - 1:
            return False
        if self._leavers is None:
            others = range(1, self._world_size) if self._process_ends else ()
            people = self._store.multi_get([f"who/{rank}" for rank in others]) if others else []
            self._leavers = Leavers([ProcessIdentity.from_json(who.decode()) for who in people])
        return self._leavers.all_ended()

    def _kill(self, rank: int | None) -> None:
        if self._leavers is not None and rank is not None:
            self._leavers.kill(rank)
        elif self._peer is not None and self._peer.who.rank == rank:
            self._peer.view.kill()

    def _look(self) -> tuple[Verdict | None, Verdict | None]:
        """Reads (the verdict, a suspicion): both None while all is well."""
        observed_s = self._observer.since_last_look_s()
        if self._leavers is not None:  # all others have stopped
            late = self._leavers.look(observed_s, self._limits)
            suspicion = None if late is None else Verdict(*late)
            return Verdict.read(self._store.get("verdict")), suspicion
        if self._watched == self._rank:  # all others have stopped, or there are none
            return Verdict.read(self._store.get("verdict")), None
        self._meet()
        if self._peer is None:
            self._starting_s += observed_s
            return Verdict.read(self._store.get("verdict")), self._missing()
        beat, text = self._store.multi_get([f"beat/{self._watched}", "verdict"])
        verdict = Verdict.read(text)
        if beat == _STOPPED:
            self._watched = (self._watched + 1) % self._world_size
            self._peer, self._last_beat = None, b""
            return verdict, None
        heard, self._last_beat = beat != self._last_beat, beat
        return verdict, self._peer.verdict(observed_s, heard=heard)

    def _meet(self) -> None:
        """Reads who the neighbour and rank 0 are, once they have joined."""
        if self.store_host is None and self._store.check(["who/0"]):
            self.store_host = Peer(self._who(0), self._limits)
        if self._peer is None and self._store.check([f"who/{self._watched}"]):
            self._peer = Peer(self._who(self._watched), self._limits)

    def _missing(self) -> Verdict | None:
        """The suspicion about all ranks that have not joined when the time to do so is over."""
        limit_s = self._limits.start_s + (_START_SLACK_S if self._rank else 0.0)
        if self._starting_s < limit_s:
            return None
        every = range(self._world_size)
        missing = [rank for rank in every if not self._store.check([f"who/{rank}"])]
        if not missing:
            return None
        named = ", ".join(map(str, missing[:_MOST_NAMED]))
        more = " and more" if len(missing) > _MOST_NAMED else ""
        ranks = f"ranks {named}{more} have" if len(missing) > 1 else f"rank {named} has"
        return Verdict(
            missing[0],
            f"{ranks} not joined the run within {self._limits.start_s:g} s",
            "see its output: it has ended, is paused or still loads; watchdog.start_s bounds it",
        )

    def _who(self, rank: int) -> ProcessIdentity:
        return ProcessIdentity.from_json(self._store.get(f"who/{rank}").decode())
