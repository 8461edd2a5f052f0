"""Time compute and collectives, alone and at the same time, on CPU and on CUDA."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import RunError
from interlace.graphs.collectives import Pending
from interlace.runtime.recorder import SETTLE_S, Clock

Start = Callable[[], Pending]
CALLS_OF_START = 8
"""Calls of an operator for which starting a collective counts, by the time that the host takes; a
choice."""
MOST_HELD = 500
"""Calls by which the host gets ahead of a device at most: more do not fit into a stream."""


@dataclass(frozen=True, slots=True)
class Round:
    """One timed round, in nanoseconds; 0 for what was not part of it."""

    compute_ns: int
    transfer_ns: int
    """From the first start to the last end."""
    pair_ns: int
    """Until both were over."""
    calls_beside: int = 0
    """Calls that ended while a transfer was under way, and the time that these took."""
    calls_beside_ns: int = 0
    transfer_beside_ns: int = 0
    """Time for which the transfers had compute beside them."""


def timed_round(
    clock: Clock, starts: Sequence[Start], call: Callable[[], Any], count: int
) -> Round:
    """Start the collectives, run `call` `count` times, wait for all. Ranks start together."""
    clock = clock.restarted()
    _meet(clock)
    clock.hold(min(CALLS_OF_START * len(starts) + count, MOST_HELD))
    over: list[Any] = []
    begin = clock.now()
    flying = [start() for start in starts]
    issued = clock.now()
    for pending in flying:
        clock.after(pending, over.append)
    called = []
    for _ in range(count):
        call()
        called.append(clock.now())
    for pending in flying:
        pending.work.wait()
    end = clock.now()
    _settle(clock, over, len(flying))
    at = clock.nanoseconds
    begin_ns, issued_ns, end_ns = at(begin), at(issued), at(end)
    called_ns = [at(stamp) for stamp in called]
    over_ns = max((at(stamp) for stamp in over), default=issued_ns)
    computed_ns = max(called_ns, default=issued_ns)
    beside = [time_ns for time_ns in called_ns if time_ns <= over_ns]
    return Round(
        compute_ns=computed_ns - issued_ns,
        transfer_ns=over_ns - begin_ns if starts else 0,
        pair_ns=max(end_ns, over_ns) - begin_ns,
        calls_beside=len(beside),
        calls_beside_ns=max(beside, default=issued_ns) - issued_ns,
        transfer_beside_ns=max(0, min(over_ns, computed_ns) - begin_ns) if starts else 0,
    )


def back_to_back_ns(clock: Clock, starts: Sequence[Start]) -> list[int]:
    """Times of these collectives, each started when the one before is over."""
    clock = clock.restarted()
    _meet(clock)
    clock.hold(min(CALLS_OF_START * len(starts), MOST_HELD))
    stamps = [clock.now()]
    for start in starts:
        start().work.wait()
        stamps.append(clock.now())
    times = [clock.nanoseconds(stamp) for stamp in stamps]
    return [end - begin for begin, end in pairwise(times)]


def started_beside_ns(clock: Clock, first: Start, second: Start, after_ns: float) -> int:
    """Time of a collective that starts `after_ns` behind the start of another."""
    clock = clock.restarted()
    _meet(clock)
    other = first()
    time.sleep(after_ns / 1e9)
    begin = clock.now()
    second().work.wait()
    end = clock.now()
    other.work.wait()
    return clock.nanoseconds(end) - clock.nanoseconds(begin)


def side_by_side_ns(clock: Clock, first: Callable[[], Any], second: Callable[[], Any]) -> int:
    """Time until both are over: in two threads on a CPU, on two streams on CUDA."""
    clock = clock.restarted()
    _meet(clock)
    if clock.device_type == "cuda":
        begin = clock.now()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            second()
        first()
        torch.cuda.current_stream().wait_stream(stream)
        return clock.nanoseconds(clock.now()) - clock.nanoseconds(begin)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # the thread exists before the clock starts
        begin = clock.now()
        other = thread.submit(torch.no_grad()(second))
        first()
        other.result()
        return clock.nanoseconds(clock.now()) - clock.nanoseconds(begin)


def _meet(clock: Clock) -> None:
    """All ranks of the clock begin a round within the time of a barrier, on CUDA with nothing left
    to do: the barrier may be one of the hosts only."""
    if clock.device_type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size(clock.group) > 1:
        dist.barrier(group=clock.group)


def _settle(clock: Clock, ends: Sequence[Any], count: int) -> None:
    """Wait for the callbacks of `count` works: one may still be about to run when the work's wait
    has returned. Raises RunError if one does not."""
    clock.settle()
    if len(ends) < count:
        raise RunError(
            f"{count - len(ends)} of {count} collectives did not report their end in "
            f"{SETTLE_S:g} s",
            hint="this backend cannot be profiled; gloo and NCCL can",
        )
