"""Which process a rank is, so that another rank can name it, see it die, and end it safely."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self


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

    def seen_from_here(self) -> Self:
        """This identity, without a start time unless the process can be observed from here:
        it runs on this machine, in this container, and is visible to this user."""
        visible = self.kernel == _kernel() and self.started == _start_time(self.pid)
        return self if visible else dataclasses.replace(self, started="")

    def ended(self) -> bool:
        """Whether the process is known to be gone (or a zombie); False if not observable."""
        return bool(self.started) and _start_time(self.pid) != self.started

    def kill(self) -> bool:
        """SIGKILL, if this very process can be observed from here; says whether it was sent."""
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            handle = os.pidfd_open(self.pid)
            try:
                # The handle pins the process: checked after it was opened, the pid is ours.
                if self.started and self.seen_from_here().started:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return True
            finally:
                os.close(handle)
        return False


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat; empty for a process that is gone, a zombie, or not visible."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the command name may hold spaces and brackets
    return "" if fields[0] in {"Z", "X"} else fields[19]
