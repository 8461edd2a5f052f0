"""Recorder: runs a lowered graph operator by operator and notes when each part began and ended.

The plain path (`Lowered.module`) is not touched: recording costs nothing when it is off. When
it is on, an interpreter walks the same graph in the same order, which adds about 3 us of Python
per operator; collectives are timed by a callback on their work object, so their real end is
known even if the rank was computing then. On CUDA all stamps are events on the streams.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import fx

from interlace.graphs.collectives import Pending, wait
from interlace.graphs.lower import Lowered
from interlace.graphs.torch_private import occupy_device
from interlace.ir.actions import shown, strand
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.timeline import WAIT, Span, Timeline

SETTLE_S = 5.0
"""Seconds in which collectives that have been waited for must report their ends; a choice: long for
a callback that is about to run."""
_SETTLE_TICK_S = 0.0005
"""Seconds between two looks at whether they have; a choice."""
ISSUE_NS = 150_000
"""Time, in ns, that recorded calls, collectives among them, take the host at most where it is to
get ahead of a device; a choice: 50 to 70 us for an operator were seen beside an H200."""
_HELD_CALLS = 200
"""Calls after which the device is held again: a stream takes about 1,000 entries before the host
must wait, and a recorded call makes three or four."""


class Clock(Protocol):
    """Takes stamps cheaply and turns them into nanoseconds afterwards."""

    device_type: ClassVar[str]
    group: dist.ProcessGroup | None
    """The ranks that measure together; None for all of the job."""

    def now(self) -> Any:
        """A stamp."""
        ...

    def restarted(self) -> "Clock":
        """This clock, counting from now; it keeps what it has set up."""
        ...

    def after(self, pending: Pending, sink: Callable[[Any], None]) -> None:
        """Give `sink` a stamp of the collective's end, now or later."""
        ...

    def settle(self) -> None:
        """Wait until no `sink` will be called any more, for `SETTLE_S` at most. Call it when all
        collectives have been waited for."""
        ...

    def hold(self, calls: int) -> None:
        """Before so many calls are timed: let the host get ahead of the device, if this clock is
        for steps in which the device never waits for the host."""
        ...

    def rejoin(self) -> None:
        """Make the current stream wait for all that stamps; the end of a capture needs it."""
        ...

    def nanoseconds(self, stamp: Any) -> int:
        """Nanoseconds of a stamp since an arbitrary origin; may synchronise."""
        ...


class _EndStamp:
    """What the transport's thread calls when a collective is over."""

    __slots__ = ("__weakref__", "_sink")

    def __init__(self, sink: Callable[[int], None]) -> None:
        self._sink = sink

    def __call__(self, _future: object) -> None:
        self._sink(time.perf_counter_ns())


class HostClock:
    """CPU: operators block, so host time is operator time."""

    device_type: ClassVar[str] = "cpu"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._stamps: list[weakref.ref[_EndStamp]] = []

    def now(self) -> int:
        """Nanoseconds."""
        return time.perf_counter_ns()

    def restarted(self) -> "HostClock":
        """A new one; nanoseconds of the host are exact at any size."""
        return HostClock(self.group)

    def after(self, pending: Pending, sink: Callable[[int], None]) -> None:
        """The work's future calls back from the transport's thread when it is done."""
        stamp = _EndStamp(sink)
        self._stamps.append(weakref.ref(stamp))
        pending.work.get_future().add_done_callback(stamp)

    def settle(self) -> None:
        """Wait until the transport's thread has let go of every callback.

        To let go it takes the interpreter's lock a second time, after the call. A thread that does
        so when the interpreter is shutting down is ended by it inside a C++ destructor, and that
        aborts the process: "terminate called without an active exception".
        """
        deadline = time.monotonic() + SETTLE_S
        while any(stamp() is not None for stamp in self._stamps):
            if time.monotonic() > deadline:
                return
            time.sleep(_SETTLE_TICK_S)

    def hold(self, calls: int) -> None:
        """Nothing: the host is the device."""

    def rejoin(self) -> None:
        """Nothing: there is no stream."""

    def nanoseconds(self, stamp: int) -> int:
        """The stamp itself."""
        return stamp


