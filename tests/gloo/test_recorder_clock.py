"""Proves, without a GPU, what recording on CUDA rests on: what a collective reads stays alive until
its own wait, and the ends of collectives of two groups do not delay each other.

Streams and works are pretended: a stream is a time up to which it is busy, a work has an end.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from interlace.graphs import collectives
from interlace.graphs.collectives import Pending, wait
from interlace.graphs.lower import Lowered
from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.measure import stopwatch
from interlace.runtime.recorder import Clock, CudaClock, HostClock, Recorder

pytestmark = pytest.mark.alone


class Stashing:
    """A work that keeps what it reads until the first wait on any stream, as NCCL's does."""

    def __init__(self, reads: Tensor) -> None:
        self._stash: Tensor | None = reads

    def wait(self) -> None:
        self._stash = None


class SideStreamClock(HostClock):
    """Stamps an end as `CudaClock` does: by waiting, although the compute stream has not."""

    def after(self, pending: Pending, sink: Callable[[int], None]) -> None:
        pending.work.wait()
        sink(self.now())


class InFlight:
    """Stands for torch's collectives; knows what is alive of what each of them reads."""

    def __init__(self) -> None:
        self.reads: list[Any] = []

    def start(self, output: Tensor, x: Tensor, *_: Any, **__: Any) -> Stashing:
        output.zero_()
        self.reads.append(weakref.ref(x))
        return Stashing(x)

    def alive(self) -> list[bool]:
        gc.collect()
        return [read() is not None for read in self.reads]


