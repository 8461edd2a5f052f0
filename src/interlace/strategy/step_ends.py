"""What a rank does once a step, around its actions: gathers and reductions, and the optimizer.

On one stage, sums of gradients are reduced under the last backward, layer by layer as they are
ready, and with ZeRO-1 the weights gathered under the first forward. A stage of the trainer's
pipelines sums the gradients of a chunk whole when its last backward is over, beside the actions of
its other chunks, and gathers behind the optimizer. Another program may reduce all when its actions
are over, and to shards. Experts do the same with the ranks that hold the same ones, one after the
other with the rest. That sums slow down the compute that they run beside is not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from interlace.hardware.step_job import StepJob
from interlace.hardware.step_model import OPTIMIZER_BYTES
from interlace.ir.actions import Direction, Share
from interlace.ir.graph import COMPUTE_LANE, Kind
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.sim.pipeline_step import PipelineStep
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.job_links import (
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    REPLICATE,
    SHARD,
    JobLinks,
)
from interlace.strategy.pass_times import ChunkShape, PassCost, PassTimes
from interlace.strategy.rank_memory import rank_parameters

OPTIMIZER = "optimizer"
"""Kind of the span in which weights are updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnds:
    """Seconds of one rank."""

    gathers: tuple[tuple[str, float], ...]
    """(lane, seconds) of weights, once a step."""
    gather_exposed_s: float
    gather_first: bool
    """Before the actions, or else behind the optimizer."""
    reductions: tuple[tuple[str, Kind, float], ...]
    """(lane, kind, seconds) of gradients, once a step."""
    reduce_exposed_s: float
    optimizer_s: float
    shares: tuple[tuple[int, float], ...] = ()
    """(chunk, its share of the reductions) of a rank with several."""
    begun: tuple[tuple[int, float], ...] = ()
    """(ns, the share of the reductions that begins then); else all end `reduce_exposed_s` behind
    the actions, in one go."""

    @property
    def gather_s(self) -> float:
        """All gathers."""
        return sum(seconds for _, seconds in self.gathers)

    @property
    def reduce_s(self) -> float:
        """All reductions."""
        return sum(seconds for *_, seconds in self.reductions)

    @property
    def least_reduce_exposed_s(self) -> float:
        """However early chunks are over: the last to be over has nothing beside."""
        least = min((share for _, share in self.shares), default=1.0)
        return min(self.reduce_exposed_s, least * self.reduce_s)

    @property
    def as_time(self) -> PassCost:
        """What of it is communication, by lane; what is exposed is shared out by its parts."""
        exposed: dict[str, float] = {}
        busy: dict[str, float] = {}
        for left, total, parts in (
            (self.gather_exposed_s, self.gather_s, self.gathers),
            (self.reduce_exposed_s, self.reduce_s, [(n, s) for n, _, s in self.reductions]),
        ):
            for lane, seconds in parts:
                busy[lane] = busy.get(lane, 0.0) + 1e9 * seconds
                exposed[lane] = exposed.get(lane, 0.0) + 1e9 * seconds * left / total
        return PassCost(0.0, exposed, busy)


def ends_of(
    links: JobLinks,
    times: PassTimes,
    layout: JobLayout,
    shapes: Mapping[int, ChunkShape],
    own: Sequence[int],
    *,
    sums_late: bool = False,
) -> StepEnds:
    """Those of a rank with these chunks; `sums_late` is that of `JobParts`."""
    operators = times.operators
    job, last = operators.job, len(shapes) - 1
    layers = sum(shapes[chunk].layers for chunk in own)
    dense = sum(shapes[chunk].dense for chunk in own)
    parameters = rank_parameters(job, layout, layers, first=0 in own, last=last in own, dense=dense)
    gathers: list[tuple[str, float]] = []
    reductions: list[tuple[str, Kind, float]] = []
    updated = 0.0
    for size, shards, lanes in (
        (parameters.dense, layout.shards, (SHARD, REPLICATE)),
        (parameters.experts, layout.expert_shards, (EXPERT_SHARD, EXPERT_REPLICATE)),
    ):
        updated += size / shards
        if shards > 1 and layout.zero == 1:
            gathers.append((lanes[0], operators.shared_s(Kind.ALL_GATHER, 2.0 * size, lanes[0])))
        if shards > 1 and layout.reduce == "step":
            # A stage of the trainer sums them whole (`parallel.stage_shards`).
            whole = layout.pipeline > 1 and not sums_late
            kind = Kind.ALL_REDUCE if whole else Kind.REDUCE_SCATTER
            seconds = operators.shared_s(kind, job.gradient_bytes * size, lanes[0])
            reductions.append((lanes[0], kind, seconds))
        # Whole weights are summed over both axes, cut ones over replicas.
        for lane in lanes if shards == 1 else lanes[1:]:
            seconds = operators.shared_s(Kind.ALL_REDUCE, job.gradient_bytes * size / shards, lane)
            reductions.append((lane, Kind.ALL_REDUCE, seconds))
    gathers = [each for each in gathers if each[-1] > 0]
    reductions = [each for each in reductions if each[-1] > 0]
    gather_s, reduce_s = sum(s for _, s in gathers), sum(s for *_, s in reductions)
    gather_exposed, reduce_exposed = gather_s, reduce_s
    if job.overlap_gradients:
        whole = ChunkShape(layers, last in own, dense)
        forward = times.of_passes(((Direction.FORWARD, Share.WHOLE, whole),)).ns / 1e9
        backward = times.of_passes(((Direction.BACKWARD, Share.WHOLE, whole),)).ns / 1e9
        gather_exposed = _left(gather_s, forward, layers)
        reduce_exposed = _left(reduce_s, backward, layers)
    return StepEnds(
        gathers=tuple(gathers),
        gather_exposed_s=gather_exposed,
        gather_first=job.overlap_gradients,
        reductions=tuple(reductions),
        reduce_exposed_s=reduce_exposed,
        optimizer_s=OPTIMIZER_BYTES * updated / operators.device.bytes_per_s,
        shares=_shares(job, layout, shapes, own) if reductions else (),
    )


