"""One configuration of the trainer on a cluster, simulated: all ranks that differ, action by
action.

Ranks of a stage do the same at the same time, so one of each stage is simulated: its actions in the
order of the schedule and its messages by `sim.pipeline_step`, with times of passes from
`pass_times`. Before and behind the actions lies what data-parallel ranks exchange once a step, and
the optimizer, which begins everywhere when the norm of all gradients is known.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.config import RunConfig
from interlace.hardware.cluster import Cluster
from interlace.hardware.step_job import StepJob
from interlace.ir.actions import Action, Direction, Share
from interlace.ir.graph import Kind
from interlace.ir.stage_messages import chain, chunks_of
from interlace.ir.timeline import Timeline
from interlace.sim.listed_actions import ActionTimes, ListedActions
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import PipelineStep, simulate_listed
from interlace.strategy.chunk_cuts import chunk_shapes, even_cuts, given_cuts
from interlace.strategy.job_layout import JobLayout, step_job
from interlace.strategy.job_links import STAGE, JobLinks
from interlace.strategy.layer_operators import LayerOperators
from interlace.strategy.pass_times import NOTHING, ChunkShape, PassCost, PassTimes
from interlace.strategy.rank_memory import (
    MemoryParts,
    kept_bytes,
    late_bytes,
    layers_bytes,
    rank_memory,
    rank_parameters,
)
from interlace.strategy.schedule_facts import listed_actions
from interlace.strategy.step_ends import (
    StepEnds,
    chunk_by_chunk,
    ends_of,
    ns_with_ends,
    with_ends,
)


@dataclass(frozen=True)
class SimulatedJob:
    """What a step would be."""

    config: RunConfig
    cluster: Cluster
    layout: JobLayout
    job: StepJob
    cuts: tuple[int, ...]
    """The first layer of each chunk."""
    actions: Sequence[Sequence[Action]]
    """By stage."""
    step: PipelineStep
    """One rank of each stage, with the exchanges at both ends and the optimizer."""
    ends_s: float
    """What lies around the actions: exchanges once a step that nothing hides, the optimizer, and
    waiting for it; the mean of all ranks."""
    exposed_s: Mapping[str, float]
    """By lane: time in which a rank waits for it, the mean of all ranks."""
    communication_s: Mapping[str, float]
    """By lane: time in which it is busy, the mean of all ranks."""
    memory: tuple[MemoryParts, ...]
    """By stage."""
    phases: Mapping[str, Timeline]
    """Operators of each kind of action, of a few layers."""
    passes: Mapping[str, PassCost]
    """What each kind of action takes."""
    costs: PipelineCosts
    """The same with messages, as the pipeline was simulated."""
    ends: tuple[StepEnds, ...]
    """By stage: what it does once a step."""

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The stage of each chunk."""
        on = chunks_of(self.actions)
        return tuple(on[chunk] for chunk in sorted(on))

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.step_ns / 1e9

    @property
    def mfu(self) -> float:
        """Arithmetic of the model over what all devices could do; attention as a full square."""
        return self.job.model_flops / self._could_do

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        return (self.job.model_flops + self._again_flops) / self._could_do

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.job.step_tokens / self.seconds

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait for another stage."""
        return max(0.0, self.step.bubble_fraction - self.ends_s / self.seconds)

    @property
    def peak(self) -> MemoryParts:
        """Of the rank that needs the most."""
        return max(self.memory, key=lambda each: each.total)

    @property
    def fits(self) -> bool:
        """Whether a device has so much."""
        return self.peak.total <= self.cluster.memory_gib * 2**30

    @property
    def _could_do(self) -> float:
        return self.seconds * self.job.ranks * self.cluster.peak_tflops * 1e12

    @property
    def _again_flops(self) -> float:
        job, tokens = self.job, float(self.job.step_tokens)
        attention = 4.0 * job.layers * job.query_width * job.sequence * tokens
        linear = 2.0 * job.multiplied_parameters * tokens
        recompute = self.layout.recompute
        return {"attention": attention, "layer": attention + linear}.get(recompute, 0.0)


@dataclass(frozen=True)
class JobParts:
    """What of a job does not depend on its schedule; shared between layouts that have it alike."""

    job: StepJob
    links: JobLinks
    times: PassTimes
    waits_for_messages: bool = False
    """Stages send and receive behind each action, and compute nothing meanwhile."""
    sums_late: bool = False
    """Stages reduce gradients to shards when all their actions are over, and do not sum them whole
    chunk by chunk."""


def parts_of(
    config: RunConfig, cluster: Cluster, layout: JobLayout, *, side_by_side: bool = True
) -> JobParts:
    """Raises InputError if the cluster has fewer devices, or shapes do not fit."""
    job, links = step_job(config, layout), JobLinks(cluster, layout)
    assert links.places
    operators = LayerOperators(job, links, config.parallel.bucket_mib * 2**20)
    return JobParts(job, links, PassTimes(operators, side_by_side=side_by_side))


def simulate_job(
    config: RunConfig, cluster: Cluster, layout: JobLayout, parts: JobParts | None = None
) -> SimulatedJob:
    """Simulate a step. `parts` are those of another layout that shares them.

    Raises InputError for a schedule that does not run so, or a model too small for it."""
    parts = parts or parts_of(config, cluster, layout)
    ready = _prepared(config, layout, parts)
    listed, passes = ready.listed, ready.passes
    ends = _ends(parts, ready, listed.times(ready.costs))
    step = simulate_listed(listed, ready.costs)
    exposed, busy = _communication(listed.phases.counts, passes, ends)
    whole = with_ends(step, ends)
    shown = sorted(listed.phases.first.items())
    return SimulatedJob(
        config=config,
        cluster=cluster,
        layout=layout,
        job=parts.job,
        cuts=ready.cuts,
        actions=listed.ranks,
        step=whole,
        ends_s=(whole.step_ns - step.step_ns) / 1e9,
        exposed_s=exposed,
        communication_s=busy,
        memory=_memory(parts.job, layout, ready, step.peak_bytes),
        phases={name: parts.times.shown(a.slots, ready.shapes) for name, a in shown},
        passes=passes,
        costs=ready.costs,
        ends=ends,
    )


def step_of(config: RunConfig, layout: JobLayout, parts: JobParts) -> tuple[int, MemoryParts]:
    """(ns, memory of the rank that needs the most) of the step that `simulate_job` gives, without
    its timelines. Raises InputError as that."""
    ready = _prepared(config, layout, parts)
    listed, costs = ready.listed, ready.costs
    times = listed.times(costs)
    over = [end for _, end in listed.ends(times)]
    kept = [most for most, _ in listed.peaks(costs)]
    memory = _memory(parts.job, layout, ready, kept)
    ends = _ends(parts, ready, times)
    return ns_with_ends(over, ends), max(memory, key=lambda each: each.total)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A layout with the times of all that it runs."""

    listed: ListedActions
    cuts: tuple[int, ...]
    shapes: Mapping[int, ChunkShape]
    passes: Mapping[str, PassCost]
    costs: PipelineCosts
    ends: tuple[StepEnds, ...]
    """As if reductions began when all actions of a rank are over."""


