"""The schedules of `schedules/` on a model, with their own chunks on ranks: what a search starts
from, and what it is compared with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import chunks_of
from interlace.schedules.finder import Schedule, find, names
from interlace.search.pipelines.chunk_layouts import ChunkLayout, balanced, equal_layers
from interlace.search.pipelines.climbing import Candidate
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.step_clock import StepClock, as_passes

EQUAL, BALANCED = "equal layers", "balanced"
"""How a model is cut."""
_CUTS: dict[str, Callable[[PipelineProblem, Sequence[int]], ChunkLayout]] = {
    EQUAL: equal_layers,
    BALANCED: balanced,
}
"""By how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPipeline:
    """A schedule with a name on a model."""

    schedule: str
    chunks: int
    """On each rank."""
    cut: str
    """`equal layers` or `balanced`."""
    layout: ChunkLayout
    actions: tuple[tuple[Action, ...], ...]
    length_ns: int
    peak_bytes: int
    """The most that a rank holds and keeps at a time."""
    fits: bool
    """Whether that is within the limit of memory."""

    def candidate(self) -> Candidate:
        """It as the search takes it."""
        passes = as_passes(self.actions)
        return Candidate(self.length_ns, self.layout, passes, None, self.schedule, self.peak_bytes)


def fixed_pipelines(problem: PipelineProblem) -> tuple[FixedPipeline, ...]:
    """Each schedule that runs on so many ranks, with equal layers and balanced, the fastest
    first."""
    layouts: dict[tuple[str, tuple[int, ...]], ChunkLayout] = {}
    found = []
    for schedule, chunks, actions in _orders(problem):
        if problem.ranks * chunks > len(problem.units):
            continue
        places = chunks_of(actions)
        rank_of = tuple(places[chunk] for chunk in sorted(places))
        for cut, make in _CUTS.items():
            key = cut, rank_of
            if key not in layouts:
                layouts[key] = make(problem, rank_of)
            found.append(_fixed(problem, schedule.name, chunks, cut, layouts[key], actions))
    return tuple(sorted(found, key=lambda each: (each.length_ns, each.peak_bytes)))


def _orders(
    problem: PipelineProblem,
) -> Iterator[tuple[Schedule, int, tuple[tuple[Action, ...], ...]]]:
    """(schedule, chunks on a rank, actions)."""
    ranks, count = problem.ranks, problem.micro_batches
    for schedule in map(find, names()):
        more = range(schedule.chunks + 1, problem.most_chunks + 1)
        for chunks in (schedule.chunks, *(more if schedule.declared.any_chunks else ())):
            for variant in schedule.variants(ranks):
                try:
                    actions = variant.of_ranks(ranks, count, chunks)
                except InputError:  # two_strand runs one stage
                    continue
                yield schedule, chunks, actions


def _fixed(
    problem: PipelineProblem,
    name: str,
    chunks: int,
    cut: str,
    layout: ChunkLayout,
    actions: tuple[tuple[Action, ...], ...],
) -> FixedPipeline:
    clock, lists = StepClock(problem, layout), as_passes(actions)
    length = clock.length_ns(lists)
    assert length is not None, "of_ranks verified it"
    return FixedPipeline(
        schedule=name, chunks=chunks, cut=cut, layout=layout, actions=actions, length_ns=length,
        peak_bytes=clock.most_bytes(lists), fits=clock.fits(lists),
    )  # fmt: skip
