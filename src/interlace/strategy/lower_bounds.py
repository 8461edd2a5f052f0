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
from interlace.ir.actions import Direction, Share
from interlace.ir.stage_messages import chunks_of
from interlace.schedules.finder import find
from interlace.strategy.chunk_cuts import chunk_shapes, even_cuts
from interlace.strategy.job_layout import JobLayout, step_job
from interlace.strategy.pass_times import ChunkShape, PassCost, PassTimes
from interlace.strategy.rank_memory import kept_bytes, rank_memory, rank_parameters
from interlace.strategy.simulated_job import JobParts, parts_of, schedule_actions
from interlace.strategy.step_ends import ends_of

INTERLEAVING = ("two_strand", "folded", "eager_folded", "dual_pipe_v", "stp")
"""Schedules with two strands in an action."""
_FULL = 3
"""After so many micro-batches for each rank of a pipeline, a schedule keeps no more forwards."""


def interleaves(layout: JobLayout) -> bool:
    """Whether it runs two strands side by side."""
    return layout.schedule.partition("(")[0] in INTERLEAVING


@dataclass
class Bounds:
    """Bounds of layouts of one job, with all that layouts share."""

    config: RunConfig
    cluster: Cluster
    _times: dict[tuple[object, ...], PassTimes] = field(default_factory=dict)

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
        )
        times = self._times.setdefault(key, parts.times)
        # Only times of passes are shared: what is exchanged once a step has links of its own.
        times = replace(times, operators=parts.times.operators)
        return JobParts(parts.job, parts.links, times)

    def least_bytes(self, layout: JobLayout, room: float) -> float:
        """What the rank that needs most takes, about: chunks with equally many layers. A layout
        that needs more than `room` with one chunk's values is not looked at further."""
        job = step_job(self.config, layout)
        chunks = layout.pipeline * _chunks(layout.schedule)
        one = kept_bytes(job, layout) * max(1, job.layers // chunks)
        parameters = rank_parameters(
            job, layout, job.layers // layout.pipeline, first=False, last=False
        )
        least = rank_memory(job, layout, parameters, one, last=False).total
        if least > room:
            return least
        found = []
        for layers, first, last, kept in self._ranks(layout):
            parameters = rank_parameters(job, layout, layers, first=first, last=last)
            bytes_kept = kept_bytes(job, layout) * kept
            found.append(rank_memory(job, layout, parameters, bytes_kept, last=last).total)
        return max(found)

    def least_ns(self, layout: JobLayout) -> float:
        """Raises InputError for a model too small for the schedule."""
        parts = self.parts(layout)
        shapes = self._shapes(layout)
        on = _places(layout.schedule, layout.pipeline)
        pairs = self._pairs(layout)
        work, saved = [0.0] * layout.pipeline, [0.0] * layout.pipeline
        there: dict[int, float] = {}
        back: dict[int, float] = {}
        way = way_back = 0.0
        late = [0.0] * layout.pipeline
        cuts = _cuts_backwards(layout.schedule)
        for chunk, shape in shapes.items():
            forward, backward = (
                parts.times.of_passes(((direction, Share.WHOLE, shape),)) for direction in Direction
            )
            weight = parts.times.of_passes(((Direction.BACKWARD, Share.WEIGHT, shape),)).ns
            alone, rank = forward.ns + backward.ns, on[chunk]
            there.setdefault(rank, way)
            back.setdefault(rank, way_back)
            way += forward.ns
            way_back += backward.ns - weight * cuts
            late[rank] += layout.micro_batches * weight * cuts
            work[rank] += layout.micro_batches * alone
            saved[rank] += alone - self._paired(layout, parts.times, forward, backward)
        chunks = len(shapes) / layout.pipeline
        found = []
        for rank in range(layout.pipeline):
            busy = work[rank] - pairs[rank] * saved[rank] / chunks
            # Gradients of weights may be computed while the last micro-batch goes back.
            found.append(there[rank] + busy + max(0.0, back[rank] - late[rank]))
        ends = min(self._ends(parts, layout, shapes, r, on) for r in {0, layout.pipeline - 1})
        return max(*found, way + way_back) + ends

    def _pairs(self, layout: JobLayout) -> tuple[int, ...]:
        """By rank: how many actions run two strands."""
        if not interleaves(layout):
            return (0,) * layout.pipeline
        count = min(layout.micro_batches, _FULL * layout.pipeline + 1)
        chunks = _chunks(layout.schedule)
        more = chunks * (layout.micro_batches - count)
        return tuple(n + more for _, n in _counts(layout.schedule, layout.pipeline, count))

    def _paired(
        self, layout: JobLayout, times: PassTimes, forward: PassCost, backward: PassCost
    ) -> float:
        alone = forward.ns + backward.ns
        if not interleaves(layout):
            return alone
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
        return 1e9 * (ends.gather_exposed_s + ends.reduce_exposed_s + ends.optimizer_s)

    def _shapes(self, layout: JobLayout) -> Mapping[int, ChunkShape]:
        job = step_job(self.config, layout)
        head = job.vocab * job.hidden / job.active_parameters
        return _even_shapes(job.layers, layout.pipeline * _chunks(layout.schedule), head)

    def _ranks(self, layout: JobLayout) -> list[tuple[int, bool, bool, float]]:
        """(layers, has the embedding, has the head, layers whose values are kept) of each rank."""
        layers = self.config.model.layers
        if layout.pipeline == 1:
            return [(layers, True, True, float(layers))]
        shapes = self._shapes(layout)
        count = min(layout.micro_batches, _FULL * layout.pipeline)
        peaks = [n for n, _ in _counts(layout.schedule, layout.pipeline, count)]
        on = _places(layout.schedule, layout.pipeline)
        found = []
        for rank in range(layout.pipeline):
            own = [chunk for chunk in shapes if on[chunk] == rank]
            mine = [shapes[chunk].layers for chunk in own]
            kept = peaks[rank] * min(mine)
            found.append((sum(mine), 0 in own, len(shapes) - 1 in own, float(kept)))
        return found


@lru_cache(maxsize=256)
def _even_shapes(layers: int, chunks: int, head: float) -> Mapping[int, ChunkShape]:
    return chunk_shapes(even_cuts(layers, chunks, head), layers)


@lru_cache(maxsize=256)
def _chunks(schedule: str) -> int:
    return find(schedule).chunks


@lru_cache(maxsize=256)
def _places(schedule: str, ranks: int) -> Mapping[int, int]:
    """The rank of each chunk."""
    return chunks_of(schedule_actions(schedule, ranks, 2 if ranks == 1 else ranks))


@lru_cache(maxsize=256)
def _cuts_backwards(schedule: str) -> bool:
    """Whether it runs gradients of weights apart, on several ranks."""
    name = schedule.partition("(")[0]
    if name in ("one_strand", "two_strand"):
        return False
    actions = schedule_actions(schedule, 2, 8)
    return any(s.strand.share == Share.WEIGHT for own in actions for a in own for s in a.slots)


@lru_cache(maxsize=2048)
def _counts(schedule: str, ranks: int, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """By rank: most forwards whose values are kept at a time, as `sim.pipeline_step` counts, and
    how many actions run two strands. Not verified: what is simulated is."""
    found = []
    function, chunks = find(schedule).function, _chunks(schedule)
    for own in function(ranks=ranks, micro_batches=micro_batches, chunks=chunks):
        now = most = pairs = 0
        for action in own:
            pairs += len(action.slots) > 1
            now += sum(slot.strand.direction == Direction.FORWARD for slot in action.slots)
            most = max(most, now)
            now -= sum(
                slot.strand.direction == Direction.BACKWARD and slot.strand.share != Share.INPUT
                for slot in action.slots
            )
        found.append((most, pairs))
    return tuple(found)


def bound_or_none(bounds: Bounds, layout: JobLayout) -> float | None:
    """The bound of a layout; None if its schedule cannot run so."""
    try:
        return bounds.least_ns(layout)
    except InputError:
        return None
