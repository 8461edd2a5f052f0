"""Attention of ranks that share sequences, as operators: Ulysses and the ring of the trainer.

Ulysses trades sequence for heads in three exchanges, of queries, of keys with values, and of
results; gradients take the same way back. Around a ring keys and values take a hop beside each
block of attention. A backward begins with the keys that came last, and the gradients of each block
go straight back to their owner, the last of them beside the block of a rank's own keys.
"""

from dataclasses import dataclass
from math import gcd

from interlace.hardware.step_job import StepJob
from interlace.ir.graph import Kind
from interlace.strategy.job_links import CONTEXT, JobLinks
from interlace.strategy.timed_graph import TimedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTimes:
    """Seconds and bytes of exchanges of a layer, of what a rank sends."""

    ranks: int
    ring: bool
    queries: tuple[float, float]
    """Ulysses: of queries, and of results."""
    keys: tuple[float, float]
    """Of keys and values; around a ring of one hop."""


def key_copies(job: StepJob) -> int:
    """How often Ulysses repeats heads of keys, so that each rank has those of its queries (as
    `parallel.ulysses`)."""
    if job.ring or job.context == 1:
        return 1
    heads = job.heads // job.tensor
    group = heads // max(1, (job.kv_heads or job.heads) // job.tensor)
    return group // gcd(group, max(1, heads // job.context))


def context_times(job: StepJob, links: JobLinks) -> ContextTimes | None:
    """None where no ranks share sequences."""
    if job.context == 1:
        return None
    query_bytes = 2.0 * job.tokens * job.query_width / job.tensor
    width = max(job.kv_width // job.tensor, job.head_size) * key_copies(job)
    key_bytes = 2 * 2.0 * job.tokens * width
    kind = Kind.SEND if job.ring else Kind.ALL_TO_ALL
    return ContextTimes(
        ranks=job.context,
        ring=job.ring,
        queries=(links.seconds(CONTEXT, kind, query_bytes), query_bytes),
        keys=(links.seconds(CONTEXT, kind, key_bytes), key_bytes),
    )


def attention_there(
    graph: TimedGraph, times: ContextTimes | None, seconds: float, mark: str, last: str,
    *, again: bool = False,
) -> str:  # fmt: skip
    """A forward's attention behind `last`; `again` in a backward, with what was exchanged."""
    if times is None or (again and not times.ring):
        return graph.add(f"attention {mark}", Kind.ATTENTION, seconds, (last,))
    if not times.ring:
        queries = _exchanged(graph, f"queries {mark}", times.queries, last)
        keys = _exchanged(graph, f"keys {mark}", times.keys, last)
        done = graph.add(f"attention {mark}", Kind.ATTENTION, seconds, (queries, keys))
        return _exchanged(graph, f"results {mark}", times.queries, done)
    come = needs = last
    for block in range(times.ranks):
        ready = (needs, come)
        if block < times.ranks - 1:  # asked for before this block begins
            come = _exchanged(graph, f"keys {block} {mark}", times.keys, come)
        name = f"attention {block} {mark}"
        needs = graph.add(name, Kind.ATTENTION, seconds / times.ranks, ready)
    return needs


def attention_back(
    graph: TimedGraph, times: ContextTimes | None, seconds: float, mark: str, last: str
) -> tuple[str, ...]:
    """A backward's attention behind `last`: what must be there for what follows."""
    if times is None:
        return (graph.add(f"attention' {mark}", Kind.ATTENTION, seconds, (last,)),)
    if not times.ring:
        given = _exchanged(graph, f"results' {mark}", times.queries, last)
        done = graph.add(f"attention' {mark}", Kind.ATTENTION, seconds, (given,))
        return (
            _exchanged(graph, f"keys' {mark}", times.keys, done),
            _exchanged(graph, f"queries' {mark}", times.queries, done),
        )
    # Keys do not wait for the gradient: their first hop starts with the block beside it.
    come, needs, sums = last, last, ""
    for block in range(times.ranks):
        ready = (needs, come)
        if block < times.ranks - 1:
            come = _exchanged(graph, f"keys {block}' {mark}", times.keys, come)
        name = f"attention {block}' {mark}"
        needs = graph.add(name, Kind.ATTENTION, seconds / times.ranks, ready)
        if block < times.ranks - 1:
            sums = _exchanged(graph, f"gradients {block} {mark}", times.keys, needs)
    return needs, sums


def _exchanged(graph: TimedGraph, name: str, cost: tuple[float, float], last: str) -> str:
    return graph.add(name, Kind.ALL_TO_ALL, cost[0], (last,), lane=CONTEXT, moved=cost[1])
