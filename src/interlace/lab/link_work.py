"""One emulated link, and the works that complete when the link is done with them."""

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

_JOIN_S = 1.0
"""Seconds to wait for all transfers under way when a link is closed; a choice."""


class EmulatedLink:
    """When each direction of one link is free, and the threads that wait for those times."""

    def __init__(self, *, rate_bits: int, latency_us: float) -> None:
        self._latency_ns = latency_us * 1e3
        self._ns_per_byte = 8e9 / rate_bits
        self._outbound_free_ns = 0
        self._inbound_free_ns = 0
        self._lock = threading.Lock()
        self.threads = _Threads()
        # Idle threads do not hold the link, so one that nobody uses ends its threads. The same
        # happens at exit: a thread that Python cuts off inside torch would abort the process.
        weakref.finalize(self, self.threads.stop)

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

    def _end_ns(self, start_ns: int, wire_bytes: float) -> int:
        return start_ns + round(self._latency_ns + wire_bytes * self._ns_per_byte)


class _Threads:
    """Daemon threads of one link: one that takes actions in turn, and one per lone action."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._live: set[threading.Thread] = set()
        self._has_worker = False

    def in_turn(self, action: Callable[[], None]) -> None:
        """Run `action` after those given before; only one thread may call this."""
        self._queue.put(action)
        if not self._has_worker:
            self._has_worker = True
            self.alone(self._work)

    def alone(self, action: Callable[[], None]) -> None:
        """Run `action` in a thread of its own."""
        thread = threading.Thread(
            target=self._run, args=(action,), name="interlace-link", daemon=True
        )
        self._live.add(thread)
        thread.start()

    def stop(self) -> None:
        """End the threads; one that gloo does not let go is left after a second."""
        self._queue.put(None)
        deadline = time.monotonic() + _JOIN_S
        for thread in self._live.copy() - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, action: Callable[[], None]) -> None:
        action()
        self._live.discard(threading.current_thread())

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            action()
            del action  # it holds the link, whose end ends this thread


class EmulatedWork(dist.Work):
    """A gloo operation whose completion is held back until its time on the link is over.

    `outputs` is the value of its future.
    """

    def __init__(self, inner: dist.Work, link: EmulatedLink, outputs: list[Any]) -> None:
        super().__init__()
        self._inner = inner
        self._link = link
        self._outputs = outputs
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: Future[Any] = Future()

    def follow_in_turn(self, end_ns: int) -> None:
        """Complete at `end_ns`, or when gloo does if that is later, after all earlier works.

        For collectives: every rank issues them in the same order, so none waits for a later one.
        """
        self._link.threads.in_turn(lambda: self._follow(lambda: end_ns))

    def follow_alone(self, end_ns: Callable[[], int]) -> None:
        """Complete at the time that `end_ns` returns once gloo has finished, in any order.

        For messages: one may be received long after another that was sent later.
        """
        self._link.threads.alone(lambda: self._follow(end_ns))

    def _follow(self, end_ns: Callable[[], int]) -> None:
        # Not by gloo's futures: its messages and reduce-scatters have none.
        try:
            self._inner.wait()
        except Exception as error:
            self._error = error
            self._done.set()
            self._future.set_exception(error)
            return
        time.sleep(max(0, end_ns() - time.monotonic_ns()) / 1e9)
        self._done.set()
        self._future.set_result(self._outputs)

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
        return self._outputs

    def synchronize(self) -> None:
        """Same as `wait`: CPU tensors have no streams."""
        self.wait()

    def source_rank(self) -> int:
        """Group rank that a receive from any source heard from."""
        return self._inner._source_rank()

    _source_rank = source_rank
