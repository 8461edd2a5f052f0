"""A slow link emulated in user space: real gloo collectives that finish as late as on that link.

    backend = emulated_backend(parse_rate("250mbit", "--link.rate"), latency_us=50.0)
    dist.init_process_group(backend=backend, ...)      # everything made from it is emulated too

Each process group is one link. An operation occupies its group's link for latency + wire bytes /
rate, in issue order, and completes when that time has passed *and* gloo has finished:

    end = max(gloo end, max(issue, link free) + latency + wire bytes / rate);   link free = end

A receive occupies the inbound side from the moment its data has arrived through gloo, because
only the sender knows when it was sent. A rank cannot see when its peers issued a collective, so
one that is early by d may finish up to d sooner than on a real link: the emulation is never
slower than the link that it stands for, apart from gloo's own time on the loopback interface.
"""

import heapq
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from interlace.errors import InputError

_CPU = torch.device("cpu")
# What torch 2.11 calls the operations that later versions renamed.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def emulated_backend(rate_bits: int, latency_us: float) -> str:
    """Name of a torch.distributed CPU backend with links of `rate_bits` bit/s, `latency_us` us.

    The first call for a pair registers it with torch, later calls return the same name.
    """
    describe(rate_bits, latency_us)
    name = f"emulated-{rate_bits}-{float(latency_us)}"
    if name not in dist.Backend.backend_list:

        def create(
            store: dist.Store, rank: int, size: int, timeout: timedelta
        ) -> "EmulatedProcessGroup":
            link = EmulatedLink(rate_bits=rate_bits, latency_us=latency_us)
            return EmulatedProcessGroup(
                store=store, rank=rank, size=size, timeout=timeout, link=link, name=name
            )

        dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


def describe(rate_bits: int, latency_us: float) -> str:
    """Label for reports, such as `emulated link 250 Mbit/s, 50 us`."""
    if not 0 < rate_bits < float("inf"):
        raise InputError(
            f"an emulated link of {rate_bits!r} bit/s carries nothing",
            hint="set link.rate to a positive rate such as 250mbit",
        )
    if not 0 <= latency_us < float("inf"):
        raise InputError(
            f"link.latency_us = {latency_us!r} is not a time",
            hint="set link.latency_us to 0 or more microseconds",
        )
    for unit, bits in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate_bits >= bits:
            return f"emulated link {rate_bits / bits:g} {unit}, {latency_us:g} us"
    return f"emulated link {rate_bits:g} bit/s, {latency_us:g} us"


class EmulatedLink:
    """Both directions of one link: when each is free, and a thread that fires at those times."""

    def __init__(self, *, rate_bits: int, latency_us: float) -> None:
        self._latency_ns = latency_us * 1e3
        self._ns_per_byte = 8e9 / rate_bits
        self._outbound_free_ns = 0
        self._inbound_free_ns = 0
        self._lock = threading.Lock()
        self._timer = _Timer()
        # The thread holds only the timer, so a link that nobody uses ends its thread.
        weakref.finalize(self, self._timer.stop)

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


class EmulatedWork(Work):
    """A gloo operation whose completion is held back until its time on the link is over."""

    def __init__(self, inner: Work, link: EmulatedLink) -> None:
        super().__init__()
        self._inner = inner
        self._link = link
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: Future[Any] = Future()

    def follow_collective(self, end_ns: int) -> None:
        """Complete at `end_ns`, or when the inner collective finishes if that is later."""

        def inner_done(inner: Future[Any]) -> None:
            # A failed future raises from value(); it fails this work without delay.
            try:
                value = inner.value()
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                self._fail(error)
            else:
                self._link.at(end_ns, lambda: self._succeed(value))

        self._inner.get_future().add_done_callback(inner_done)

    def follow_point_to_point(
        self, tensors: Sequence[torch.Tensor], end_ns: Callable[[], int]
    ) -> None:
        """Like `follow_collective`; `end_ns` is called once the inner operation has finished.

        gloo has no future for point-to-point operations, so one thread waits for each of them.
        """

        def wait_inner() -> None:
            try:
                self._inner.wait()
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                self._fail(error)
            else:
                self._link.at(end_ns(), lambda: self._succeed(list(tensors)))

        threading.Thread(target=wait_inner, name="interlace-p2p", daemon=True).start()

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


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(each) for each in tensors)


def _inner_method(group: dist.ProcessGroup, name: str) -> Callable[..., Work]:
    """The method of `group` called `name`, or what torch 2.11 calls it."""
    return getattr(group, name if hasattr(group, name) else _OLD_NAMES[name])


