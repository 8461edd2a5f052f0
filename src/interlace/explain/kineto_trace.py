"""From the events of a Kineto file to what one rank did.

On a GPU, compute and communication are kernels on streams, and belong to the step in which the host
launched them. On a CPU, compute is the time in which a thread is inside an operator and not inside
one that starts or awaits communication. Communication is gloo's annotations, each from its call on.
What Python takes between operators is neither.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from interlace.errors import InputError
from interlace.explain.kineto_collectives import (
    gloo_bytes,
    group_of,
    kernel_bytes,
    kernel_kind,
    kind_of,
)
from interlace.explain.kineto_events import (
    COMMUNICATION_KERNEL,
    GLOO,
    GpuKernel,
    HostOperator,
    KinetoEvents,
    read_kineto,
)
from interlace.explain.rank_trace import Communicated, Computed, RankTrace
from interlace.explain.step_choice import ChosenSteps, StepChoice, choose_steps
from interlace.explain.step_parts import HostTimes, placed
from interlace.ir import interval_sets as sets


def rank_trace(path: Path, choice: StepChoice, index: int = 0) -> RankTrace:
    """Read one file. The rank is the one that the file names, or that its name ends with, or else
    `index`. Raises InputError for what is no trace or cannot be explained."""
    events = read_kineto(path)
    if events.first_ns < 0:
        raise InputError(
            f"{path} has {events.seen:,} events and none with a duration",
            hint="give a trace that torch.profiler wrote with export_chrome_trace",
        )
    chosen = choose_steps(events.marks, events.first_ns, choice, str(path))
    if events.kernels:
        device = "GPU"
        computed, communicated = _of_kernels(events)
    elif events.nccl_calls:
        raise InputError(
            f"{path} has {events.nccl_calls:,} calls of NCCL and no kernels of a GPU",
            hint="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    else:
        device = "CPU"
        computed, communicated = _of_operators(events)
    times = HostTimes(events.backwards, sorted(events.optimizers))
    by_start = choice.between_ms is not None
    placed_both = placed(computed, communicated, chosen, times, by_start=by_start)
    return RankTrace(
        rank=_rank(events, index),
        source=str(path),
        device=device,
        steps=chosen.steps,
        computed=placed_both[0],
        communicated=placed_both[1],
        left_out=_left_out(chosen, events),
    )


def _of_kernels(events: KinetoEvents) -> tuple[list[Computed], list[Communicated]]:
    """Kernels whose launch the trace has. The others are left out, as in HolisticTraceAnalysis,
    because nothing says to which step they belong."""
    computed: list[Computed] = []
    communicated: list[Communicated] = []
    for kernel in events.kernels:
        launch = events.launches.get(kernel.correlation)
        if launch is None:
            continue
        if COMMUNICATION_KERNEL.match(kernel.name):
            communicated.append(_communicated(kernel, launch[0], events))
        else:
            computed.append(Computed(kernel.name, kernel.start_ns, kernel.end_ns, launch[0]))
    return computed, communicated


def _communicated(kernel: GpuKernel, launched_ns: int, events: KinetoEvents) -> Communicated:
    group = group_of(kernel.args, events.header)
    return Communicated(
        kind=kernel_kind(kernel.name, kernel.args),
        group=group.name,
        ranks=group.ranks,
        group_size=group.size,
        bytes=kernel_bytes(kernel.args),
        lane=f"stream {kernel.stream}",
        start_ns=kernel.start_ns,
        end_ns=kernel.end_ns,
        launched_ns=launched_ns,
    )


def _of_operators(events: KinetoEvents) -> tuple[list[Computed], list[Communicated]]:
    """Operators of the threads that run no collective, without those inside of others."""
    links = {each.thread for each in events.gloo}
    by_thread: dict[str, list[HostOperator]] = {}
    for operator in events.operators:
        if operator.thread not in links:
            by_thread.setdefault(operator.thread, []).append(operator)
    computed: list[Computed] = []
    calls: list[HostOperator] = []
    for operators in by_thread.values():
        starting = [each for each in operators if each.communicates]
        calls += starting
        talking = sets.union((each.start_ns, each.end_ns) for each in starting)
        for operator in _outermost(operators):
            own = sets.without([(operator.start_ns, operator.end_ns)], talking)
            computed += [Computed(operator.name, a, b, a) for a, b in own]
    issued = _issued(events.gloo, calls)
    begun = _begun(events.gloo, issued)
    return computed, [
        _of_gloo(each, events, at, start)
        for each, at, start in zip(events.gloo, issued, begun, strict=True)
    ]


def _outermost(operators: Sequence[HostOperator]) -> Iterable[HostOperator]:
    """Operators of one thread that are inside no other."""
    reach = -1
    for operator in sorted(operators, key=lambda each: (each.start_ns, -each.end_ns)):
        if operator.start_ns >= reach:
            reach = operator.end_ns
            yield operator


def _issued(gloo: Sequence[HostOperator], calls: Sequence[HostOperator]) -> list[int]:
    """When each of gloo's collectives was asked for: the n-th of a kind by the n-th call of that
    kind, where there are as many of both; else its own start."""
    found = [each.start_ns for each in gloo]
    by_kind: dict[str, list[int]] = {}
    for call in calls:
        if call.name.startswith("c10d::"):
            by_kind.setdefault(kind_of(call.name.removeprefix("c10d::")), []).append(call.start_ns)
    for kind, starts in by_kind.items():
        own = [i for i, each in enumerate(gloo) if kind_of(each.name) == kind]
        if len(own) == len(starts):
            own.sort(key=lambda i: gloo[i].start_ns)
            for i, start in zip(own, sorted(starts), strict=True):
                found[i] = min(found[i], start)
    return found


def _begun(gloo: Sequence[HostOperator], issued: Sequence[int]) -> list[int]:
    """When each was under way: from its call on, or when the one before it on its thread ended. The
    annotation begins later, when that thread gets a core."""
    found = [each.start_ns for each in gloo]
    reach: dict[str, int] = {}
    for i in sorted(range(len(gloo)), key=lambda i: (issued[i], gloo[i].start_ns)):
        found[i] = min(found[i], max(issued[i], reach.get(gloo[i].thread, 0)))
        reach[gloo[i].thread] = max(reach.get(gloo[i].thread, 0), gloo[i].end_ns)
    return found


def _of_gloo(
    call: HostOperator, events: KinetoEvents, issued_ns: int, start_ns: int
) -> Communicated:
    group = group_of(call.args, events.header)
    return Communicated(
        kind=kind_of(call.name.removeprefix(GLOO)),
        group=group.name,
        ranks=group.ranks,
        group_size=group.size,
        bytes=gloo_bytes(call.args),
        lane=f"gloo {call.thread}",
        start_ns=start_ns,
        end_ns=call.end_ns,
        launched_ns=issued_ns,
    )


def _rank(events: KinetoEvents, index: int) -> int:
    information = events.header.get("distributedInfo")
    rank = information.get("rank") if isinstance(information, dict) else None
    if isinstance(rank, int):
        return rank
    named = re.search(r"rank[-_]?(\d+)", events.path.name)
    return int(named[1]) if named else index


def _left_out(chosen: ChosenSteps, events: KinetoEvents) -> str:
    without_launch = sum(each.correlation not in events.launches for each in events.kernels)
    sentences = [chosen.left_out] if chosen.left_out else []
    if without_launch:
        sentences.append(f"{without_launch:,} kernels whose launch the trace does not have")
    if events.kernels and events.gloo:
        sentences.append(f"{len(events.gloo):,} collectives of gloo, which run on the host")
    return "; ".join(sentences)


def sorted_by_rank(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """In order of ranks. Raises InputError if two files are of one rank."""
    ordered = sorted(traces, key=lambda trace: trace.rank)
    for first, second in pairwise(ordered):
        if first.rank == second.rank:
            raise InputError(
                f"{first.source} and {second.source} are both of rank {first.rank}",
                hint="give one file for each rank, of one profile",
            )
    return ordered
