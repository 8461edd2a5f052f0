"""Ends a step whose exchanges wait in streams of a device, where no call of the host fails.

On NCCL the host runs ahead of the device, and what a paused rank does not send holds up kernels,
which NCCL ends by its own limit together with the process, naming an operation by its number. Here
a thread looks, while a step runs, at the oldest exchange that is not over: when that has waited for
too long, or another rank has left the step, it aborts the communicators, which frees the streams,
and the step raises. A step ends with the device, so none that has failed returns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

_LOOK_S = 0.1
"""Seconds between two looks, each of which asks the device for one event; a choice."""
_ASK_S = 1.0
"""Seconds without progress after which the store is asked, once in so many, whether another rank
has left the step; a choice."""


class Underway(Protocol):
    """What is under way, as `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        ...


class Late(NamedTuple):
    """An exchange that a step was ended for."""

    what: str
    reason: str


class StreamWatch:
    """Bounds the exchanges of one step after another. The thread that runs the steps notes them,
    and one of its own looks."""

    def __init__(
        self,
        wait_s: float,
        device: torch.device,
        groups: Sequence[dist.ProcessGroup],
        others_left: Callable[[], bool],
    ) -> None:
        """`groups` are those of the exchanges, and `wait_s` bounds each wait."""
        self.late: Late | None = None
        """Why the last step was ended."""
        self._wait_s = wait_s
        self._device = device
        self._groups = groups
        self._others_left = others_left
        self._noted: deque[tuple[Underway, str]] = deque()
        self._over = threading.Event()

    def note(self, exchange: Underway, what: str) -> None:
        """One more exchange, behind all others."""
        self._noted.append((exchange, what))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context around a step, at whose end the device is done; `late` says whether it was
        ended."""
        self._over.clear()
        thread = threading.Thread(target=self._look, name="interlace-stream-watch", daemon=True)
        thread.start()
        try:
            yield
            torch.cuda.current_stream(self._device).synchronize()
        finally:
            self._over.set()
            thread.join()
            self._noted.clear()

    def _look(self) -> None:
        since = asked = time.monotonic()
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            if self._moved():
                since = asked = now
            elif now - since >= self._wait_s:
                self._end(f"nothing came within {self._wait_s:g} s")
                return
            elif now - asked >= _ASK_S:
                asked = now
                if self._others_left():
                    self._end("another rank has left the step")
                    return

    def _moved(self) -> bool:
        """Whether an exchange is over since the last look, or none is under way."""
        moved = False
        while self._noted and self._noted[0][0].is_completed():
            self._noted.popleft()
            moved = True
        return moved or not self._noted

    def _end(self, reason: str) -> None:
        """Give up what is under way on this rank; the groups can not be used any more."""
        self.late = Late(self._noted[0][1], reason)
        for group in self._groups:
            group.abort()