def _prepared(config: RunConfig, layout: JobLayout, parts: JobParts) -> _Prepared:
    job, times = parts.job, parts.times
    listed = listed_actions(layout.schedule, layout.pipeline, layout.micro_batches)
    rank_of = listed.phases.rank_of
    cuts = cuts_of(config, layout, job, 1 + max(rank_of))
    shapes = chunk_shapes(cuts, job.layers, job.dense_layers)
    passes = {name: times.of(a.slots, shapes) for name, a in listed.phases.first.items()}
    owned = [[c for c, on in rank_of.items() if on == rank] for rank in range(layout.pipeline)]
    return _Prepared(
        listed,
        cuts,
        shapes,
        passes,
        _pipeline_costs(parts, layout, shapes, passes),
        tuple(
            ends_of(parts.links, times, layout, shapes, own, sums_late=parts.sums_late)
            for own in owned
        ),
    )


def _ends(parts: JobParts, ready: _Prepared, times: ActionTimes) -> tuple[StepEnds, ...]:
    """By stage: what it does once a step, when its actions run at these times."""
    if parts.sums_late or not any(end.shares for end in ready.ends):
        return ready.ends
    listed = ready.listed
    found = []
    for end, (last, _), places in zip(
        ready.ends, listed.ends(times), listed.last_backwards, strict=True
    ):
        over = {chunk: times.ends[place] for chunk, place in places.items()}
        found.append(chunk_by_chunk(end, last, over) if end.shares else end)
    return tuple(found)


