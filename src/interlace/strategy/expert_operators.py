"""A layer of experts as operators: what is computed, and what ranks exchange around it.

Tokens are routed, ranks tell each other how many rows they will send, the host reads it, rows in
the order of experts go to their ranks, and results come back. A backward goes the same ways without
counts; what is computed again in one goes them with its rows. Ranks wait for the one with the
fullest expert, so that compute and exchanges are those of that rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.hardware.step_job import StepJob
from interlace.ir.graph import Kind
from interlace.strategy.job_links import COUNTS, EXPERT, JobLinks
from interlace.strategy.timed_graph import TimedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """Seconds and bytes of exchanges of a layer; 0 where a rank has all experts."""

    counts_s: float
    rows_s: float
    """One way."""
    rows_bytes: float
    shared: bool
    """Whether there is a feed-forward that every token meets."""


def expert_times(job: StepJob, links: JobLinks) -> ExpertTimes | None:
    """None for layers without experts."""
    if (experts := job.experts) is None:
        return None
    size = 2.0 * job.tokens * experts.chosen * job.hidden * experts.fullest
    return ExpertTimes(
        counts_s=links.seconds(COUNTS, Kind.ALL_TO_ALL, 8.0 * experts.count),
        rows_s=links.seconds(EXPERT, Kind.ALL_TO_ALL, size),
        rows_bytes=size,
        shared=experts.shared > 0,
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
    rows = _exchanged(graph, f"rows {mark}", times, add("sorted", Kind.MEMORY, routed))
    rows = add("experts up", Kind.MATMUL, rows, weights)
    rows = add("experts activation", Kind.ELEMENTWISE, rows)
    rows = add("experts down", Kind.MATMUL, rows)
    done = add("joined", Kind.MEMORY, _exchanged(graph, f"experts results {mark}", times, rows))
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
    rows = _exchanged(graph, f"experts results' {mark}", times, add("joined", Kind.MEMORY, shared))
    late.append(("experts down", rows))
    rows = add("experts down", Kind.MATMUL, rows, weights)
    rows = add("experts activation", Kind.ELEMENTWISE, rows)
    late.append(("experts up", rows))
    rows = _exchanged(graph, f"rows' {mark}", times, add("experts up", Kind.MATMUL, rows))
    done = add("sorted", Kind.MEMORY, rows)
    return add("router", Kind.ELEMENTWISE, done, ready), late


def _exchanged(graph: TimedGraph, name: str, times: ExpertTimes, last: str) -> str:
    return graph.add(
        name, Kind.ALL_TO_ALL, times.rows_s, (last,), lane=EXPERT, moved=times.rows_bytes
    )
