"""The heartbeat protocol of one rank: what it writes to and reads from the shared store.

Keys, below a prefix of this session: `beat/R` a counter, or "stopped" after a normal end;
`who/R` the process of rank R; `verdict` what ends the run, written once, by the first to know;
`stopped` and `seen` count the ranks that ended normally or have read the verdict.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Self

import torch.distributed as dist

from interlace.errors import PeerError
from interlace.runtime.identity import ProcessIdentity

_STOPPED = b"stopped"
UNDECIDED = "-"
_SEEN_POLL_S = 0.05

DIED_HINT = "it was killed or crashed: see the end of its output, and dmesg (out of memory)"


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

    def error(self) -> PeerError:
        """The verdict as the error that the main thread raises."""
        ranks = () if self.rank is None else (self.rank,)
        return PeerError(self.message, ranks=ranks, hint=self.hint)


class Ring:
    """Every rank beats, and watches the next rank that has not stopped.

    A round is two requests to the store at any world size. All methods may raise RuntimeError
    (no connection to the store), and may block while the store is paused. One thread at a time.
    All ranks `join`, and after a barrier `meet`.
    """

    def __init__(
        self,
        store: dist.Store,
        identity: ProcessIdentity,
        world_size: int,
        *,
        heartbeat_s: float,
        dead_after_s: float,
    ) -> None:
        self._store = store
        self._identity = identity
        self._rank = identity.rank
        self._world_size = world_size
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._rounds = 0
        self._watched = (self._rank + 1) % world_size
        self._last_beat = b""
        self._last_look = time.monotonic()
        self._silent_s = 0.0
        self._marked_stopped = False

    def join(self) -> None:
        """Writes who this rank is, and its first beat."""
        self._store.compare_set("verdict", "", UNDECIDED)
        self._store.set(f"beat/{self._rank}", "0")
        self._store.set(f"who/{self._rank}", self._identity.to_json())

    def meet(self) -> None:
        """Reads who the neighbour is, and rank 0, whose process may host the store."""
        self._peer = self._who(self._watched)
        self.store_host = self._who(0)
        self._last_look = time.monotonic()

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
            self._peer.kill()  # paused on this host: its end frees whoever waits for it in gloo
        return held

    def decide(self, verdict: Verdict) -> Verdict:
        """Writes the verdict, unless another rank was first; returns the one that holds."""
        held = self._store.compare_set("verdict", UNDECIDED, verdict.to_json())
        return Verdict.from_json(held)

    def stop(self) -> bool:
        """Marks this rank as ended normally; True once its process may go.

        Rank 0, whose process may host the store, beats until all others have stopped.
        """
        if self._rank == 0 and self._store.add("stopped", 0) < self._world_size - 1:
            return False
        if not self._marked_stopped:
            self._marked_stopped = True
            self._store.set(f"beat/{self._rank}", _STOPPED.decode())
            self._store.add("stopped", 1)
        return True

    def acknowledge(self, verdict: Verdict) -> None:
        """Counts this rank as one that knows. Rank 0 gives the others a heartbeat to read."""
        self._store.add("seen", 1)
        if self._rank != 0:
            return
        expected = self._world_size - (verdict.rank not in (0, None))
        give_up = time.monotonic() + 1.5 * self._heartbeat_s
        while self._store.add("seen", 0) < expected and time.monotonic() < give_up:
            time.sleep(_SEEN_POLL_S)

    def pause_s(self) -> float:
        """Time until the next round: a heartbeat, or less if the neighbour is dead before."""
        return max(0.01, min(self._heartbeat_s, self._dead_after_s - self._silent_s))

    def _who(self, rank: int) -> ProcessIdentity:
        return ProcessIdentity.from_json(self._store.get(f"who/{rank}").decode()).seen_from_here()

    def _look(self) -> tuple[Verdict | None, Verdict | None]:
        """Reads (the verdict, a suspicion): both None while all is well."""
        if self._watched == self._rank:  # all others have stopped, or there are none
            return self._parse(self._store.get("verdict")), None
        beat, text = self._store.multi_get([f"beat/{self._watched}", "verdict"])
        verdict = self._parse(text)
        if beat == _STOPPED:
            self._watched = (self._watched + 1) % self._world_size
            self._peer = self._who(self._watched)
            self._last_beat, self._silent_s = b"", 0.0
            return verdict, None
        self._count_silence(heard=beat != self._last_beat)
        self._last_beat = beat
        return verdict, self._suspicion()

    def _count_silence(self, *, heard: bool) -> None:
        """Counts only time in which this rank looked: after its own pause it accuses nobody."""
        now = time.monotonic()
        observed_s = min(now - self._last_look, 2 * self._heartbeat_s)
        self._silent_s = 0.0 if heard else self._silent_s + observed_s
        self._last_look = now

    def _suspicion(self) -> Verdict | None:
        if self._peer.ended():
            return Verdict(self._watched, f"{self._peer} died", DIED_HINT)
        if self._silent_s >= self._dead_after_s:
            message = f"{self._peer} is silent for {self._silent_s:.1f} s"
            hint = (
                "it is paused, swapped out or cut off; on a machine that is merely overloaded, set "
                "watchdog.dead_after_s higher"
            )
            return Verdict(self._watched, message, hint)
        return None

    @staticmethod
    def _parse(text: bytes) -> Verdict | None:
        return None if text.decode() == UNDECIDED else Verdict.from_json(text)
