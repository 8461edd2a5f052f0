"""The best layouts of a job on a cluster: bounds for all, simulation for the best few.

Layouts that do not fit in memory are left out by a bound. The others are simulated in the order of
their bounds (`layout_order`), until the bound of the next one is above the tenth best that was
found, so that no layout of the space is better than what is found, unless `MOST` were simulated
before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.rules import check
from interlace.schedules.finder import split_options
from interlace.strategy.chunk_cuts import split_names
from interlace.strategy.job_layout import JobLayout, with_layout
from interlace.strategy.layout_order import LayoutOrder
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.lower_bounds import Bounds
from interlace.strategy.rank_memory import MemoryParts
from interlace.strategy.schedule_facts import interleaves
from interlace.strategy.simulated_job import SimulatedJob, simulate_job
from interlace.strategy.steady_step import SteadyStep, steady_step

TOP = 10
MOST = 500
"""Layouts that are simulated at most: a choice that keeps a search within a minute or two. Of
Qwen3-235B on 512 devices 463 show which is the best."""
SPARE = 0.06
"""Share of a device's memory that a layout leaves to the allocator, the context and NCCL."""
WORTH = 0.01
"""Gain of two strands below which they are not proposed: a choice."""
SearchProgress = Callable[[str], None]


@dataclass(frozen=True)
class FoundLayouts:
    """What a search found."""

    space: LayoutSpace
    best: tuple[SimulatedJob, ...]
    """The fastest first; of layouts that differ only in how replicas share weights, one."""
    one_strand: SimulatedJob | None
    """The fastest of those that run one strand at a time."""
    two_strands: SimulatedJob | None
    """The fastest of those that run two."""
    looked_at: int
    too_large: int
    """Of those whose bounds were not too long anyway."""
    simulated: int
    exhaustive: bool
    """Whether no other layout of the space can be better than those found."""

    @property
    def chosen(self) -> SimulatedJob:
        """The fastest; one strand at a time, if two gain less than `WORTH`."""
        first, one = self.best[0], self.one_strand
        if one is not None and interleaves(first.layout) and self.gain < WORTH:
            return one
        return first

    @property
    def gain(self) -> float:
        """By how much the best layout of two strands is faster than the best of one at a time;
        below 0 if it is slower, and 0 if there is none of either."""
        if self.two_strands is None or self.one_strand is None:
            return 0.0
        return self.one_strand.seconds / self.two_strands.seconds - 1

    def run(self) -> RunConfig:
        """The run file of the chosen layout."""
        found = self.chosen
        staged = found.layout.pipeline > 1
        return with_layout(self.space.config, found.layout, split_names(found.cuts) * staged)


def search_layouts(space: LayoutSpace, progress: SearchProgress = lambda _: None) -> FoundLayouts:
    """Raises InputError if no layout is legal, or none fits in memory."""
    bounds = Bounds(space.config, space.cluster)
    room = (1 - SPARE) * space.cluster.memory_gib * 2**30
    order = LayoutOrder(space.layouts(), bounds, room)
    progress(f"{order.count:,} layouts")
    queue = _Queue(space, bounds, room, order)
    found = queue.best(TOP, MOST)
    if not found:
        raise _too_large(space, bounds, order.able) if order.able else _no_layout(space)
    progress(f"simulated {len(queue.seen)} of them")
    alone = queue.best_of(found, lambda layout: not interleaves(layout))
    exhaustive = queue.exhaustive
    paired = queue.best_of(found, interleaves)
    return FoundLayouts(
        space=space,
        best=tuple(sorted((queue.whole(each) for each in found), key=_length)),
        one_strand=alone,
        two_strands=paired,
        looked_at=order.count,
        too_large=order.too_large,
        simulated=len(queue.seen),
        exhaustive=exhaustive,
    )


