"""The last moments of ranks that have stopped: from their last word to the end of the process."""

from collections.abc import Sequence

from interlace.ranks.identity import ProcessIdentity, ProcessView
from interlace.ranks.silence import Limits


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
