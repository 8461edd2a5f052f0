"""Measure two things at the same time, and each of them alone, in turns.

Collective: every rank calls the same function with the same operators; how often things are
repeated follows from times that ranks have averaged. Alone and together alternate, so that a
machine that gets slower changes all of them alike.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean, median
from typing import Any

import torch

from interlace.ir.costs import (
    PairCost,
    Together,
    compute_factor,
    overlap_effectiveness,
    transfer_factor,
)
from interlace.measure.operands import CollectiveCall, ComputeCall
from interlace.measure.stopwatch import (
    back_to_back_ns,
    side_by_side_ns,
    started_beside_ns,
    timed_round,
)
from interlace.ranks.small_collectives import largest, mean
from interlace.runtime.recorder import Clock

COVER = 1.5
"""How many times longer than its transfer alone the compute of a pair lasts, so that it covers the
transfer even if compute slows that down; a choice."""
SHORTEST_NS = 2e6
"""Least time, in ns, for which compute runs beside compute: a choice, long beside the time that a
thread takes to start."""
MOST_CALLS, MOST_TRANSFERS = 5_000, 200
"""Most calls of an operator, and most transfers of a collective, in one round; a choice that bounds
how long a round takes where one call or transfer is very short."""
MOST_BYTES = 128 * 2**20
"""Most bytes that all transfers of a round hold together; a choice that bounds memory."""
FEWEST_ROUNDS, MOST_ROUNDS = 5, 50
"""Bounds on the rounds of one measurement; a choice: noise is told from the least of a few rounds,
and more than 50 would only cost time."""


def _rounds(round_ns: float, budget_ns: float) -> int:
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget_ns / max(round_ns, 1))))


def _quiet(
    clock: Clock, rounds: Sequence[Mapping[str, float]], *, fastest: Collection[str] = ()
) -> dict[str, int]:
    """Smallest of each field over all rounds, since what else runs can only add time.

    Of a round the mean over ranks counts, and for fields in `fastest`, times of transfers, the
    fastest rank: the others also saw their own waiting.
    """
    found = {}
    for name in rounds[0]:
        own = {str(index): each[name] for index, each in enumerate(rounds)}
        of_ranks = (
            largest(own, smallest=own, group=clock.group)
            if name in fastest
            else mean(own, clock.group)
        )
        found[name] = min(of_ranks.values())
    return found


@torch.no_grad()
def time_transfer(clock: Clock, collective: CollectiveCall, *, budget_ns: float) -> int:
    """Median time of one collective, one right after the other; the fastest rank's."""

    def times(count: int) -> list[int]:
        return back_to_back_ns(clock, collective.starts(count))

    estimate_ns = _transfer_ns(clock, collective)
    most = min(MOST_TRANSFERS, MOST_BYTES // max(collective.x.nbytes, 1))
    count = max(1, min(most, int(budget_ns / FEWEST_ROUNDS / estimate_ns)))
    samples = [time_ns for _ in range(FEWEST_ROUNDS) for time_ns in times(count)]
    return largest({"ns": median(samples)}, smallest={"ns"}, group=clock.group)["ns"]


@torch.no_grad()
def copy_ns(clock: Clock, device: torch.device, size: int) -> int:
    """Time to copy so many bytes within the memory of the device; the fastest of all ranks."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stamps = [clock.now()]
    for _ in range(FEWEST_ROUNDS):
        target.copy_(source)
        stamps.append(clock.now())
    times = [clock.nanoseconds(stamp) for stamp in stamps]
    fastest = min(end - begin for begin, end in pairwise(times))
    return largest({"ns": max(1, fastest)}, smallest={"ns"}, group=clock.group)["ns"]


@torch.no_grad()
def in_a_row_ns(clock: Clock, collective: CollectiveCall) -> int:
    """Time of a transfer right behind others like it, when what a shaped link's bucket, or a buffer
    on the way, takes at once is used up; the fastest rank's."""
    samples = []
    for _ in range(FEWEST_ROUNDS):
        _, *later = back_to_back_ns(clock, collective.starts(4))
        samples.append({"ns": median(later)})
    return _quiet(clock, samples, fastest=("ns",))["ns"]


@torch.no_grad()
def quickest_ns(clock: Clock, collective: CollectiveCall) -> int:
    """The shortest time of a few in a row, on the fastest rank: without waiting for any rank."""
    times = back_to_back_ns(clock, collective.starts(FEWEST_ROUNDS))
    return largest({"ns": min(times)}, smallest={"ns"}, group=clock.group)["ns"]


@torch.no_grad()
def beside_ns(clock: Clock, other: CollectiveCall, collective: CollectiveCall) -> int:
    """Mean time of a collective that starts while another, of another lane, is under way, at
    moments spread evenly over that; the fastest rank's. On one link its messages stand behind what
    is queued already: little at the other's start, most soon after it."""
    other_ns = _transfer_ns(clock, other)
    samples = [
        started_beside_ns(
            clock, other.starts(1)[0], collective.starts(1)[0], number / FEWEST_ROUNDS * other_ns
        )
        for number in range(FEWEST_ROUNDS)
    ]
    return largest({"ns": fmean(samples)}, smallest={"ns"}, group=clock.group)["ns"]


@torch.no_grad()
def measure_pair(
    clock: Clock, compute: ComputeCall, collective: CollectiveCall, *, budget_ns: float
) -> PairCost:
    """Run the collective beside as many calls of the operator as cover it, two at least.

    A collective that is shorter than a call runs on more data. Otherwise its effect on the call,
    and that of the call on it, would be lost in the call's own variation.
    """
    call_ns = _call_ns(clock, compute)
    collective, transfer_ns = _lengthened(clock, collective, call_ns)
    calls = max(2, min(MOST_CALLS, ceil(COVER * transfer_ns / call_ns)))
    samples = []
    for _ in range(_rounds(2 * (calls * call_ns + transfer_ns), budget_ns)):
        only = timed_round(clock, [], compute, calls)
        sent = timed_round(clock, collective.starts(1), _nothing, 0)
        both = timed_round(clock, collective.starts(1), compute, calls)
        samples.append(
            {
                "compute_ns": only.compute_ns,
                "transfer_ns": sent.transfer_ns,
                "pair_ns": both.pair_ns,
                "beside_ns": both.transfer_ns,
                "overlapped_ns": both.transfer_beside_ns,
                "call_ns": both.calls_beside_ns / max(both.calls_beside, 1),
            }
        )
    times = _quiet(clock, samples, fastest=("transfer_ns", "beside_ns", "overlapped_ns"))
    alone = times["compute_ns"], times["transfer_ns"]
    return PairCost(
        compute.op.kind,
        collective.op.kind,
        collective.op.lane,
        compute_factor=round(compute_factor(alone[0] / calls, times["call_ns"]), 4),
        transfer_factor=round(
            transfer_factor(alone[1], times["beside_ns"], times["overlapped_ns"]), 4
        ),
        oef=round(overlap_effectiveness(*alone, times["pair_ns"]), 4),
        compute_ns=alone[0],
        transfer_ns=alone[1],
        pair_ns=times["pair_ns"],
    )


def _lengthened(
    clock: Clock, collective: CollectiveCall, least_ns: int
) -> tuple[CollectiveCall, int]:
    """The collective on enough data to last `least_ns`, as far as memory allows, and its time."""
    transfer_ns = _transfer_ns(clock, collective)
    while transfer_ns < least_ns and 4 * collective.full_bytes <= MOST_BYTES:
        collective = collective.resized(4 * collective.full_bytes)
        transfer_ns = _transfer_ns(clock, collective)
    return collective, transfer_ns


def _transfer_ns(clock: Clock, collective: CollectiveCall) -> int:
    """A first estimate of a transfer's time."""
    times = back_to_back_ns(clock, collective.starts(4))
    return max(1, _quiet(clock, [{"ns": time_ns} for time_ns in times], fastest=("ns",))["ns"])


def _call_ns(clock: Clock, call: ComputeCall) -> int:
    """Time of a call among others of its like, whose data are then in the caches."""
    rounds = [timed_round(clock, [], call, 4).compute_ns / 4 for _ in range(3)]
    return max(1, _quiet(clock, [{"ns": each} for each in rounds])["ns"])


@torch.no_grad()
def measure_lanes(
    clock: Clock, first: CollectiveCall, second: CollectiveCall, *, budget_ns: float
) -> Together:
    """Collectives of two lanes at the same time; every rank starts them in this order."""

    def once(*calls: CollectiveCall) -> float:
        starts = [start for call in calls for start in call.starts(1)]
        return timed_round(clock, starts, _nothing, 0).transfer_ns

    round_ns = 3 * (_transfer_ns(clock, first) + _transfer_ns(clock, second))
    samples = [
        {"first_ns": once(first), "second_ns": once(second), "pair_ns": once(first, second)}
        for _ in range(_rounds(round_ns, budget_ns))
    ]
    return Together(first.op.lane, second.op.lane, **_quiet(clock, samples, fastest=samples[0]))


@torch.no_grad()
def measure_compute_pair(
    clock: Clock, first: ComputeCall, second: ComputeCall, *, budget_ns: float
) -> Together:
    """Compute beside compute; both are repeated to last equally long."""

    def alone(call: Callable[[], Any]) -> float:
        return timed_round(clock, [], call, 1).compute_ns

    single = [_call_ns(clock, call) for call in (first, second)]
    longest_ns = max(SHORTEST_NS, *single)
    runs = [
        _repeated(call, min(MOST_CALLS, round(longest_ns / time_ns)))
        for call, time_ns in zip((first, second), single, strict=True)
    ]
    samples = [
        {
            "first_ns": alone(runs[0]),
            "second_ns": alone(runs[1]),
            "pair_ns": side_by_side_ns(clock, *runs),
        }
        for _ in range(_rounds(4 * longest_ns, budget_ns))
    ]
    return Together(first.op.kind, second.op.kind, **_quiet(clock, samples))


def _repeated(call: ComputeCall, count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run


def _nothing() -> Any:
    """Compute of a round that only communicates."""
