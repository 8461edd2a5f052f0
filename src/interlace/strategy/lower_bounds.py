"""Times and memory that no simulation of a layout goes below, found without simulating it.

A rank takes at least the time of its own passes, and begins when the first micro-batch has come to
its first chunk; when it is done, the last one has the same way back. Two passes side by side take
at least the compute of both, slowed while something is transferred, and at least what each link
carries. Memory is what is there all the time, and the forwards that the schedule keeps at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.step_job import StepJob
from interlace.ir.actions import Direction, Share
from interlace.strategy.chunk_cuts import chunk_shapes, even_cuts
from interlace.strategy.job_layout import JobLayout, step_job
from interlace.strategy.pass_times import ChunkShape, PassCost, PassTimes
from interlace.strategy.rank_memory import (
    kept_bytes,
    layers_bytes,
    rank_memory,
    rank_parameters,
)
from interlace.strategy.schedule_facts import (
    ScheduleFacts,
    chunks_on_a_rank,
    facts_of,
    few_facts_of,
)
from interlace.strategy.simulated_job import JobParts, parts_of
from interlace.strategy.step_ends import ends_of

_Kept = dict[tuple[int, bool, bool, int], float]
"""Most bytes that are kept by ranks with so many layers, the embedding or not, the head or not, and
so many layers without experts."""


@dataclass
class Bounds:
    """Bounds of layouts of one job, with all that layouts share."""

    config: RunConfig
    cluster: Cluster
    _times: dict[tuple[object, ...], PassTimes] = field(default_factory=dict)
    _kept: dict[tuple[object, ...], _Kept] = field(default_factory=dict)

    def parts(self, layout: JobLayout) -> JobParts:
        """The parts of a layout, with times of passes that others found already."""
        parts = parts_of(self.config, self.cluster, layout)
        key = (
            layout.tensor,
            layout.micro_batch,
            layout.micro_batches > 1,
            layout.recompute,
            layout.gathers_each,
            layout.data_shard if layout.gathers_each else 1,
            layout.reduce,
            layout.context,
            layout.context_method,
            layout.expert,
            layout.expert_load,
            layout.decompose,
            layout.pieces,
        )
        times = self._times.setdefault(key, parts.times)
        # Only times of passes are shared: what is exchanged once a step has links of its own.
        times = replace(times, operators=parts.times.operators)
        return JobParts(parts.job, parts.links, times)

    def least_bytes(self, layout: JobLayout, room: float) -> float:
        """What the rank that needs most takes, about: chunks with equally many layers. A layout
        that needs more than `room` with one chunk's values is not looked at further."""
        job = step_job(self.config, layout)
        chunks = layout.pipeline * chunks_on_a_rank(layout.schedule)
        # Of layers with experts and without, the smaller ones everywhere.
        kinds = (job, job.dense) if job.dense_layers else (job,)
        one = min(kept_bytes(each, layout) for each in kinds) * max(1, job.layers // chunks)
        layers = job.layers // layout.pipeline
        parameters = rank_parameters(
            job, layout, layers, first=False, last=False, dense=min(layers, job.dense_layers)
        )
        least = rank_memory(job, layout, parameters, one, last=False).total
        if least > room:
            return least
        found = []
        for (layers, first, last, dense), bytes_kept in self._kept_by_ranks(layout, job).items():
            parameters = rank_parameters(job, layout, layers, first=first, last=last, dense=dense)
            found.append(rank_memory(job, layout, parameters, bytes_kept, last=last).total)
        return max(found)

    def least_ns(self, layout: JobLayout) -> float:
        """Raises InputError for a model too small for the schedule."""
        parts, shapes, facts = self.parts(layout), self._shapes(layout), facts_of(layout)
        on = facts.rank_of
        ends = min(self._ends(parts, layout, shapes, r, on) for r in {0, layout.pipeline - 1})
        return self._passes_ns(parts, layout, shapes, facts) + ends

    def of_group_ns(self, layout: JobLayout) -> float:
        """A bound of all layouts that share weights over replicas in another way, from the actions
        of few micro-batches; 0 without a pipeline, where the bound itself takes no longer."""
        if layout.pipeline == 1:
            return 0.0
        try:
            parts, shapes, facts = self.parts(layout), self._shapes(layout), few_facts_of(layout)
        except InputError:  # each layout is judged on its own
            return 0.0
        return self._passes_ns(parts, layout, shapes, facts)

    def _passes_ns(
        self,
        parts: JobParts,
        layout: JobLayout,
        shapes: Mapping[int, ChunkShape],
        facts: ScheduleFacts,
    ) -> float:
        on, cuts = facts.rank_of, facts.cuts_backwards
        pairs = _pairs(layout, facts)
        work, saved = [0.0] * layout.pipeline, [0.0] * layout.pipeline
        there: dict[int, float] = {}
        back: dict[int, float] = {}
        way = way_back = 0.0
        late = [0.0] * layout.pipeline
        of = {shape: _chunk_ns(parts.times, shape) for shape in dict.fromkeys(shapes.values())}
        for chunk, shape in shapes.items():
            forward, backward, weight, paired = of[shape]
            alone, rank = forward + backward, on[chunk]
            there.setdefault(rank, way)
            back.setdefault(rank, way_back)
            way += forward
            way_back += backward - weight * cuts
            late[rank] += layout.micro_batches * weight * cuts
            work[rank] += layout.micro_batches * alone
            saved[rank] += alone - paired
        chunks = len(shapes) / layout.pipeline
        found = []
        for rank in range(layout.pipeline):
            busy = work[rank] - pairs[rank] * saved[rank] / chunks
            # Gradients of weights may be computed while the last micro-batch goes back.
            found.append(there[rank] + busy + max(0.0, back[rank] - late[rank]))
        return max(*found, way + way_back)

    def _ends(
        self,
        parts: JobParts,
        layout: JobLayout,
        shapes: Mapping[int, ChunkShape],
        rank: int,
        on: Mapping[int, int],
    ) -> float:
        own = [chunk for chunk in shapes if on[chunk] == rank]
        ends = ends_of(parts.links, parts.times, layout, shapes, own)
        return 1e9 * (ends.gather_exposed_s + ends.least_reduce_exposed_s + ends.optimizer_s)

    def _shapes(self, layout: JobLayout) -> Mapping[int, ChunkShape]:
        job = step_job(self.config, layout)
        head = job.vocab * job.hidden / job.active_parameters
        chunks = layout.pipeline * chunks_on_a_rank(layout.schedule)
        return _even_shapes(job.layers, chunks, head, job.dense_layers)

    def _kept_by_ranks(self, layout: JobLayout, job: StepJob) -> _Kept:
        """Shared by layouts that differ in how replicas share weights."""
        key = (
            layout.schedule,
            layout.pipeline,
            layout.micro_batches,
            layout.micro_batch,
            layout.tensor,
            layout.context,
            layout.context_method,
            layout.expert,
            layout.expert_load,
            layout.recompute,
        )
        if key not in self._kept:
            self._kept[key] = self._count_kept(layout, job)
        return self._kept[key]

    def _count_kept(self, layout: JobLayout, job: StepJob) -> _Kept:
        if layout.pipeline == 1:
            kept = layers_bytes(kept_bytes, job, layout, job.layers, job.dense_layers)
            return {(job.layers, True, True, job.dense_layers): kept}
        shapes = self._shapes(layout)
        facts = facts_of(layout)
        sizes = {chunk: (shape.layers, shape.dense) for chunk, shape in shapes.items()}
        kept_of = {
            size: layers_bytes(kept_bytes, job, layout, *size) for size in set(sizes.values())
        }
        found: _Kept = {}
        for own, held in zip(facts.chunks_of, facts.kept, strict=True):
            mine = [sizes[chunk] for chunk in own]
            layers, dense = sum(each[0] for each in mine), sum(each[1] for each in mine)
            kept = held * min(kept_of[each] for each in mine)
            of = layers, 0 in own, len(shapes) - 1 in own, dense
            found[of] = max(found.get(of, 0.0), kept)
        return found


@lru_cache(maxsize=256)
def _even_shapes(layers: int, chunks: int, head: float, dense: int) -> Mapping[int, ChunkShape]:
    return chunk_shapes(even_cuts(layers, chunks, head), layers, dense)


def _pairs(layout: JobLayout, facts: ScheduleFacts) -> tuple[int, ...]:
    """By rank: how many actions run two strands."""
    more = layout.micro_batches - facts.micro_batches
    if not facts.interleaves:
        return facts.pairs
    return tuple(n + chunks_on_a_rank(layout.schedule) * more for n in facts.pairs)


def _chunk_ns(times: PassTimes, shape: ChunkShape) -> tuple[float, float, float, float]:
    """(forward, backward, of which gradients of weights, both side by side at least) in ns."""
    forward, backward = (
        times.of_passes(((direction, Share.WHOLE, shape),)) for direction in Direction
    )
    weight = times.of_passes(((Direction.BACKWARD, Share.WEIGHT, shape),)).ns
    return forward.ns, backward.ns, weight, _paired(times, forward, backward)


def _paired(times: PassTimes, forward: PassCost, backward: PassCost) -> float:
    """What two passes side by side take at least."""
    alone = forward.ns + backward.ns
    links = times.operators.links.contention
    compute = alone - sum(forward.exposed.values()) - sum(backward.exposed.values())
    slower = min((factor for factor, _ in links.factors.values()), default=1.0)
    busiest, carried = 0.0, dict[str, float]()
    for cost in (forward, backward):
        for lane, ns in cost.communication.items():
            link = links.links.get(lane, lane)
            carried[link] = carried.get(link, 0.0) + ns
    busiest = max(carried.values(), default=0.0)
    return min(alone, max(compute + busiest * (1 - 1 / slower), busiest))


def bound_or_none(bounds: Bounds, layout: JobLayout) -> float | None:
    """The bound of a layout; None if its schedule cannot run so."""
    try:
        return bounds.least_ns(layout)
    except InputError:
        return None
