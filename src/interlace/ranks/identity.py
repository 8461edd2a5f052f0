"""Which process a rank is, so that another rank can name it, see how it is, and end it safely."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STAT_BYTES = 4096
"""Most bytes read of /proc/PID/stat; a choice: its line of some 50 numbers is far shorter."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""Clock ticks per second in /proc, as the system says; 100 where it does not say."""
_GONE = (errno.ENOENT, errno.ESRCH)
"""Error numbers that mean that the process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, named so that a re-used pid or another container is never taken for it.

    `kernel` is the boot id and the pid namespace, `started` the start time in clock ticks since
    boot; both are empty where there is no /proc, and then the process cannot be observed.
    """

    rank: int
    host: str
    pid: int
    kernel: str
    started: str

    @classmethod
    def of_this_process(cls, rank: int) -> Self:
        """The identity of the calling process."""
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            kernel=_kernel(),
            started=_start_time(os.getpid()),
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The identity that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """As text, for the store."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Sight:
    """A process at one moment: the letter of its state in /proc, and its processor time so far."""

    state: str
    cpu_s: float

    @property
    def ended(self) -> bool:
        """It is gone, or a zombie."""
        return self.state in ("Z", "X")

    @property
    def paused(self) -> bool:
        """It was stopped by SIGSTOP, a terminal or a debugger."""
        return self.state in ("T", "t")


_ENDED = Sight("X", 0.0)
"""How a process that is gone is seen: state X is `dead` in `man proc_pid_stat`."""


class ProcessView:
    """How a process is, seen from here: whether it runs, is paused or has ended.

    /proc/PID/stat and a pidfd are opened once and kept, so that a process which has no file
    descriptor left can still look, and both stay with the very process: a re-used pid is never
    taken for it. Of a process on another host or in another container nothing is known.
    """

    def __init__(self, pid: int, kernel: str, started: str) -> None:
        self._pid = pid
        self._stat = self._handle = -1
        self._ended = False
        if not started or kernel != _kernel():
            return
        # The handle comes first: whoever has the start time below had this pid before as well.
        # Without one (no descriptor left, or a sandbox forbids it) the process cannot be killed.
        try:
            self._handle = os.pidfd_open(pid)
        except OSError as error:
            self._ended = error.errno in _GONE
        # Where /proc hides other users' processes, the file of a running process is missing.
        with contextlib.suppress(OSError):
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, _close, [each for each in (self._handle, self._stat) if each >= 0])
        fields = self._fields()
        if fields is not None and fields[_START] != started:
            self._ended = True

    @classmethod
    def of(cls, who: ProcessIdentity) -> Self:
        """The view of a rank."""
        return cls(who.pid, who.kernel, who.started)

    @classmethod
    def of_pid(cls, pid: int) -> Self:
        """The view of a process on this host that is known to run, such as a child."""
        return cls(pid, _kernel(), _start_time(pid))

    def look(self) -> Sight | None:
        """How the process is now; None if that cannot be seen from here."""
        fields = self._fields()
        if self._ended:
            return _ENDED
        if fields is None:
            return None
        return Sight(fields[0], (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S)

    def ended(self) -> bool:
        """Whether the process is known to be gone (or a zombie); False if not observable."""
        sight = self.look()
        return sight is not None and sight.ended

    def wants_to_run(self) -> bool:
        """Whether any of its threads runs or waits for a processor: on a busy machine a thread
        may wait for long. False where that cannot be seen."""
        if (sight := self.look()) is None or sight.ended or sight.paused:
            return False
        threads = Path(f"/proc/{self._pid}/task")
        try:
            for thread in os.listdir(threads):
                if _stat_fields((threads / thread / "stat").read_text())[0] == "R":
                    return True
        except OSError:  # it has just ended, or no descriptor is left: its processor time decides
            return False
        return False

    def kill(self) -> bool:
        """SIGKILL, if this very process can be observed from here; says whether it was sent."""
        sight = self.look()
        if sight is None or sight.ended or self._handle < 0:
            return False
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # just ended, or another user's
            return False
        return True

    def _fields(self) -> list[str] | None:
        """What /proc/PID/stat says after the name; None when it cannot be read."""
        if self._ended or self._stat < 0:
            return None
        try:
            return _stat_fields(os.pread(self._stat, _STAT_BYTES, 0).decode(errors="replace"))
        except OSError as error:
            self._ended = error.errno in _GONE
            return None


_USER, _SYSTEM, _START = 11, 12, 19  # fields 14, 15 and 22 of `man proc_pid_stat`


def _stat_fields(text: str) -> list[str]:
    return text.rpartition(")")[2].split()  # the command name may hold spaces and brackets


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Empty for a process that is gone or cannot be seen."""
    try:
        return _stat_fields(Path(f"/proc/{pid}/stat").read_text())[_START]
    except OSError:
        return ""