class EmulatedProcessGroup(dist.ProcessGroup):
    """A gloo process group behind one `EmulatedLink`.

    Wire bytes per rank are those of ring algorithms on n ranks: (n-1)/n of the full tensor for
    all-gather, reduce-scatter and all-to-all, twice that for all-reduce, all of it for broadcast,
    reduce and point-to-point, and the root's n-1 parts for gather and scatter.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        link: EmulatedLink,
        name: str,
    ) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._inner = dist.ProcessGroup(store, rank, size)
        # Registered on both: torch asks the outer group for its devices and its names.
        for group in (self._inner, self):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._link = link
        self._name = name
        self._others = size - 1
        self._share = (size - 1) / size

    def getBackendName(self) -> str:  # noqa: N802 - called by this name from C++
        return self._name

    def _collective(
        self, wire_bytes: float, start: Callable[..., Work], *args: Any, **kwargs: Any
    ) -> Work:
        end_ns = self._link.send(wire_bytes)
        work = EmulatedWork(start(*args, **kwargs), self._link)
        work.follow_collective(end_ns)
        return work

    # Options and split sizes go to gloo as torch passed them, by position or by name.

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        wire = 2 * self._share * _bytes(tensors)
        return self._collective(wire, self._inner.allreduce, tensors, *args, **kwargs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        wire = 2 * self._share * _bytes(tensors)
        return self._collective(wire, self._inner.allreduce_coalesced, tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        wire = self._others * _bytes(inputs)
        return self._collective(wire, self._inner.allgather, outputs, inputs, *args, **kwargs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        wire = self._others * _bytes(inputs)
        start = self._inner.allgather_coalesced
        return self._collective(wire, start, outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Any, input_: Any, *args: Any, **kwargs: Any) -> Work:
        wire = self._others * _bytes(input_)
        start = _inner_method(self._inner, "all_gather_single")
        return self._collective(wire, start, output, input_, *args, **kwargs)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Work:
        wire = self._others * _bytes(inputs)
        start = _inner_method(self._inner, "all_gather_single_coalesced")
        return self._collective(wire, start, outputs, inputs, *args, **kwargs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        wire = self._share * _bytes(inputs)
        return self._collective(wire, self._inner.reduce_scatter, outputs, inputs, *args, **kwargs)

    def reduce_scatter_single(self, output: Any, input_: Any, *args: Any, **kwargs: Any) -> Work:
        wire = self._share * _bytes(input_)
        start = _inner_method(self._inner, "reduce_scatter_single")
        return self._collective(wire, start, output, input_, *args, **kwargs)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Work:
        wire = self._share * _bytes(inputs)
        start = _inner_method(self._inner, "reduce_scatter_single_coalesced")
        return self._collective(wire, start, outputs, inputs, *args, **kwargs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> Work:
        # The busier direction of an uneven exchange bounds it.
        wire = max(self._leaving(output, output_splits), self._leaving(input_, input_splits))
        start = _inner_method(self._inner, "all_to_all_single")
        return self._collective(
            wire, start, output, input_, output_splits, input_splits, *args, **kwargs
        )

    def _leaving(self, tensor: torch.Tensor, splits: Sequence[int]) -> float:
        """Bytes of `tensor` that are not this rank's own part."""
        if not splits or not sum(splits):
            return self._share * _bytes(tensor)
        return _bytes(tensor) * (1 - splits[self.rank()] / sum(splits))

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        own = self.rank()
        wire = max(_bytes(each) - _bytes(each[own]) for each in (outputs, inputs))
        return self._collective(wire, self._inner.alltoall, outputs, inputs, *args, **kwargs)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        return self._collective(_bytes(tensors), self._inner.broadcast, tensors, *args, **kwargs)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        return self._collective(_bytes(tensors), self._inner.reduce, tensors, *args, **kwargs)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        wire = _bytes(inputs) * (self._others if outputs else 1)
        return self._collective(wire, self._inner.gather, outputs, inputs, *args, **kwargs)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        wire = _bytes(outputs) * (self._others if inputs else 1)
        return self._collective(wire, self._inner.scatter, outputs, inputs, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective(0, self._inner.barrier, *args, **kwargs)

    def send(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Work:
        end_ns = self._link.send(_bytes(tensors))
        work = EmulatedWork(self._inner.send(tensors, *args, **kwargs), self._link)
        work.follow_point_to_point(tensors, lambda: end_ns)
        return work

    def recv(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Work:
        return self._receive(self._inner.recv, tensors, *args, **kwargs)

    def recv_anysource(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Work:
        return self._receive(self._inner.recv_anysource, tensors, *args, **kwargs)

    def _receive(
        self, start: Callable[..., Work], tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Work:
        work = EmulatedWork(start(tensors, *args, **kwargs), self._link)
        work.follow_point_to_point(tensors, lambda: self._link.receive(_bytes(tensors)))
        return work

    # Names by which torch 2.11 calls the same operations.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
