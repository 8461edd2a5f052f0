"""The launcher's eye on its ranks, from the birth of each process to its end.

A rank that is paused, or ends before it has met the others, cannot say so, and the ranks see each
other only from the moment when all have joined until they have stopped.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interlace.config import WatchdogConfig
from interlace.ranks.identity import ProcessView, Sight
from interlace.ranks.silence import Silence

PAUSED_HINT = "a debugger, a full terminal or the batch system pauses processes"
"""Hint where a rank is paused."""
_LOOK_S = 0.1
"""Seconds between two looks at the ranks; a choice."""
_MOST_PER_LOOK_S = 0.3
"""Most seconds that count between two looks: if there were more, the launcher itself was paused. A
choice, three looks."""
_ASK_S = 0.5
"""Seconds between two questions to the store; a choice: a question takes ten times as long as a
look into /proc."""
_RANKS_FIRST_HEARTBEATS = 2
"""Heartbeats by which the launcher accuses a paused rank later than the ranks do, which name it
themselves where they can; a choice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a rank did that only its launcher can see."""

    rank: int
    what: str
    hint: str


class _Rank:
    """One process: how it was seen last, and since when."""

    def __init__(self, pid: int, limits: WatchdogConfig) -> None:
        self.view = ProcessView.of_pid(pid)
        self.code: int | None = None
        self.joined = False
        self.left = False
        self.sight: Sight | None = None
        self.paused_s = 0.0
        self.leaving = Silence(limits.end_s, float("inf"))

    def look(self, observed_s: float) -> None:
        sight = self.view.look()
        if sight is not None and sight.ended:
            return  # what was seen before tells why
        self.sight = sight
        paused = sight is not None and sight.paused
        self.paused_s = self.paused_s + observed_s if paused else 0.0
        self.leaving.count(sight, observed_s, heard=not self.left)


class Supervisor:
    """Finds ranks that are paused at any moment, do not join, or do not end.

    `codes` gives each rank's exit code by now, `said(word, rank)` whether a rank has said that it
    `joined` or `left` the run. Bounds are those of the run's watchdog; with `must_join` all ranks
    have to join, else only if one does. Counts only time in which the launcher ran itself.
    """

    def __init__(
        self,
        pids: Mapping[int, int],
        codes: Callable[[], Mapping[int, int | None]],
        said: Callable[[str, int], bool],
        limits: WatchdogConfig,
        *,
        must_join: bool,
    ) -> None:
        self._ranks = {rank: _Rank(pid, limits) for rank, pid in pids.items()}
        self._codes = codes
        self._said = said
        self._limits = limits
        self._must_join = must_join
        self._age_s = 0.0
        self._last_look = self._ask_at = time.monotonic()

    def look(self) -> Fault | None:
        """Looks at all ranks once; the first fault that is found."""
        now = time.monotonic()
        if now - self._last_look < _LOOK_S:
            return None
        observed_s = min(now - self._last_look, _MOST_PER_LOOK_S)
        self._last_look = now
        self._age_s += observed_s
        codes = self._codes()  # read first: a rank joins before it ends
        for number, rank in self._ranks.items():
            rank.code = codes[number]
            if now >= self._ask_at or rank.code is not None:
                rank.joined = rank.joined or self._said("joined", number)
                rank.left = rank.left or (rank.joined and self._said("left", number))
            if rank.code is None:
                rank.look(observed_s)
        self._ask_at = now + _ASK_S if now >= self._ask_at else self._ask_at
        return self._paused() or self._not_joined() or self._not_ended()

    def were_paused(self) -> list[int]:
        """Ranks that were paused when they were last seen alive."""
        return [
            number
            for number, rank in self._ranks.items()
            if rank.sight is not None and rank.sight.paused
        ]

    def _paused(self) -> Fault | None:
        limits = self._limits
        longest_s = limits.dead_after_s + _RANKS_FIRST_HEARTBEATS * limits.heartbeat_s
        for number, rank in self._ranks.items():
            if rank.code is None and rank.paused_s >= longest_s:
                what = f"was paused (SIGSTOP) for {rank.paused_s:.1f} s"
                return Fault(number, what, PAUSED_HINT)
        return None

    def _not_joined(self) -> Fault | None:
        absent = {number: rank for number, rank in self._ranks.items() if not rank.joined}
        somebody_came = len(absent) < len(self._ranks)
        for number, rank in absent.items():
            if somebody_came and rank.code == 0:
                what = "exited with code 0 before it joined the run"
                return Fault(number, what, "see its output: something in it ends the process")
        if not (somebody_came or self._must_join) or self._age_s < self._limits.start_s:
            return None
        for number, rank in absent.items():
            if rank.code is None:
                what = f"has not joined the run within {self._limits.start_s:g} s of its start"
                hint = "see its output: it hangs or loads; watchdog.start_s bounds this time"
                return Fault(number, what, hint)
        return None

    def _not_ended(self) -> Fault | None:
        for number, rank in self._ranks.items():
            if rank.code is None and rank.left and rank.leaving.is_over(rank.view):
                what = f"had finished, but did not end within {self._limits.end_s:g} s"
                return Fault(number, what, "its work is complete; watchdog.end_s bounds this time")
        return None
