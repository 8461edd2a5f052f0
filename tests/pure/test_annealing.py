"""Annealing of lists of passes: its compiled clock is the simulator's, its changes keep lists
sound, and what it finds fits, is as long as it says and is the same again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import InputError
from interlace.search.pipelines import annealing_kernel as kernel
from interlace.search.pipelines import pipeline_search
from interlace.search.pipelines.annealing import anneal, as_arrays, from_arrays, units_array
from interlace.search.pipelines.chunk_layouts import balanced, looped, zigzag
from interlace.search.pipelines.climbing import Candidate, ruled
from interlace.search.pipelines.fixed_orders import fixed_pipelines
from interlace.search.pipelines.greedy_orders import rules_to_try
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.step_clock import (
    B,
    F,
    I,
    PassLists,
    PassNumbers,
    StepClock,
    W,
    as_actions,
)
from interlace.search.pipelines.swaps import _sums_in_order
from interlace.sim.pipeline_step import simulate_pipeline
from pipeline_models import problems, uneven


def starts_of(problem: PipelineProblem) -> list[Candidate]:
    """The schedules of the package, and lists by rules."""
    found = [each.candidate() for each in fixed_pipelines(problem)]
    for place in (looped, zigzag):
        layout = balanced(problem, place(problem.ranks, 1))
        rules = rules_to_try(StepClock(problem, layout))[0]
        made = ruled(problem, layout, rules, "rules")
        assert made is not None
        found.append(made)
    return found


def passes_of(lists: PassLists) -> Counter[tuple[int, int, int]]:
    """How often lists have each pass, a whole backward as its halves."""
    return Counter(
        (each, chunk, number)
        for own in lists
        for action in own
        for what, chunk, number in action
        for each in ((I, W) if what == B else (what,))
    )


def is_due(own: Sequence[tuple[PassNumbers, ...]]) -> bool:
    """Whether gradients of weights follow those of inputs, and a whole backward comes when both of
    its halves are due, whatever the numbers."""
    seen: Counter[tuple[int, int]] = Counter()
    for action in own:
        for what, chunk, _ in action:
            for half in {B: (I, W), I: (I,), W: (W,)}.get(what, ()):
                seen[half, chunk] += 1
            ahead = seen[I, chunk] - seen[W, chunk]
            if ahead < 0 or (what == B and ahead):
                return False
    return True


def is_in_order(own: Sequence[tuple[PassNumbers, ...]]) -> bool:
    """Whether the passes of a chunk and kind are those of micro-batches 1, 2, 3 and so on."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for action in own:
        for what, chunk, number in action:
            for half in (I, W) if what == B else (what,):
                numbers.setdefault((half, chunk), []).append(number)
    return all(each == list(range(1, len(each) + 1)) for each in numbers.values())


@settings(deadline=None, max_examples=60)
@given(problem=problems(overlaps=(0.0, 0.25, 0.4)), data=st.data())
def test_changed_lists_are_timed_as_by_the_clock(
    problem: PipelineProblem, data: st.DataObject
) -> None:
    """Whatever is moved, cut, joined, paired or parted: no pass is lost, micro-batches of a chunk
    come in order, and length, memory and order of sums are those of `step_clock` and `swaps`."""
    start = data.draw(st.sampled_from(starts_of(problem)))
    clock, chunks = StepClock(problem, start.layout), len(start.layout.starts)
    lists, counts = as_arrays(start.lists)
    assert from_arrays(lists, counts) == [list(own) for own in start.lists]
    costs, held = np.zeros((7, chunks), np.int64), np.zeros(problem.ranks, np.int64)
    starts = np.array([*start.layout.starts, len(problem.units)])
    rank_of, units = np.array(start.layout.rank_of), units_array(problem.units)
    kernel.cost_chunks(units, starts, rank_of, problem.everywhere_bytes, costs, held)
    assert held.tolist() == clock.held
    ready = np.empty((2, chunks, problem.micro_batches + 1), np.int64)
    seen = np.zeros((4, chunks), np.int64)
    state = np.array([data.draw(st.integers(1, 2**63))], np.uint64)
    for _ in range(25):
        rank = data.draw(st.integers(0, problem.ranks - 1))
        before, held_before = lists[rank].copy(), counts[rank]
        size = kernel.change(lists[rank], counts[rank], problem.overlap > 0, state)
        if size < 0:
            assert (lists[rank] == before).all()
            continue
        counts[rank] = size
        due = is_due(from_arrays(lists, counts)[rank])
        assert kernel.numbered(lists[rank], size, seen) == due
        if not due:
            lists[rank], counts[rank] = before, held_before
            continue
        made = from_arrays(lists, counts)
        assert passes_of(made) == passes_of(start.lists)
        assert _sums_in_order(made[rank])
        assert is_in_order(made[rank])
        assert kernel.peak_bytes(lists[rank], size, costs) == clock.peak_bytes(made[rank])
        length = kernel.length_ns(lists, counts, costs, rank_of, problem.overlap, 1 << 62, ready)
        timed = clock.length_ns(made)
        assert length == (-1 if timed is None else timed)
        if timed:
            most = timed - 1
            over = kernel.length_ns(lists, counts, costs, rank_of, problem.overlap, most, ready)
            assert over == -1


