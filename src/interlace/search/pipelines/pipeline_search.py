"""The search for a pipeline of one model: cut, places and order chosen together (the idea of
AdaPtis, arXiv 2509.23722).

Layouts with equal work on all ranks are ordered by many rules; the best are improved, layout and
rules together, then lists pass by pass: by annealing where numba is installed, many shortly and the
best for longer, otherwise by a few thousand swaps. The schedules of the package take part with
their own orders, so no result is longer than the best of them that fits into memory. What is found
is verified like any schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from random import Random

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import chain
from interlace.schedules.listed import ListedSchedule
from interlace.schedules.sends_receives import check_messages, with_messages
from interlace.schedules.verify import check_ranks
from interlace.search.pipelines.chunk_layouts import (
    ChunkLayout,
    balanced,
    evened,
    looped,
    zigzag,
)
from interlace.search.pipelines.climbing import (
    Candidate,
    climb,
    has_room,
    least_bytes,
    ruled,
    trimmed,
)
from interlace.search.pipelines.fixed_orders import FixedPipeline, fixed_pipelines
from interlace.search.pipelines.greedy_orders import rules_to_try
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.step_clock import StepClock, as_actions
from interlace.search.pipelines.step_floor import step_floor_ns
from interlace.search.pipelines.swaps import joined, swap
from interlace.sim.pipeline_step import PipelineStep, simulate_pipeline
from interlace.text import size

TRIES = 6000
"""Changes that are tried by default; a choice. Each takes 1 to 6 ms for 4 ranks, 32 micro-batches
and up to 12 chunks. Annealing tries a thousand more for three in four of them, each in some us."""
_EXCHANGES = (0.0, 0.0, 0.1, 0.1, 0.3)
"""For each layout so many others are drawn, with these shares of exchanged chunks; a choice."""
_STARTS, _FINALISTS = 6, 3
"""How many pipelines are improved at first, and how many of them further; a choice."""
_ANNEALED, _AT_ONCE = 32, 1000
"""How many pipelines are annealed shortly; and changes that annealing tries for one. Choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPipeline:
    """What a search found, verified."""

    problem: PipelineProblem
    layout: ChunkLayout
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    step: PipelineStep
    """By simulation."""
    floor_ns: int
    """No pipeline of these units has a shorter step."""
    fixed: tuple[FixedPipeline, ...]
    """The schedules of the package on the same model."""
    origin: str
    """What the search started from: rules, or a schedule of the package."""
    annealed: bool
    """Whether annealing improved it, or swaps alone."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """By rank: the most that it holds and keeps at a time."""
        held = self.layout.held_bytes(self.problem)
        return tuple(a + b for a, b in zip(held, self.step.peak_bytes, strict=True))

    @property
    def split_at(self) -> tuple[str, ...]:
        """With which units chunks begin, but the first; sub-modules, if units are called so."""
        return self.layout.split_at(self.problem.units)

    @property
    def schedule(self) -> ListedSchedule:
        """What `compile_step(schedule=...)` takes; it says where chunks begin."""
        return ListedSchedule("searched", self.actions, self.split_at)


def search_pipeline(problem: PipelineProblem, *, tries: int = TRIES) -> SearchedPipeline:
    """A pipeline for this model, the shortest by simulation that was found within so many changes.
    It is the same whenever it is called, and no longer than any schedule of the package, cut for
    equal layers or equal work, that fits into memory.

    Raises InputError where no pipeline was found that fits into memory, with what is missing."""
    draw = Random(0)
    fixed = fixed_pipelines(problem)
    seeds = [each.candidate() for each in fixed if each.fits]
    layouts = layouts_to_try(problem)
    even = [evened(problem, layout, draw, share) for layout in layouts for share in _EXCHANGES]
    tried = list(dict.fromkeys([*layouts, *even]))
    starts = sorted(_starts(problem, tried), key=lambda each: each.key)
    if not starts and not seeds:
        raise _too_small(problem, layouts)
    climbed, best = _climbed(problem, starts, tries, draw)
    if can_anneal():
        known = sorted([*climbed, *best, *seeds], key=_by_key)
        found = _annealed(problem, known, starts, tries)
    else:
        found = _swapped(problem, sorted([*best, *seeds], key=_by_key), tries, draw)
    return _checked(problem, joined(problem, found), fixed)


def can_anneal() -> bool:
    """Whether numba is installed, which compiles the loop of annealing."""
    return find_spec("numba") is not None


WITHOUT_NUMBA = (
    "without numba the search tried hundreds of changes of the order of passes, and not millions\n"
    "hint: pip install 'interlace[search]'"
)
"""What is said where `can_anneal` is not."""


def _annealed(
    problem: PipelineProblem, known: Sequence[Candidate], starts: Sequence[Candidate], tries: int
) -> Candidate:
    """The best of `known`, in their order, and of `starts` annealed shortly, then the best of all
    for longer."""
    from interlace.search.pipelines.annealing import anneal  # noqa: PLC0415  numba

    drawn = _unlike([*known, *starts])[:_ANNEALED]
    short = tries * _AT_ONCE // (4 * len(drawn))
    first = [anneal(problem, joined(problem, found), short, n) for n, found in enumerate(drawn)]
    finalists = sorted([*first, *known], key=_by_key)[:_FINALISTS]
    long = tries * _AT_ONCE // (2 * len(finalists))
    last = [anneal(problem, found, long, n) for n, found in enumerate(finalists)]
    return min([*last, *finalists], key=_by_key)


def _swapped(
    problem: PipelineProblem, known: Sequence[Candidate], tries: int, draw: Random
) -> Candidate:
    """The best of `known`, in their order, with passes swapped."""
    finalists = _unlike(known)[:_FINALISTS]
    each = tries // (4 * len(finalists))
    last = [swap(problem, joined(problem, found), each, draw) for found in finalists]
    return min(last, key=_by_key)


def _climbed(
    problem: PipelineProblem, starts: Sequence[Candidate], tries: int, draw: Random
) -> tuple[list[Candidate], list[Candidate]]:
    """The first of `starts` after a quarter of the tries, and the best of them after another half,
    with as little memory as they need."""
    each = tries // (4 * max(1, min(_STARTS, len(starts))))
    first = [climb(problem, start, each, draw) for start in starts[:_STARTS]]
    best = sorted(first, key=_by_key)[:_FINALISTS]
    each = tries // (2 * max(1, len(best)))
    return first, [trimmed(problem, climb(problem, found, each, draw)) for found in best]


def _by_key(found: Candidate) -> tuple[int, int, int]:
    return found.key


def layouts_to_try(problem: PipelineProblem) -> list[ChunkLayout]:
    """Chunks around the ranks and there and back, balanced by work; and by bytes if these are
    limited."""
    found: dict[ChunkLayout, None] = {}
    most = min(problem.most_chunks, len(problem.units) // problem.ranks)
    for chunks in range(1, most + 1):
        for place in (looped, zigzag):
            rank_of = place(problem.ranks, chunks)
            found.setdefault(balanced(problem, rank_of))
            if problem.memory_bytes:
                layout = balanced(_by_bytes(problem), rank_of)
                found.setdefault(layout)
    return list(found)


def _by_bytes(problem: PipelineProblem) -> PipelineProblem:
    """The same where a unit's work is what one micro-batch needs of memory, in KiB."""
    units = [
        replace(u, forward_ns=1 + (u.held_bytes + max(u.saved_bytes, u.kept_bytes)) // 1024,
                input_ns=0, weight_ns=0)
        for u in problem.units
    ]  # fmt: skip
    return replace(problem, units=tuple(units))


