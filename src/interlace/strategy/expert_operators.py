"""A layer of experts as operators: what is computed, and what ranks exchange around it.

Tokens are routed, ranks tell each other how many rows they will send, the host reads it, rows in
the order of experts go to their ranks, and results come back. A backward goes the same ways without
counts; what is computed again in one goes them with its rows. Ranks wait for the one with the
fullest expert, so that compute and exchanges are those of that rank. Rows that a capacity drops are
neither sent nor computed. With `overlap.decompose` a rank's experts are cut into groups, all of
whose rows are on their way before any come back. Another program gathers the rows of all ranks
whole, and sums results (`ExpertJob.gathered`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.hardware.step_job import StepJob
from interlace.ir.graph import Kind
from interlace.sim.decomposed import EXPERT_GROUPS, LEAST_GAIN, by_expert_ns
from interlace.strategy.job_links import COUNTS, EXPERT, TENSOR, JobLinks
from interlace.strategy.timed_graph import TimedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """Seconds and bytes of exchanges of a layer; 0 where a rank has all experts."""

    counts_s: float
    rows_s: float
    """One way."""
    rows_bytes: float
    """Of all groups."""
    shared: bool
    """Whether there is a feed-forward that every token meets."""
    ways: tuple[Kind, Kind] = (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL)
    """Of rows to their experts, and back."""
    groups: int = 1
    """Of a rank's experts: the rows of one are exchanged under another's matmuls. `rows_s` is that
    of one."""


def expert_times(job: StepJob, links: JobLinks, computed_s: float) -> ExpertTimes | None:
    """None for layers without experts. `computed_s` is what a forward computes between its
    exchanges, by which `overlap.decompose` chooses groups."""
    if (experts := job.experts) is None:
        return None
    size = 2.0 * job.tokens * experts.chosen * job.hidden * experts.fullest
    ways = (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL)
    if experts.gathered:
        size = 2.0 * job.tokens * job.hidden * experts.ranks
        ways = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)

    def rows_s(groups: int) -> float:
        if experts.gathered:
            return links.seconds(EXPERT, ways[0], size / groups)
        if not experts.sent_once:
            return links.seconds(EXPERT, Kind.ALL_TO_ALL, size / groups)
        part = links.seconds(EXPERT, Kind.ALL_TO_ALL, size / groups / job.tensor)
        return part + links.seconds(TENSOR, Kind.ALL_GATHER, size / groups)

    def seconds(groups: int) -> float:
        one = round(1e9 * computed_s / groups), round(1e9 * rows_s(groups))
        return by_expert_ns(*one, groups=groups) / 1e9

    variant, pieces, groups = links.layout.decompose, links.layout.pieces, 1
    if variant != "off" and job.experts.ranks > 1:
        tried = {min(each, experts.held) for each in ((pieces,) if pieces else EXPERT_GROUPS)}
        groups = min(tried, key=seconds)
        if variant == "auto" and seconds(groups) > seconds(1) * (1 - LEAST_GAIN):
            groups = 1
    return ExpertTimes(
        counts_s=links.seconds(COUNTS, Kind.ALL_TO_ALL, 8.0 * experts.count),
        rows_s=rows_s(groups),
        rows_bytes=size,
        ways=ways,
        shared=experts.shared > 0,
        groups=groups,
    )


def experts_there(
    graph: TimedGraph, times: ExpertTimes, seconds: Mapping[str, float], mark: str,
    given: tuple[str, str], *, again: bool,
) -> str:  # fmt: skip
    """A forward behind (values, weights of experts); `again` in a backward, where counts are
    known."""

    def add(name: str, kind: Kind, *sources: str) -> str:
        return graph.add(f"{name} {mark}", kind, seconds[name], sources)

    last, weights = given
    routed = add("router", Kind.ELEMENTWISE, last)
    if not again:
        routed = graph.add(
            f"counts {mark}", Kind.ALL_TO_ALL, times.counts_s, (routed,), lane=COUNTS
        )
        routed = add("counted", Kind.MEMORY, routed)
    steps = (("experts up", Kind.MATMUL), ("experts activation", Kind.ELEMENTWISE),
             ("experts down", Kind.MATMUL))  # fmt: skip
    source = add("sorted", Kind.MEMORY, routed)
    ways = (f"rows {mark}", f"experts results {mark}")
    made = _by_group(graph, times, seconds, steps, mark, ways, (source, weights))
    done = add("joined", Kind.MEMORY, made[-1])
    if times.shared:
        shared = add("shared up", Kind.MATMUL, last, done)
        shared = add("activation", Kind.ELEMENTWISE, shared)
        done = add("shared down", Kind.MATMUL, shared, done)
    return done


def experts_back(
    graph: TimedGraph, times: ExpertTimes, seconds: Mapping[str, float], mark: str,
    given: tuple[str, str, str],
) -> tuple[str, list[tuple[str, str]]]:  # fmt: skip
    """A backward behind (gradient, weights, weights of experts): its result, and which gradients of
    weights may be computed from when on."""

    def add(name: str, kind: Kind, *sources: str) -> str:
        return graph.add(f"{name}' {mark}", kind, seconds[f"{name}'"], sources)

    last, ready, weights = given
    late: list[tuple[str, str]] = []
    shared = last
    if times.shared:
        late.append(("shared down", last))
        shared = add("shared down", Kind.MATMUL, last, ready)
        shared = add("activation", Kind.ELEMENTWISE, shared)
        late.append(("shared up", shared))
        shared = add("shared up", Kind.MATMUL, shared)
    steps = (("experts down'", Kind.MATMUL), ("experts activation'", Kind.ELEMENTWISE),
             ("experts up'", Kind.MATMUL))  # fmt: skip
    source = add("joined", Kind.MEMORY, shared)
    ways = (f"experts results' {mark}", f"rows' {mark}")
    arrived, _, activated, _, back = _by_group(
        graph, times, seconds, steps, mark, ways, (source, weights)
    )
    late += [("experts down", arrived), ("experts up", activated)]
    done = add("sorted", Kind.MEMORY, back)
    return add("router", Kind.ELEMENTWISE, done, ready), late


def _by_group(
    graph: TimedGraph, times: ExpertTimes, seconds: Mapping[str, float],
    steps: tuple[tuple[str, Kind], ...], mark: str, ways: tuple[str, str], given: tuple[str, str],
) -> tuple[str, ...]:  # fmt: skip
    """Rows go to their experts, are computed and go back, group by group: the last group's rows,
    what each step made of them, and what came back."""
    source, weights = given

    def way(name: str, kind: Kind, last: str) -> str:
        moved = times.rows_bytes / times.groups
        return graph.add(name, kind, times.rows_s, (last,), lane=EXPERT, moved=moved)

    numbers = [f" {group}" if times.groups > 1 else "" for group in range(times.groups)]
    rows = [way(f"{ways[0]}{number}", times.ways[0], source) for number in numbers]
    made: tuple[str, ...] = ()
    for number, last in zip(numbers, rows, strict=True):
        made = (last,)
        for name, kind in steps:
            sources = (made[-1], weights) if len(made) == 1 else (made[-1],)
            took = seconds[name] / times.groups
            made += (graph.add(f"{name} {mark}{number}", kind, took, sources),)
        made += (way(f"{ways[1]}{number}", times.ways[1], made[-1]),)
    return made
