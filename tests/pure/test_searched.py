"""The search for a pipeline of one model: what it gives runs, fits, repeats itself, and is never
longer than a schedule of the package on the same model."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import InputError
from interlace.ir.stage_messages import chain
from interlace.schedules.finder import find
from interlace.schedules.schedule_text import write_schedule
from interlace.schedules.sends_receives import check_messages, with_messages
from interlace.schedules.stage import StageSchedule
from interlace.schedules.torch_csv import to_csv
from interlace.schedules.verify import check_ranks
from interlace.search.pipelines.chunk_layouts import (
    ChunkLayout,
    balanced,
    equal_layers,
    looped,
    zigzag,
)
from interlace.search.pipelines.climbing import has_room
from interlace.search.pipelines.fixed_orders import fixed_pipelines
from interlace.search.pipelines.greedy_orders import greedy_order, rules_to_try
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.search.pipelines.pipeline_search import (
    SearchedPipeline,
    layouts_to_try,
    search_pipeline,
)
from interlace.search.pipelines.step_clock import StepClock, as_actions, as_passes
from interlace.sim.pipeline_step import simulate_pipeline
from pipeline_models import problems, uneven

QUICK = 60
"""Changes that a search tries here."""


def check_sound(found: SearchedPipeline) -> None:
    """Its actions pass the proofs of any schedule; its numbers are the simulator's."""
    problem, chunks = found.problem, len(found.layout.starts)
    ranks = check_ranks(
        found.actions, micro_batches=problem.micro_batches, chunks=chunks, name="found"
    )
    assert ranks == found.layout.rank_of
    check_messages(with_messages(found.actions, chain(chunks)), edges=chain(chunks), name="found")
    step = simulate_pipeline(found.actions, found.layout.costs(problem, found.actions))
    assert (step.step_ns, step.peak_bytes) == (found.step.step_ns, found.step.peak_bytes)


@settings(deadline=None, max_examples=25)
@given(problem=problems(), data=st.data())
def test_a_result_is_sound_and_no_longer_than_any_fixed_schedule(
    problem: PipelineProblem, data: st.DataObject
) -> None:
    """With and without a limit of memory, under which either something fits or nothing does."""
    free = search_pipeline(problem, tries=QUICK)
    check_sound(free)
    assert free.floor_ns <= free.step.step_ns <= min(each.length_ns for each in free.fixed)
    limit = data.draw(st.integers(1, max(1, *free.peak_bytes)))
    tight = replace(problem, memory_bytes=limit)
    fitting = [each.length_ns for each in fixed_pipelines(tight) if each.fits]
    clocks = [StepClock(tight, layout) for layout in layouts_to_try(tight)]
    try:
        found = search_pipeline(tight, tries=QUICK)
    except InputError:  # layouts that are drawn may have room where these have none
        assert not fitting
        assert not any(map(has_room, clocks))
        return
    check_sound(found)
    assert max(found.peak_bytes) <= limit
    assert found.floor_ns <= found.step.step_ns <= min(fitting, default=found.step.step_ns)


@settings(deadline=None, max_examples=25)
@given(problem=problems())
def test_the_clock_is_the_simulator(problem: PipelineProblem) -> None:
    """Times and peaks of every schedule of the package, and of lists by rules, which keep to their
    limits and are sound."""
    for each in fixed_pipelines(problem):
        step = simulate_pipeline(each.actions, each.layout.costs(problem, each.actions))
        held = each.layout.held_bytes(problem)
        peaks = [a + b for a, b in zip(held, step.peak_bytes, strict=True)]
        assert (step.step_ns, max(peaks)) == (each.length_ns, each.peak_bytes)
    layout = balanced(problem, looped(problem.ranks, 1))
    clock = StepClock(problem, layout)
    for rules in rules_to_try(clock)[:8]:
        made = greedy_order(clock, rules)
        assert made is not None
        actions = as_actions(made[1], clock.chunks)
        check_ranks(actions, micro_batches=problem.micro_batches, chunks=clock.chunks, name="rules")
        step = simulate_pipeline(actions, layout.costs(problem, actions))
        assert (step.step_ns, as_passes(actions)) == made
        if not (problem.overlap or rules.cut_first or rules.cut_last):
            assert all(a <= b for a, b in zip(step.peak_chunks, rules.ahead, strict=True))


def test_the_uneven_model_gains_what_the_page_says() -> None:
    """Over interleaved 1F1B with an equal number of layers in each chunk; twice the same."""
    found = search_pipeline(uneven(4, 32), tries=400)
    check_sound(found)
    usual = next(
        each for each in found.fixed if (each.schedule, each.cut) == ("interleaved", "equal layers")
    )
    assert usual.layout.starts == (0, 5, 9, 13, 17, 21, 25, 29)
    assert usual.length_ns / found.step.step_ns > 1.26
    assert found.step.step_ns < 1.05 * found.floor_ns
    again = search_pipeline(uneven(4, 32), tries=400)
    assert (again.layout, again.actions) == (found.layout, found.actions)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_number_of_ranks(ranks: int) -> None:
    """What is found for few and many micro-batches passes the verifier, and is no longer than any
    fixed schedule."""
    for count in (1, 7):
        found = search_pipeline(uneven(ranks, count, most_chunks=2), tries=20)
        check_sound(found)
        assert found.step.step_ns <= min(each.length_ns for each in found.fixed)