@pytest.fixture
def flight(monkeypatch: pytest.MonkeyPatch) -> InFlight:
    """Collectives as on NCCL."""
    found = InFlight()
    monkeypatch.setattr(collectives, "process_group", lambda name: name)
    monkeypatch.setattr(collectives, "on_gloo", lambda *_: False)
    names = ("all_gather_single", "all_gather_into_tensor", "all_to_all_single")
    for name in (*names, "reduce_scatter_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, found.start, raising=False)
    return found


def issue(kind: Kind, graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A node that starts the collective on two ranks."""
    call, rest = {
        Kind.ALL_GATHER: (collectives.all_gather, (2, "tp")),
        Kind.REDUCE_SCATTER: (collectives.reduce_scatter, ("sum", 2, "tp")),
        Kind.ALL_TO_ALL: (collectives.all_to_all, ([2, 2], [2, 2], "tp")),
    }[kind]
    return graph.call_function(call, (x, *rest))


def lowered(kind: Kind, *, strided: bool, seen: Callable[[], None]) -> tuple[Lowered, OpGraph]:
    """x = -batch; start the collective on x, or on a transposed x that has to be copied; compute
    something; look; wait; look. Nobody else reads x."""

    def look(x: Tensor) -> Tensor:
        seen()
        return x + 1

    graph = fx.Graph()
    batch = graph.placeholder("batch")
    x = graph.call_function(torch.ops.aten.neg.default, (batch,))
    sent = graph.call_function(torch.ops.aten.t.default, (x,)) if strided else x
    started = issue(kind, graph, sent)
    before = graph.call_function(look, (batch,))
    arrived = graph.call_function(wait, (started,))
    after = graph.call_function(look, (before,))
    graph.output((arrived, after))
    for node in graph.nodes:
        node.meta = {"strand": "forward", "name": node.name}
    started.meta["collective"] = kind
    op = Operator(started.name, kind, "c", "tp", (), (), "key", 8, 8, 0)
    module = fx.GraphModule(nn.Module(), graph)
    return Lowered(module, (), ()), OpGraph("forward", (op,), (), ())


@pytest.mark.parametrize("clock", [HostClock(), SideStreamClock()], ids=["host", "side stream"])
@pytest.mark.parametrize("strided", [False, True], ids=["as it is", "copied"])
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL])
def test_what_a_collective_reads_lives_until_its_own_wait(
    flight: InFlight,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    strided: bool,
    clock: Clock,
) -> None:
    """Also a contiguous copy that only the collective knows. After the wait it is gone."""
    monkeypatch.setattr(HostClock, "after", lambda *_: None)
    looks: list[list[bool]] = []
    graph, ops = lowered(kind, strided=strided, seen=lambda: looks.append(flight.alive()))
    Recorder({"forward": ops}, clock).run(graph, [torch.ones(4, 4)], {"forward": 1})
    assert looks == [[True], [False]]


class NotingClock(HostClock):
    """Writes down when it is asked."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def now(self) -> int:
        self.notes.append("stamp")
        return super().now()


def test_an_operator_ends_when_what_it_read_last_is_freed() -> None:
    """To give memory back takes the host time as well, and is no gap between operators."""
    notes: list[str] = []

    def make(x: Tensor) -> Tensor:
        made = x + 1
        weakref.finalize(made, notes.append, "freed")
        return made

    graph = fx.Graph()
    batch = graph.placeholder("batch")
    made = graph.call_function(make, (batch,))
    read = graph.call_function(torch.ops.aten.neg.default, (made,))
    graph.output((read,))
    for node in graph.nodes:
        node.meta = {"strand": "forward", "name": node.name}
    ops = [
        Operator(node.name, Kind.OTHER, node.name, COMPUTE_LANE, (), (), "key", 8, 8, 0)
        for node in (made, read)
    ]
    recorder = Recorder({"forward": OpGraph("forward", tuple(ops), (), ())}, NotingClock(notes))
    module = fx.GraphModule(nn.Module(), graph)
    recorder.run(Lowered(module, (), ()), [torch.ones(4)], {"forward": 1})
    assert notes == ["stamp", "stamp", "stamp", "freed", "stamp"]
    assert [span.name for span in recorder.timeline("step", 0).spans] == [made.name, read.name]


class SlowThread(threading.Thread):
    """The thread of a transport: it calls back, and lets go of the callback some time later."""

    def __init__(self) -> None:
        super().__init__()
        self.callback: Callable[[Any], None] | None = None

    def get_future(self) -> "SlowThread":
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callback = callback

    def run(self) -> None:
        assert self.callback is not None
        self.callback(None)
        time.sleep(0.2)
        self.callback = None


def test_a_settled_clock_has_no_callbacks_in_other_threads() -> None:
    """One that is let go of while the interpreter shuts down aborts the process."""
    clock, transport = HostClock(), SlowThread()
    stamps: list[int] = []
    clock.after(Pending(torch.ones(1), cast(dist.Work, transport), "tp"), stamps.append)
    transport.start()
    clock.settle()
    assert len(stamps) == 1
    assert transport.callback is None
    transport.join()


class FakeStream:
    """Busy until a time; streams of one pool come round after `POOL`."""

    current: "FakeStream"
    made: list["FakeStream"]
    POOL = 32

    def __init__(self, *_: Any, priority: int = 0) -> None:
        self.priority = priority
        self.busy_until = 0
        FakeStream.made.append(self)


class FakeEvent:
    """Takes the time of the current stream."""

    def __init__(self, **_: Any) -> None:
        self.at = -1

    def record(self) -> None:
        self.at = FakeStream.current.busy_until

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at - self.at) / 1e6


class EndingAt:
    """The current stream waits for its end."""

    def __init__(self, end_ns: int) -> None:
        self.end_ns = end_ns

    def wait(self) -> None:
        stream = FakeStream.current
        stream.busy_until = max(stream.busy_until, self.end_ns)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """torch.cuda's streams and events, in pretended time."""

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    FakeStream.made = []
    FakeStream.current = FakeStream()
    FakeStream.made.clear()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return FakeStream.made


def pending(group: str, end_ns: int) -> Pending:
    return Pending(torch.empty(0), EndingAt(end_ns), group)  # type: ignore[arg-type]


def test_a_short_collective_does_not_end_after_a_longer_one_of_another_group(
    streams: list[FakeStream],
) -> None:
    """Of one group they do follow each other."""
    clock, stamps = CudaClock(), []
    for group, end_ns in (("dp_shard", 9_000), ("tp", 1_000), ("tp", 2_000), ("dp_shard", 9_500)):
        clock.after(pending(group, end_ns), stamps.append)
    assert [clock.nanoseconds(stamp) for stamp in stamps] == [9_000, 1_000, 2_000, 9_500]
    assert FakeStream.current.busy_until == 0  # the compute stream was not made to wait


def test_streams_that_stamp_are_kept_and_are_not_of_the_pools_that_nccl_takes_from(
    streams: list[FakeStream],
) -> None:
    """NCCL's have priority 0, or on request the highest, which torch maps to -3."""
    clock: CudaClock = CudaClock()
    for _ in range(2 * FakeStream.POOL):
        clock = clock.restarted()
        for group in ("tp", "dp_shard"):
            clock.after(pending(group, 5), lambda _: None)
    assert len(streams) == 2
    assert not {stream.priority for stream in streams} & {0, -3}


def test_rounds_of_a_measurement_share_their_streams(streams: list[FakeStream]) -> None:
    clock = CudaClock()
    for _ in range(5):
        start = FakeStream.current.busy_until
        sent = [partial(pending, "tp", start + 700)]
        assert stopwatch.timed_round(clock, sent, lambda: None, 0).transfer_ns == 700
        assert stopwatch.back_to_back_ns(clock, [partial(pending, "tp", start + 900)]) == [200]
    assert len(streams) == 1
