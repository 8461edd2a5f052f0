"""What a rank does once a step, around its actions: gathers and reductions, and the optimizer.

On one stage, sums of gradients are reduced under the last backward, layer by layer as they are
ready, and with ZeRO-1 the weights gathered under the first forward. A stage of a pipeline reduces
when its actions are over, and gathers behind the optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from interlace.hardware.step_model import OPTIMIZER_BYTES
from interlace.ir.actions import Direction, Share
from interlace.ir.graph import COMPUTE_LANE, Kind
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.sim.pipeline_step import PipelineStep
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.job_links import REPLICATE, SHARD, JobLinks
from interlace.strategy.pass_times import ChunkShape, PassCost, PassTimes
from interlace.strategy.rank_memory import rank_parameters

OPTIMIZER = "optimizer"
"""Kind of the span in which weights are updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnds:
    """Seconds of one rank."""

    gather_s: float
    """Of weights, once a step."""
    gather_exposed_s: float
    gather_first: bool
    """Before the actions, or else behind the optimizer."""
    shard_s: float
    """Of gradients, over shards."""
    replicate_s: float
    """Of gradients, over replicas."""
    reduce_exposed_s: float
    optimizer_s: float

    @property
    def as_time(self) -> PassCost:
        """What of it is communication, by lane; what is exposed is shared out by its parts."""
        reduced = self.shard_s + self.replicate_s
        part = self.reduce_exposed_s / reduced if reduced else 0.0
        return PassCost(
            0.0,
            {
                SHARD: 1e9 * (self.gather_exposed_s + part * self.shard_s),
                REPLICATE: 1e9 * part * self.replicate_s,
            },
            {SHARD: 1e9 * (self.gather_s + self.shard_s), REPLICATE: 1e9 * self.replicate_s},
        )


def ends_of(
    links: JobLinks,
    times: PassTimes,
    layout: JobLayout,
    shapes: Mapping[int, ChunkShape],
    own: Sequence[int],
) -> StepEnds:
    """Those of a rank with these chunks."""
    operators = times.operators
    job, last = operators.job, len(shapes) - 1
    layers = sum(shapes[chunk].layers for chunk in own)
    parameters = rank_parameters(job, layout, layers, first=0 in own, last=last in own)
    shard_s = replicate_s = gather_s = 0.0
    if layout.data_shard > 1:
        if layout.reduce == "step":
            shard_s = operators.shared_s(Kind.REDUCE_SCATTER, 4.0 * parameters)
        if layout.zero == 1:
            gather_s = operators.shared_s(Kind.ALL_GATHER, 2.0 * parameters)
    if layout.data_replicate > 1:
        size = 4.0 * parameters / layout.data_shard
        buckets = max(1, -(-int(size) // int(operators.bucket_bytes)))
        replicate_s = links.seconds(REPLICATE, Kind.ALL_REDUCE, size, buckets)
    gather_exposed, reduce_exposed = gather_s, shard_s + replicate_s
    if layout.pipeline == 1:
        whole = ChunkShape(job.layers, True)
        forward = times.of_passes(((Direction.FORWARD, Share.WHOLE, whole),)).ns / 1e9
        backward = times.of_passes(((Direction.BACKWARD, Share.WHOLE, whole),)).ns / 1e9
        gather_exposed = _left(gather_s, forward, layers)
        reduce_exposed = _left(shard_s + replicate_s, backward, layers)
    return StepEnds(
        gather_s=gather_s,
        gather_exposed_s=gather_exposed,
        gather_first=layout.pipeline == 1,
        shard_s=shard_s,
        replicate_s=replicate_s,
        reduce_exposed_s=reduce_exposed,
        optimizer_s=OPTIMIZER_BYTES * parameters / layout.data_shard / operators.device.bytes_per_s,
    )


def _left(transfer_s: float, pass_s: float, layers: int) -> float:
    """What of a transfer is left beside a pass, layer by layer, of which one has nothing beside."""
    one = transfer_s / layers
    return max(one, transfer_s - pass_s * (layers - 1) / layers) if transfer_s else 0.0


def with_ends(step: PipelineStep, ends: Sequence[StepEnds]) -> PipelineStep:
    """The step with what its ranks do once."""
    before = round(1e9 * max(end.gather_exposed_s if end.gather_first else 0.0 for end in ends))
    over = [
        before + timeline.length_ns + round(1e9 * end.reduce_exposed_s)
        for timeline, end in zip(step.timelines, ends, strict=True)
    ]
    timelines = tuple(
        _extended(timeline, end, before, max(over))
        for timeline, end in zip(step.timelines, ends, strict=True)
    )
    return replace(step, timelines=timelines)


def _extended(timeline: Timeline, end: StepEnds, before: int, update_ns: int) -> Timeline:
    spans = [_later(span, before) for span in timeline.spans] if before else [*timeline.spans]
    at = before + max((s.end_ns for s in timeline.spans if s.lane == COMPUTE_LANE), default=0)

    def add(name: str, kind: str, lane: str, start: int, ns: int) -> int:
        if ns > 0:
            spans.append(Span(name, kind, lane, start, start + ns, issue_ns=start))
        return start + ns

    if end.gather_first and end.gather_s:
        add("gather weights", Kind.ALL_GATHER, SHARD, 0, round(1e9 * end.gather_s))
        add("gather weights", WAIT, COMPUTE_LANE, 0, before)
    exposed = round(1e9 * end.reduce_exposed_s)
    total = round(1e9 * (end.shard_s + end.replicate_s))
    start = at + exposed - total
    middle = add("reduce gradients", Kind.REDUCE_SCATTER, SHARD, start, round(1e9 * end.shard_s))
    add("sum gradients", Kind.ALL_REDUCE, REPLICATE, middle, round(1e9 * end.replicate_s))
    add("reduce gradients", WAIT, COMPUTE_LANE, at, exposed)
    done = add(OPTIMIZER, OPTIMIZER, COMPUTE_LANE, update_ns, round(1e9 * end.optimizer_s))
    if not end.gather_first and end.gather_s:
        add("gather weights", Kind.ALL_GATHER, SHARD, done, round(1e9 * end.gather_s))
        add("gather weights", WAIT, COMPUTE_LANE, done, round(1e9 * end.gather_s))
    return Timeline(timeline.label, timeline.rank, tuple(spans))


def _later(span: Span, ns: int) -> Span:
    """The same, so much later."""
    issue_ns = span.issue_ns + ns if span.issue_ns else 0
    return replace(span, start_ns=span.start_ns + ns, end_ns=span.end_ns + ns, issue_ns=issue_ns)
