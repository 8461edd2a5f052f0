"""SIGINT and SIGTERM end a run on all ranks at the same step, or at once when that cannot be.

While the main thread is blocked inside gloo no Python signal handler runs. What does run is the
handler in C, which writes the signal's number to a file descriptor; a helper thread reads it.
"""

import os
import select
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from interlace.ranks.small_collectives import largest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to stop."""
_SAME_REQUEST_S = 0.5
"""Seconds in which a second signal counts as the first one: a terminal and a launcher may both
deliver one Ctrl-C. A choice."""
_CLOSE = 0
"""Byte that ends the helper thread: no signal has this number."""


class StopFlag:
    """A context manager that turns the first SIGINT or SIGTERM into a flag.

    `requested` is "" or the signal's name; the training loop looks at it through `agreed`, once
    per step. A second signal, or `force_after_s` seconds (longer than a step takes) in which the
    loop did not acknowledge the first, end the process at once with exit code 128 + signal
    number, wherever the main thread is blocked. Main thread only; restores the old handlers.
    """

    def __init__(self, *, force_after_s: float = 10.0) -> None:
        self.requested = ""
        self._force_after_s = force_after_s
        self._acknowledged = threading.Event()

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers: dict[int, Any] = {s: signal.signal(s, _handler) for s in _SIGNALS}
        self._thread = threading.Thread(target=self._read, name="interlace-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._writer.send(bytes([_CLOSE]))
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def acknowledge(self) -> None:
        """The loop is about to end: from here on only a second signal forces it."""
        self._acknowledged.set()

    def _read(self) -> None:
        """The helper thread: the first signal sets the flag, the second or a timeout exits."""
        first, first_at = 0, 0.0
        while True:
            forced = first and not self._acknowledged.is_set()
            left_s = max(0.0, first_at + self._force_after_s - time.monotonic())
            if not select.select([self._reader], [], [], left_s if forced else None)[0]:
                if not self._acknowledged.is_set():
                    _exit(first, f"no step has ended in the {self._force_after_s:g} s since")
                continue
            number = self._reader.recv(1)[0]
            if number == _CLOSE:
                return
            if number not in _SIGNALS:
                continue  # other handlers of this process write here as well
            if not first:
                first, first_at = number, time.monotonic()
                self.requested = signal.Signals(number).name
            elif time.monotonic() - first_at > _SAME_REQUEST_S:
                _exit(number, "it was sent twice")


def agreed(flag: StopFlag, group: dist.ProcessGroup | None = None) -> bool:
    """Whether any rank has been asked to stop: the same answer on all ranks of `group`.

    Collective, on the default group if none is given: one all-reduce of two int64. Give it a
    gloo group, or the host waits for the device in every step. In a process that belongs to no
    group the local flag counts. Sets `requested` on all ranks.
    """
    return agreed_with(flag, wish=False, group=group)[0]


def agreed_with(
    flag: StopFlag, *, wish: bool, group: dist.ProcessGroup | None = None
) -> tuple[bool, bool]:
    """`agreed`, and whether any rank has another `wish` for the time between two steps."""
    number = int(signal.Signals[flag.requested]) if flag.requested else 0
    found = largest({"signal": number, "wish": int(wish)}, group=group)
    if number := found["signal"]:
        flag.requested = signal.Signals(number).name
        flag.acknowledge()
    return bool(number), bool(found["wish"])


def _handler(number: int, frame: FrameType | None) -> None:
    """Python calls this later or never; installing it makes the handler in C write the number."""


def _exit(number: int, why: str) -> None:
    name = signal.Signals(number).name
    os.write(2, f"error: stopped by {name}: {why}\n".encode())  # sys.stderr may be locked
    os._exit(128 + number)