class _Queue:
    """Layouts in the order of their bounds, simulated as far as needed."""

    def __init__(
        self,
        space: LayoutSpace,
        bounds: Bounds,
        room: float,
        order: LayoutOrder,
    ) -> None:
        self._space, self._bounds, self._room = space, bounds, room
        self._order = order
        self.seen: dict[JobLayout, SteadyStep | None] = {}
        self._whole: dict[JobLayout, SimulatedJob] = {}
        self.exhaustive = True

    def best(
        self, top: int, most: int, wanted: Callable[[JobLayout], bool] = lambda _: True
    ) -> list[SteadyStep]:
        """The `top` fastest of those `wanted`, after so many simulations at most."""
        found: dict[tuple[object, ...], SteadyStep] = {}
        ran = 0
        for bound, layout in self._order:
            if not wanted(layout):
                continue
            times = sorted(each.step_ns for each in found.values())
            if len(times) >= top and bound >= times[top - 1]:
                break
            if ran >= most:
                self.exhaustive = False
                break
            ran += layout not in self.seen
            one = self._simulated(layout)
            if one is not None:
                key = _alike(layout)
                if key not in found or _rank(one) < _rank(found[key]):
                    found[key] = one
        return sorted(found.values(), key=_rank)[:top]

    def best_of(
        self, found: list[SteadyStep], wanted: Callable[[JobLayout], bool]
    ) -> SimulatedJob | None:
        """The fastest of those `wanted`: of the ones `found`, or else by a search of its own."""
        own = [each for each in found if wanted(each.layout)] or self.best(1, MOST // 2, wanted)
        return min((self.whole(each) for each in own), key=_length, default=None)

    def whole(self, found: SteadyStep) -> SimulatedJob:
        """The same with every micro-batch."""
        layout = found.layout
        if layout not in self._whole:
            space, parts = self._space, self._bounds.parts(layout)
            self._whole[layout] = simulate_job(space.config, space.cluster, layout, parts)
        return self._whole[layout]

    def _simulated(self, layout: JobLayout) -> SteadyStep | None:
        """None if it does not fit after all, or a rule is against it."""
        if layout not in self.seen:
            self.seen[layout] = self._simulate(layout)
        return self.seen[layout]

    def _simulate(self, layout: JobLayout) -> SteadyStep | None:
        space = self._space
        try:
            check(with_layout(space.config, layout))
            parts = self._bounds.parts(layout)
            found = steady_step(space.config, layout, parts)
        except InputError:
            return None
        return found if found.peak.total <= self._room else None


def _alike(layout: JobLayout) -> tuple[object, ...]:
    name, _ = split_options(layout.schedule)
    split = layout.tensor, layout.context, layout.context_method, layout.expert, layout.pipeline
    return *split, layout.micro_batch, layout.recompute, name


def _rank(found: SteadyStep) -> tuple[int, float]:
    return found.step_ns, found.peak.total


def _length(found: SimulatedJob) -> int:
    return found.step.step_ns


def _no_layout(space: LayoutSpace) -> InputError:
    kept = ", ".join(f"{name} = {value}" for name, value in space.kept.items())
    return InputError(
        f"--global-batch {space.global_batch} sequences cannot be dealt to replicas on "
        f"{space.devices} devices of {space.cluster.name}" + (f" with {kept}" if kept else ""),
        hint="give a global batch with more divisors in common with the number of devices, or let "
        "go of what is kept: its default leaves a field to the search",
    )


def _too_large(space: LayoutSpace, bounds: Bounds, layouts: list[JobLayout]) -> InputError:
    # Without a limit: what is above one is not counted to its end.
    layout = min(layouts, key=lambda each: bounds.least_bytes(each, float("inf")))
    parts = least_parts(space, bounds, layout)
    named = ", ".join(f"{n} {b / 2**30:.1f}" for n, b in parts.parts().items() if b > 0)
    return InputError(
        f"the model does not fit on {space.devices} x {space.cluster.name}: the least "
        f"found is {parts.total / 2**30:.1f} GiB a rank ({named}), by {layout.text}, micro-batches "
        f"of {layout.micro_batch}, recompute {layout.recompute}, schedule {layout.schedule}; a "
        f"device has {space.cluster.memory_gib:.1f} GiB, of which {SPARE:.0%} are left to the "
        "allocator",
        hint="use more devices, a shorter sequence, or let go of fields that are kept",
    )


def least_parts(space: LayoutSpace, bounds: Bounds, layout: JobLayout) -> MemoryParts:
    """What the rank that needs most holds, by simulation."""
    return simulate_job(space.config, space.cluster, layout, bounds.parts(layout)).peak


def in_16_bits(config: RunConfig) -> RunConfig:
    """With the type in which GPUs are timed, where the run file leaves it at its default."""
    return replace(config, train=replace(config.train, dtype="bfloat16"))