class CudaClock:
    """CUDA: events on the current stream; the end of a collective is an event on a stream that
    stamps the collectives of its process group only.

    A stream does one thing after the other, as NCCL does with the collectives of one group. With
    one stream for all groups a short collective would seem to end after an earlier, longer one of
    another group. Streams are handed out from pools, one per priority, and the next in turn may be
    one that is in use; NCCL's come from those of its priorities, 0 or the highest. Stamps can be
    captured (external events): each replay of a CUDA graph makes them anew.
    """

    device_type: ClassVar[str] = "cuda"
    PRIORITY = -2
    """Priority of the streams that stamp: neither 0 nor the highest, whose pools NCCL's streams are
    from."""

    def __init__(
        self,
        streams: dict[str, torch.cuda.Stream] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """`streams` are those that stamp, by process group; missing ones are added. With `ahead`
        times are those of a device that never waits for the host."""
        self.group = group
        self._streams = {} if streams is None else streams
        self._stamped: set[str] = set()
        self._taken: list[torch.cuda.Event] = []
        self._ahead = ahead
        self.origin = self.now()

    def now(self) -> torch.cuda.Event:
        """An event on the current stream. It lives as long as the clock: a capture must not lose
        an event before it ends."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._taken.append(event)
        return event

    def restarted(self) -> "CudaClock":
        """A clock with the same streams. The time between two events is a float32 of milliseconds,
        which after 10 s counts in microseconds."""
        return CudaClock(self._streams, self.group, ahead=self._ahead)

    def after(self, pending: Pending, sink: Callable[[torch.cuda.Event], None]) -> None:
        """An event on a side stream that waits for the collective."""
        if pending.group not in self._streams:
            self._streams[pending.group] = torch.cuda.Stream(priority=self.PRIORITY)
        self._stamped.add(pending.group)
        with torch.cuda.stream(self._streams[pending.group]):
            pending.work.wait()
            sink(self.now())

    def settle(self) -> None:
        """Nothing is left to wait for: every stamp was given at once."""

    def hold(self, calls: int) -> None:
        """The device does nothing for the time in which the host issues so many calls."""
        if self._ahead:
            occupy_device(calls * ISSUE_NS)

    def rejoin(self) -> None:
        """The current stream waits for the streams that stamped since this clock was started."""
        for name in self._stamped:
            torch.cuda.current_stream().wait_stream(self._streams[name])

    def nanoseconds(self, stamp: torch.cuda.Event) -> int:
        """Time since this clock was made."""
        stamp.synchronize()
        return int(self.origin.elapsed_time(stamp) * 1e6)


def clock_for(
    device_type: str, group: dist.ProcessGroup | None = None, *, ahead: bool = False
) -> Clock:
    """The clock of a device type, for the ranks of a group; `ahead` as of `CudaClock`."""
    return CudaClock(group=group, ahead=ahead) if device_type == "cuda" else HostClock(group)


@dataclass
class _Event:
    name: str
    strand: str
    micro_batch: int
    start: Any
    end: Any = None
    done: Any = None
    is_wait: bool = False
    is_collective: bool = False


@dataclass
class Recorder:
    """Collects events over any number of lowered graphs, then makes one Timeline."""

    graphs: Mapping[str, OpGraph]
    """OpGraph by strand name: kinds, lanes and bytes of the operators."""
    clock: Clock
    events: list[_Event] = field(default_factory=list)
    _calls: int = 0

    def run(self, lowered: Lowered, inputs: list[Any], micro_batch: Mapping[str, int]) -> Any:
        """Execute `lowered` like `lowered.module(inputs)` and record it. `micro_batch` gives the
        1-based micro-batch of each strand; what runs ahead is recorded under its own strand."""
        values: dict[fx.Node, Any] = {}
        supplied = iter(inputs)
        last_use = _last_uses(lowered.module.graph)
        for node in lowered.module.graph.find_nodes(op="placeholder"):
            values[node] = next(supplied)
        inputs.clear()
        for node in lowered.module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            values[node], event = self._step(node, values, lowered.module, micro_batch)
            for dead in last_use.get(node, ()):
                del values[dead]
            if event is not None:
                self._end(event, values.get(node))
        raise AssertionError("a graph has an output")

    def _step(
        self, node: fx.Node, values: dict[fx.Node, Any], root: Any, micro_batch: Mapping[str, int]
    ) -> tuple[Any, _Event | None]:
        """The node's value, and its event, which is to end when what was read last is freed: to
        give memory back takes the host time, as the operator itself does."""
        if node.op == "get_attr":
            return getattr(root, str(node.target)), None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if self._calls % _HELD_CALLS == 0:
            self.clock.hold(_HELD_CALLS)
        self._calls += 1
        part = node.meta["strand"]
        graph = strand(part).graph
        event = _Event(node.meta["name"], graph, micro_batch.get(part, 0), self.clock.now())
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        event.is_wait = node.target is wait
        event.is_collective = "collective" in node.meta and not event.is_wait
        if event.is_wait:
            event.name = node.all_input_nodes[0].meta["name"]
        elif not event.is_collective and event.name not in self.graphs[graph].by_id:
            return result, None
        self.events.append(event)
        return result, event

    def _end(self, event: _Event, result: Any) -> None:
        """Stamp the end of what the host did for an operator; for a collective that is its start,
        and its end is stamped when it comes."""
        event.end = self.clock.now()
        if event.is_collective:
            self.clock.after(result, lambda stamp: setattr(event, "done", stamp))

    def timeline(self, label: str, rank: int, *, own_names: bool = False) -> Timeline:
        """Everything recorded so far, from time 0. Call after the last wait. Strands are called by
        their pass, or with `own_names` as in `graphs`."""
        self.clock.settle()
        ns = self.clock.nanoseconds
        origin = min((ns(event.start) for event in self.events), default=0)
        spans: list[Span] = []
        lane_free: dict[str, int] = {}
        for event in self.events:
            begin, end = ns(event.start) - origin, ns(event.end) - origin
            name = event.strand if own_names else shown(event.strand)
            common = {"strand": name, "micro_batch": event.micro_batch}
            if event.is_wait:  # perhaps for a collective that another strand has started
                spans.append(Span(event.name, WAIT, COMPUTE_LANE, begin, end, **common))
                continue
            op = self.graphs[event.strand].by_id[event.name]
            if not event.is_collective:
                spans.append(Span(event.name, op.kind, COMPUTE_LANE, begin, end, **common))
            else:
                spans.append(Span(event.name, op.kind, COMPUTE_LANE, begin, end, **common))
                done = ns(event.done) - origin if event.done is not None else end
                start = min(max(begin, lane_free.get(op.lane, 0)), done)
                lane_free[op.lane] = max(done, lane_free.get(op.lane, 0))
                spans.append(
                    Span(
                        event.name,
                        op.kind,
                        op.lane,
                        start,
                        done,
                        issue_ns=begin,
                        bytes=max(op.bytes_in, op.bytes_out),
                        end_known=event.done is not None,
                        **common,
                    )
                )
        return Timeline(label, rank, tuple(spans))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node: the values that nobody needs after it."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        for source in (*node.all_input_nodes, node):
            if source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source)
    return found