@settings(deadline=None, max_examples=40)
@given(problem=problems(), data=st.data())
def test_what_annealing_finds_is_sound(problem: PipelineProblem, data: st.DataObject) -> None:
    """By the simulator; within the memory that its start takes; worth no less than its start."""
    start = data.draw(st.sampled_from(starts_of(problem)))
    limited = replace(problem, memory_bytes=max(1, start.peak_bytes))
    seed = data.draw(st.integers(0, 99))
    found = anneal(limited, start, 2000, seed)
    clock = StepClock(limited, found.layout)
    assert clock.length_ns(found.lists) == found.length_ns
    assert found.peak_bytes == clock.most_bytes(found.lists) <= limited.memory_bytes
    assert all(map(_sums_in_order, found.lists))
    assert all(map(is_in_order, found.lists))
    actions = as_actions(found.lists, clock.chunks)
    assert simulate_pipeline(actions, found.layout.costs(problem, actions)).step_ns == (
        found.length_ns
    )
    worth = start.length_ns * 0.003 / max(1, start.peak_bytes)
    assert found.length_ns + worth * found.peak_bytes <= (
        start.length_ns + worth * start.peak_bytes + 1e-6
    )
    again = anneal(limited, start, 2000, seed)
    assert (again.lists, again.layout) == (found.lists, found.layout)


def test_annealing_improves_the_best_of_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most where memory is tight. Without numba the result says so."""
    problem = uneven(4, 8, memory_bytes=1600)
    annealed = pipeline_search.search_pipeline(problem, tries=200)
    assert annealed.annealed
    monkeypatch.setattr(pipeline_search, "can_anneal", lambda: False)
    swapped = pipeline_search.search_pipeline(problem, tries=200)
    assert not swapped.annealed
    assert annealed.step.step_ns < swapped.step.step_ns


def test_draws_are_even() -> None:
    """From 0 up to a number, all of them about as often; as a seed says."""
    state = np.array([3], np.uint64)
    drawn = Counter(kernel.below(state, 5) for _ in range(5000))
    assert set(drawn) == set(range(5))
    assert max(drawn.values()) < 1.2 * min(drawn.values())
    again = np.array([3], np.uint64)
    assert Counter(kernel.below(again, 5) for _ in range(5000)) == drawn


def test_passes_beyond_the_bits_of_a_code() -> None:
    """Are refused by number; the greatest ones are kept."""
    most = ((F, 8191, 65535), (I, 8191, 65535))
    assert from_arrays(*as_arrays([[most]])) == [[most]]
    for pass_numbers in ((F, 8192, 1), (F, 0, 65536)):
        with pytest.raises(InputError, match="beyond what a search takes"):
            as_arrays([[(pass_numbers,)]])


def test_functions_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba raises RuntimeError where no folder can be written."""

    def njit(function=None, *, cache=False):
        if cache:
            raise RuntimeError("cannot cache function")
        return function

    monkeypatch.setattr(kernel, "njit", njit)
    assert kernel.compiled(Random) is Random
