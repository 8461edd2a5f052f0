"""How a rank ends its process when its main thread cannot: with a message, at once, by a code."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PEER_EXIT_CODE = 43
"""Exit code of a rank whose main thread was blocked because of another rank; a choice, as the two
below, that no shell and no signal uses."""
START_EXIT_CODE = 44
"""Exit code of a rank whose main thread was blocked while the ranks did not meet in time."""
STORE_EXIT_CODE = 45
"""Exit code of a rank whose main thread was blocked when the store could not be reached."""

LAST_WORDS_S = 0.5
"""Seconds that the message of a process has to be written before it ends; a choice."""
_TICK_S = 0.1
"""Seconds between two looks at whether the task is late; a choice."""


def end_process(message: str, exit_code: int, on_exit: Callable[[str], None] | None = None) -> None:
    """Ends this process from any thread, after half a second at most for `on_exit` and stdout."""
    os.write(2, f"error: {message}\n".encode())  # sys.stderr may be locked by a blocked thread

    def last_words() -> None:
        if on_exit is not None:
            on_exit(message)
        sys.stdout.flush()

    thread = threading.Thread(target=last_words, daemon=True)
    thread.start()
    thread.join(timeout=LAST_WORDS_S)
    os._exit(exit_code)


def end_without_shutdown() -> None:
    """Ends the process where the interpreter's shutdown would abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class RankTask:
    """What a rank is doing, how long it may take, and for how long it was seen doing it."""

    def __init__(self, what: str, within_s: float) -> None:
        self.what, self.within_s = what, within_s
        self._spent_s, self._last_look = 0.0, time.monotonic()

    def is_late(self, most_s: float) -> bool:
        """Whether it takes too long. At most `most_s` count since the last look, so that a pause of
        this process does not."""
        now = time.monotonic()
        self._spent_s += min(now - self._last_look, most_s)
        self._last_look = now
        return self._spent_s > self.within_s


@contextmanager
def bounded(within_s: float, message: str) -> Iterator[None]:
    """Ends the process with `message` when what is inside takes longer than `within_s`.

    For native calls that block: no thread can free them, and their own time limits do not always
    fire. Counts only time in which this process ran: after a pause nothing is late.
    """
    done = threading.Event()

    def watch() -> None:
        task = RankTask(message, within_s)
        while not done.wait(timeout=_TICK_S):
            if task.is_late(2 * _TICK_S):
                end_process(message, START_EXIT_CODE)

    thread = threading.Thread(target=watch, name="interlace-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
