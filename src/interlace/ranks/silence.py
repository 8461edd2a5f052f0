"""When a process that says nothing counts as dead: when it does nothing either.

A rank may be silent because its native code holds the interpreter lock, or because the machine is
busy. On the same host its processor time tells that apart from a pause or a deadlock.
"""

from dataclasses import dataclass

from interlace.errors import InputError
from interlace.ranks.identity import ProcessView, Sight

_WORKS = 0.05
"""Share of one processor that counts as work; a choice. A thread that waits for the interpreter
lock wakes 200 times a second, which takes 0.002 of one; processor time is counted in steps of 0.01
s."""
_WINDOW_S = 0.4
"""Seconds over which the processor time of a silent rank is compared; a choice."""
_LOOK_AGAIN_S = 0.2
"""Seconds that are left to a rank before it is looked at once more; a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a watchdog, as in `config.WatchdogConfig`.

    Raises InputError if `dead_after_s` is less than two heartbeats.
    """

    heartbeat_s: float
    dead_after_s: float
    busy_s: float = 60.0
    start_s: float = 120.0
    end_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= self.dead_after_s:
            raise InputError(
                f"a rank cannot be dead after {self.dead_after_s} s with a heartbeat of "
                f"{self.heartbeat_s} s",
                hint="set dead_after_s to at least twice heartbeat_s, and heartbeat_s above 0",
            )


class Silence:
    """How long a process has said nothing, and for how long of that it has done nothing.

    Counts what the caller observed: a caller that was not scheduled itself must leave that out.
    """

    def __init__(self, dead_after_s: float, busy_s: float) -> None:
        self.silent_s = 0.0
        self.idle_s = 0.0
        self._dead_after_s = dead_after_s
        self._busy_s = max(busy_s, dead_after_s)
        self._sight: Sight | None = None
        self._since_s = 0.0
        self._cpu_s: float | None = None

    def count(self, sight: Sight | None, observed_s: float, *, heard: bool) -> None:
        """One look after `observed_s`: whether it said something, and how it was seen."""
        self._sight = sight
        self.silent_s = 0.0 if heard else self.silent_s + observed_s
        self.idle_s = 0.0 if heard else self.idle_s + observed_s
        self._since_s += observed_s
        cpu_s = None if sight is None or sight.paused else sight.cpu_s
        if cpu_s is None or self._cpu_s is None:
            self._cpu_s, self._since_s = cpu_s, 0.0
        elif self._since_s >= _WINDOW_S:
            if cpu_s - self._cpu_s >= _WORKS * self._since_s:
                self.idle_s = 0.0
            self._cpu_s, self._since_s = cpu_s, 0.0

    def is_over(self, view: ProcessView | None) -> bool:
        """Whether the process counts as dead; `view` is asked for threads that wait to run."""
        if self.silent_s >= self._busy_s:
            return True
        if self.idle_s < self._dead_after_s:
            return False
        if view is not None and view.wants_to_run():
            self.idle_s = self._dead_after_s - _LOOK_AGAIN_S
            return False
        return True

    def left_s(self) -> float:
        """Seconds until the process can count as dead at the earliest."""
        return min(self._dead_after_s - self.idle_s, self._busy_s - self.silent_s)

    def text(self) -> tuple[str, str]:
        """(what to say after the name of the process, what to do about it)."""
        silent = f"is silent for {self.silent_s:.1f} s"
        if self._sight is not None and self._sight.paused:
            return (
                f"{silent}: it is paused",
                "SIGSTOP, a debugger or the batch system paused it",
            )
        if self.silent_s >= self._busy_s and self.idle_s < self.silent_s:
            return (
                f"{silent}, though it uses its processor",
                "its native code may hold the interpreter lock; raise watchdog.busy_s if it "
                "should take that long",
            )
        return (
            silent,
            "it is paused, swapped out, deadlocked or cut off; if its native code sleeps for long "
            "with the interpreter lock held, set watchdog.dead_after_s higher",
        )
