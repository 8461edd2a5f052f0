"""One emulated link, and the works that complete when the link is done with them."""

import heapq
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future


class EmulatedLink:
    """Both directions of one link: when each is free, and a thread that fires at those times."""

    def __init__(self, *, rate_bits: int, latency_us: float) -> None:
        self._latency_ns = latency_us * 1e3
        self._ns_per_byte = 8e9 / rate_bits
        self._outbound_free_ns = 0
        self._inbound_free_ns = 0
        self._lock = threading.Lock()
        self._timer = _Timer()
        self._worker = _Worker()
        # Idle threads hold only these two, so a link that nobody uses ends its threads.
        for thread in (self._timer, self._worker):
            weakref.finalize(self, thread.stop)

    def send(self, wire_bytes: float) -> int:
        """Occupy the outbound side from now on; returns the monotonic end in ns."""
        with self._lock:
            start_ns = max(time.monotonic_ns(), self._outbound_free_ns)
            self._outbound_free_ns = self._end_ns(start_ns, wire_bytes)
            return self._outbound_free_ns

    def receive(self, wire_bytes: float) -> int:
        """Occupy the inbound side from now on; returns the monotonic end in ns."""
        with self._lock:
            start_ns = max(time.monotonic_ns(), self._inbound_free_ns)
            self._inbound_free_ns = self._end_ns(start_ns, wire_bytes)
            return self._inbound_free_ns

    def at(self, end_ns: int, action: Callable[[], None]) -> None:
        """Call `action` at `end_ns`: at once when that has passed, else in the timer thread."""
        if time.monotonic_ns() >= end_ns:
            action()
        else:
            self._timer.at(end_ns, action)

    def one_by_one(self, action: Callable[[], None]) -> None:
        """Call `action` in a thread, after those given earlier."""
        self._worker.add(action)

    def _end_ns(self, start_ns: int, wire_bytes: float) -> int:
        return start_ns + round(self._latency_ns + wire_bytes * self._ns_per_byte)


class _Timer:
    """Calls actions at given times in one daemon thread, started at the first action."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def at(self, end_ns: int, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._waiting, (end_ns, next(self._order), action))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="interlace-link", daemon=True
                )
                self._thread.start()
            elif self._waiting[0][0] == end_ns:
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()
            del action  # it holds the link, whose end ends this thread

    def _next(self) -> Callable[[], None] | None:
        """Block until the earliest action is due; None once stopped."""
        with self._changed:
            while not self._stopped:
                if not self._waiting:
                    self._changed.wait()
                    continue
                left_ns = self._waiting[0][0] - time.monotonic_ns()
                if left_ns <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(left_ns / 1e9)
        return None


class _Worker:
    """Calls actions one after the other in one daemon thread, started at the first action."""

    def __init__(self) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = False

    def add(self, action: Callable[[], None]) -> None:
        self._actions.put(action)
        if not self._started:  # only the thread that issues collectives comes here
            self._started = True
            threading.Thread(target=self._run, name="interlace-wait", daemon=True).start()

    def stop(self) -> None:
        self._actions.put(None)

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            action()
            del action


class EmulatedWork(Work):
    """A gloo operation whose completion is held back until its time on the link is over."""

    def __init__(self, inner: Work, link: EmulatedLink) -> None:
        super().__init__()
        self._inner = inner
        self._link = link
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: Future[Any] = Future()

    def follow_future(self, end_ns: int) -> None:
        """Complete at `end_ns`, or when the inner operation's future does if that is later."""

        def inner_done(inner: Future[Any]) -> None:
            try:
                value = inner.value()
            except Exception as error:
                self._fail(error)
            else:
                self._link.at(end_ns, lambda: self._succeed(value))

        self._inner.get_future().add_done_callback(inner_done)

    def follow_in_order(self, outputs: Any, end_ns: int) -> None:
        """As `follow_future`, for a collective without a future: a thread waits for each in turn.

        Every rank issues collectives in the same order, so none waits behind a later one.
        """
        self._link.one_by_one(lambda: self._wait_inner(outputs, lambda: end_ns))

    def follow_alone(self, tensors: Any, end_ns: Callable[[], int]) -> None:
        """As `follow_in_order`, with a thread of its own: a message may be received long after a
        later one. `end_ns` is called once gloo has finished.
        """
        threading.Thread(
            target=self._wait_inner, args=(tensors, end_ns), name="interlace-p2p", daemon=True
        ).start()

    def _wait_inner(self, value: Any, end_ns: Callable[[], int]) -> None:
        try:
            self._inner.wait()
        except Exception as error:
            self._fail(error)
        else:
            self._link.at(end_ns(), lambda: self._succeed(value))

    def _succeed(self, value: Any) -> None:
        self._done.set()
        self._future.set_result(value)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()
        self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until complete; 0 waits as long as gloo's own timeout. Raises gloo's error."""
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"the operation did not finish within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """The error that it ended with."""
        return self._error

    def get_future(self) -> Future[Any]:
        """Completes, and calls its callbacks, when this work does."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        """The output tensors; blocks until complete."""
        self.wait()
        return self._future.value()

    def synchronize(self) -> None:
        """Same as `wait`: CPU tensors have no streams."""
        self.wait()

    def source_rank(self) -> int:
        """Group rank that a receive from any source heard from."""
        return self._inner._source_rank()

    _source_rank = source_rank