def cuts_of(config: RunConfig, layout: JobLayout, job: StepJob, chunks: int) -> tuple[int, ...]:
    """The first layer of each chunk: those that the run file names, or even ones."""
    given = config.pipeline.split_at
    if given and config.parallel.pipeline == layout.pipeline:
        return given_cuts(given, job.layers, chunks)
    return even_cuts(job.layers, chunks, job.vocab * job.hidden / job.active_parameters)


def _pipeline_costs(
    parts: JobParts,
    layout: JobLayout,
    shapes: Mapping[int, ChunkShape],
    costs: Mapping[str, PassCost],
) -> PipelineCosts:
    times, job = parts.times, parts.job

    def ns(direction: Direction, share: Share, shape: ChunkShape) -> int:
        return round(times.of_passes(((direction, share, shape),)).ns)

    found = []
    for shape in (shapes[number] for number in sorted(shapes)):
        whole = ns(Direction.BACKWARD, Share.WHOLE, shape)
        weight = ns(Direction.BACKWARD, Share.WEIGHT, shape)
        layers = shape.layers, shape.dense
        found.append(
            ChunkCosts(
                forward_ns=ns(Direction.FORWARD, Share.WHOLE, shape),
                input_ns=max(0, whole - weight),
                weight_ns=weight,
                saved_bytes=round(layers_bytes(kept_bytes, job, layout, *layers)),
                kept_bytes=round(layers_bytes(late_bytes, job, layout, *layers)),
            )
        )
    # What stages hand over is split along the sequence by tensor ranks.
    size = 2.0 * job.tokens * job.hidden / job.tensor
    hop = round(1e9 * parts.links.seconds(STAGE, Kind.SEND, size)) if layout.pipeline > 1 else 0
    return PipelineCosts(
        chunks=found,
        pairs_ns={name: round(cost.ns) for name, cost in costs.items() if "+" in name},
        messages_ns=dict.fromkeys(chain(len(found)), hop),
        between_ns={name: hop * (1 + name.count("+")) for name in costs}
        if parts.waits_for_messages
        else {},
    )


def _memory(
    job: StepJob, layout: JobLayout, ready: _Prepared, peak_bytes: Sequence[int]
) -> tuple[MemoryParts, ...]:
    on, shapes, count = ready.listed.phases.rank_of, ready.shapes, len(ready.shapes)
    found = []
    for rank in range(layout.pipeline):
        own = [chunk for chunk in shapes if on[chunk] == rank]
        layers = sum(shapes[chunk].layers for chunk in own)
        last, dense = count - 1 in own, sum(shapes[chunk].dense for chunk in own)
        parameters = rank_parameters(job, layout, layers, first=0 in own, last=last, dense=dense)
        kept = float(peak_bytes[rank])
        if layout.pipeline == 1:  # two strands fill and drain the same memory
            kept = layers_bytes(kept_bytes, job, layout, job.layers, job.dense_layers)
        found.append(rank_memory(job, layout, parameters, kept, last=last))
    return tuple(found)


def _communication(
    counts: Sequence[Counter[str]], costs: Mapping[str, PassCost], ends: Sequence[StepEnds]
) -> tuple[dict[str, float], dict[str, float]]:
    """(exposed, busy) seconds by lane, the mean of all stages."""
    total = NOTHING
    for own, end in zip(counts, ends, strict=True):
        for phase in sorted(own):
            total = total.plus(costs[phase], own[phase])
        total += end.as_time
    ranks = len(counts)
    return (
        {lane: ns / ranks / 1e9 for lane, ns in total.exposed.items()},
        {lane: ns / ranks / 1e9 for lane, ns in total.communication.items()},
    )