def _shares(
    job: StepJob, layout: JobLayout, shapes: Mapping[int, ChunkShape], own: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """(chunk, its share of the parameters) of a rank with several."""
    last = len(shapes) - 1
    sizes = {
        chunk: rank_parameters(
            job, layout, shapes[chunk].layers,
            first=chunk == 0, last=chunk == last, dense=shapes[chunk].dense,
        ).total
        for chunk in own
    }  # fmt: skip
    whole = sum(sizes.values())
    return tuple((chunk, size / whole) for chunk, size in sizes.items()) if len(own) > 1 else ()


def chunk_by_chunk(end: StepEnds, over_ns: int, backwards: Mapping[int, int]) -> StepEnds:
    """With reductions of a chunk from when its last backward is over, at `backwards`; the rank's
    last action is over at `over_ns`."""
    begun, at = list[tuple[int, float]](), 0
    for chunk, share in sorted(end.shares, key=lambda each: backwards[each[0]]):
        begun.append((max(at, backwards[chunk]), share))
        at = begun[-1][0] + round(1e9 * share * end.reduce_s)
    return replace(end, reduce_exposed_s=(at - over_ns) / 1e9, begun=tuple(begun))


def _left(transfer_s: float, pass_s: float, layers: int) -> float:
    """What of a transfer is left beside a pass, layer by layer, of which one has nothing beside."""
    one = transfer_s / layers
    return max(one, transfer_s - pass_s * (layers - 1) / layers) if transfer_s else 0.0


def with_ends(step: PipelineStep, ends: Sequence[StepEnds]) -> PipelineStep:
    """The step with what its ranks do once."""
    before, update_ns = _before_and_update([each.length_ns for each in step.timelines], ends)
    timelines = tuple(
        _extended(timeline, end, before, update_ns)
        for timeline, end in zip(step.timelines, ends, strict=True)
    )
    return replace(step, timelines=timelines)


def ns_with_ends(over: Sequence[int], ends: Sequence[StepEnds]) -> int:
    """The length of that step, of ranks whose last action or message is over then."""
    _, update_ns = _before_and_update(over, ends)
    return max(
        update_ns + round(1e9 * end.optimizer_s) + (0 if end.gather_first else _gather_ns(end))
        for end in ends
    )


def _before_and_update(over: Sequence[int], ends: Sequence[StepEnds]) -> tuple[int, int]:
    """(when the actions begin, when the weights are updated), of ranks that take so long."""
    before = round(1e9 * max(end.gather_exposed_s if end.gather_first else 0.0 for end in ends))
    reduced = [ns + round(1e9 * end.reduce_exposed_s) for ns, end in zip(over, ends, strict=True)]
    return before, before + max(reduced)


def _gather_ns(end: StepEnds) -> int:
    """Of all lanes in turn, or their sum, which rounds otherwise."""
    return max(sum(round(1e9 * s) for _, s in end.gathers), round(1e9 * end.gather_s))


def _extended(timeline: Timeline, end: StepEnds, before: int, update_ns: int) -> Timeline:
    spans = [_later(span, before) for span in timeline.spans] if before else [*timeline.spans]
    at = before + max((s.end_ns for s in timeline.spans if s.lane == COMPUTE_LANE), default=0)

    def add(name: str, kind: str, lane: str, start: int, ns: int) -> int:
        if ns > 0:
            spans.append(Span(name, kind, lane, start, start + ns, issue_ns=start))
        return start + ns

    def gather(start: int) -> None:
        at = start
        for lane, seconds in end.gathers:
            at = add("gather weights", Kind.ALL_GATHER, lane, at, round(1e9 * seconds))

    if end.gather_first and end.gathers:
        gather(0)
        add("gather weights", WAIT, COMPUTE_LANE, 0, before)
    exposed = round(1e9 * end.reduce_exposed_s)
    for start, share in end.begun or ((at + exposed - round(1e9 * end.reduce_s), 1.0),):
        begin = start
        for lane, kind, seconds in end.reductions:
            begin = add("reduce gradients", kind, lane, begin, round(1e9 * share * seconds))
    add("reduce gradients", WAIT, COMPUTE_LANE, at, exposed)
    done = add(OPTIMIZER, OPTIMIZER, COMPUTE_LANE, update_ns, round(1e9 * end.optimizer_s))
    if not end.gather_first and end.gathers:
        gather(done)
        add("gather weights", WAIT, COMPUTE_LANE, done, round(1e9 * end.gather_s))
    return Timeline(timeline.label, timeline.rank, tuple(spans))


def _later(span: Span, ns: int) -> Span:
    """The same, so much later."""
    issue_ns = span.issue_ns + ns if span.issue_ns else 0
    return replace(span, start_ns=span.start_ns + ns, end_ns=span.end_ns + ns, issue_ns=issue_ns)