def test_a_limit_of_memory_is_kept_and_named() -> None:
    """The numbers are those of one micro-batch at a time."""
    limit = 1900
    found = search_pipeline(uneven(4, 8, memory_bytes=limit), tries=QUICK)
    check_sound(found)
    assert max(found.peak_bytes) <= limit
    assert all(each.fits == (each.peak_bytes <= limit) for each in found.fixed)
    with pytest.raises(InputError, match=r"takes 1\.3 KiB on rank \d, of which 1\.1 KiB are held"):
        search_pipeline(uneven(4, 8, memory_bytes=1300), tries=QUICK)


@given(
    work=st.lists(st.integers(0, 30), min_size=3, max_size=9).filter(any),
    ranks=st.integers(1, 3),
)
def test_one_chunk_on_a_rank_is_cut_as_well_as_can_be(work: list[int], ranks: int) -> None:
    """The busiest rank is no busier than under the best of all cuts."""
    units = tuple(
        ModelUnit(name=f"layers.{n}", forward_ns=ns, input_ns=0, weight_ns=0)
        for n, ns in enumerate(work)
    )
    problem = PipelineProblem(units=units, ranks=ranks, micro_batches=1)
    layout = balanced(problem, looped(ranks, 1))
    every = [(0, *cut) for cut in combinations(range(1, len(units)), ranks - 1)]
    best = min(max(sum(work[a:b]) for a, b in pairwise((*cut, len(work)))) for cut in every)
    assert max(layout.loads_ns(units, ranks)) == best


def test_places_and_equal_layers() -> None:
    """Around the ranks, there and back; and a cut as users make it."""
    assert looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert zigzag(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    problem = uneven(4, 1)
    assert equal_layers(problem, looped(4, 1)).split_at(problem.units) == (
        "layers.8", "layers.16", "layers.24",
    )  # fmt: skip


def test_a_found_schedule_is_written_and_read_back(tmp_path: Path) -> None:
    """As text and as CSV, by name of the file; and as a rank of a pipeline takes it."""
    found = search_pipeline(uneven(2, 6, most_chunks=2), tries=QUICK)
    own = find(found.schedule)
    assert own.name == "searched"
    assert own.of_ranks(2, 6) == found.actions
    assert own.split_at == found.split_at
    assert len(found.split_at) == len(found.layout.starts) - 1
    as_text = write_schedule(found.actions, found.split_at)
    for end, text in ((".txt", as_text), (".csv", to_csv(found.actions))):
        file = tmp_path / f"found{end}"
        file.write_text(text)
        read = find(str(file))
        assert read.split_at == (found.split_at if end == ".txt" else ())
        assert read.of_ranks(2, 6) == found.actions
        stage = StageSchedule(read.name, read.function, ranks=2, rank=1)
        assert stage.rank_of == found.layout.rank_of
        assert set(stage.phases(stage.graphs)) == {
            action.phase for count in range(1, 7) for action in read.of_ranks(2, count)[1]
        }


def test_a_list_runs_fewer_micro_batches_and_no_more(tmp_path: Path) -> None:
    """What is left of it is sound, as `of_ranks` verifies."""
    file = tmp_path / "zb.txt"
    file.write_text(write_schedule(find("zb_v").of_ranks(3, 9)))
    schedule = find(str(file))
    for count in range(1, 10):
        assert len(schedule.of_ranks(3, count)) == 3
    with pytest.raises(InputError, match="steps of up to 9 micro-batches, not 10"):
        schedule.of_ranks(3, 10)
    with pytest.raises(InputError, match="made for 3 ranks of 2 chunks, not for 2 of 2"):
        schedule.of_ranks(2, 9)
    with pytest.raises(InputError, match="cannot read"):
        find(str(tmp_path / "none.txt"))
    file.write_text("rank 0: forward_0 1, backward_0 1\nrank 1:\n")
    with pytest.raises(InputError, match="a rank without actions"):
        find(str(file))
    file.write_text("rank 0: forward_0 1\nrank 1: forward_2 1\n")
    with pytest.raises(InputError, match="3 chunks on 2 ranks"):
        find(str(file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks = 0"),
        ({"ranks": 35}, "34 units cannot be cut into chunks for 35 ranks"),
        ({"ranks": 300}, "300 ranks are too many"),
        ({"overlap": 1.5}, "overlap = 1.5 is no share"),
        ({"units": uneven(1, 1).units[:1] * 0}, "0 units cannot be cut"),
    ],
)
def test_numbers_that_make_no_pipeline(changes: dict[str, object], message: str) -> None:
    """Are refused before anything is searched."""
    with pytest.raises(InputError, match=message):
        replace(uneven(1, 1), **changes)  # type: ignore[arg-type]


def test_units_that_cost_nothing_or_less() -> None:
    """The same."""
    unit = ModelUnit(name="a", forward_ns=0, input_ns=0, weight_ns=0)
    with pytest.raises(InputError, match="take no time"):
        PipelineProblem(units=(unit,), ranks=1, micro_batches=1)
    worse = ModelUnit(name="b", forward_ns=1, input_ns=-1, weight_ns=3)
    with pytest.raises(InputError, match="unit 'b' has a input time below 0"):
        PipelineProblem(units=(worse,), ranks=1, micro_batches=1)
    assert ChunkLayout((0,), (0,)).split_at((unit,)) == ()
