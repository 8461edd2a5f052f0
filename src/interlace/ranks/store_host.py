"""The process that hosts the store of a job, as a rank sees it: the launcher, or rank 0."""

import os

from interlace.ranks.heartbeat import DIED_HINT, Peer, Verdict
from interlace.ranks.identity import ProcessIdentity, ProcessView
from interlace.ranks.launched import launcher_hosts_store
from interlace.ranks.silence import Limits, Silence

_SLACK_S = 0.5
"""Seconds by which the store may be silent for longer than a rank; a choice."""


class StoreHost:
    """Whether the store still answers, and what to say if not.

    A host on this machine that works, or waits for a processor, is busy and not dead.
    """

    def __init__(self, limits: Limits) -> None:
        self.is_launcher = launcher_hosts_store(os.environ)
        self._parent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._launcher = None if self._parent_pid is None else ProcessView.of_pid(self._parent_pid)
        self._silence = Silence(limits.dead_after_s + _SLACK_S, limits.busy_s)

    def launcher_ended(self, who: ProcessIdentity) -> Verdict | None:
        """The verdict of a rank whose launcher is gone."""
        if self._parent_pid is None or os.getppid() == self._parent_pid:
            return None
        message = f"the launcher (pid {self._parent_pid}) of {who} has ended"
        return Verdict(None, message, "start the run again")

    def look(self, rank_0: Peer | None, observed_s: float, *, heard: bool) -> Verdict | None:
        """The verdict once the store has not answered for too long; `rank_0` if it is known."""
        view = self._launcher if self.is_launcher else None if rank_0 is None else rank_0.view
        self._silence.count(None if view is None else view.look(), observed_s, heard=heard)
        if not self._silence.is_over(view):
            return None
        return self.lost(rank_0, f"did not answer for {self._silence.silent_s:.1f} s")

    def lost(self, rank_0: Peer | None, what: str) -> Verdict:
        """The verdict when the store cannot be reached."""
        hint = "it has ended, is paused, or its host cannot be reached"
        if self.is_launcher:
            return Verdict(None, f"the launcher, which hosts the store, {what}", hint)
        if rank_0 is not None and rank_0.view.ended():
            return Verdict(0, f"{rank_0.who}, which hosted the store, died", DIED_HINT)
        name = "rank 0" if rank_0 is None else str(rank_0.who)
        return Verdict(0, f"{name}, which hosts the store, {what}", hint)

    def kill(self, rank_0: Peer | None) -> None:
        """Ends rank 0 if it hosts the store, is silent, and runs on this machine: nobody else
        does when it is paused."""
        if not self.is_launcher and rank_0 is not None:
            rank_0.view.kill()