def _starts(problem: PipelineProblem, layouts: Sequence[ChunkLayout]) -> list[Candidate]:
    """The best by rules on each layout on which anything fits into memory."""
    found = []
    for layout in layouts:
        rules = rules_to_try(StepClock(problem, layout))
        tried = [ruled(problem, layout, each, "rules") for each in rules]
        fitting = [each for each in tried if each is not None]
        if fitting:
            found.append(min(fitting, key=lambda each: each.key))
    return found


def _unlike(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of each origin and layout."""
    first: dict[tuple[str, ChunkLayout], Candidate] = {}
    for each in candidates:
        first.setdefault((each.origin, each.layout), each)
    return list(first.values())


def _checked(
    problem: PipelineProblem, found: Candidate, fixed: tuple[FixedPipeline, ...]
) -> SearchedPipeline:
    """The result, verified as a schedule and as messages, and simulated."""
    chunks = len(found.layout.starts)
    actions = as_actions(found.lists, chunks)
    check_ranks(actions, micro_batches=problem.micro_batches, chunks=chunks, name="searched")
    edges = chain(chunks)
    check_messages(with_messages(actions, edges), edges=edges, name="searched")
    step = simulate_pipeline(actions, found.layout.costs(problem, actions), label="searched")
    assert step.step_ns == found.length_ns, (step.step_ns, found.length_ns)
    return SearchedPipeline(
        problem=problem, layout=found.layout, actions=actions, step=step,
        floor_ns=step_floor_ns(problem), fixed=fixed, origin=found.origin,
        annealed=can_anneal(),
    )  # fmt: skip


def _too_small(problem: PipelineProblem, layouts: Sequence[ChunkLayout]) -> InputError:
    """What is missing, on the layout that lacks least."""

    def lack(layout: ChunkLayout) -> tuple[int, int, StepClock]:
        clock = StepClock(problem, layout)
        needs = [a + b for a, b in zip(clock.held, least_bytes(clock), strict=True)]
        return max(needs), needs.index(max(needs)), clock

    need, rank, clock = min((lack(layout) for layout in layouts), key=lambda each: each[:2])
    assert not has_room(clock), "rules that promise memory end wherever there is room"
    return InputError(
        f"no pipeline was found that fits into {size(problem.memory_bytes)} a rank: even one "
        f"micro-batch at a time takes {size(need)} on rank {rank}, of which "
        f"{size(clock.held[rank])} are held all the time",
        hint=f"give {size(need)} or more, more ranks, or smaller micro-batches",
    )
