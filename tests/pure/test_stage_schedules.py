"""A schedule as one rank of a pipeline runs it: its phases, messages and digests."""

import pytest

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import Receive, Send, chain
from interlace.schedules.finder import find, names
from interlace.schedules.stage import StageSchedule

PIPELINES = [name for name in names() if name not in ("two_strand", "one_strand")]


def stage(name: str, ranks: int, rank: int) -> StageSchedule:
    found = find(name)
    edges = chain(ranks * found.chunks)
    return StageSchedule(found.name, found.function, ranks=ranks, rank=rank, edges=edges)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_phases_are_those_of_any_number_of_micro_batches(name: str, ranks: int) -> None:
    """A plan has an order for each phase, and is made before anybody says how many there are."""
    for rank in {0, ranks // 2, ranks - 1}:
        schedule = stage(name, ranks, rank)
        phases = set(schedule.phases(schedule.graphs))
        for count in range(1, 2 * ranks + 8):
            actions = schedule.actions(count, schedule.graphs)
            assert {action.phase for action in actions} <= phases


@pytest.mark.parametrize("name", PIPELINES)
def test_a_rank_has_the_graphs_that_it_runs(name: str) -> None:
    """Of the chunks that lie on it, and of no other."""
    for rank in range(4):
        schedule = stage(name, 4, rank)
        own = {chunk for chunk, place in enumerate(schedule.rank_of) if place == rank}
        items = schedule.items(6)
        actions = [item for item in items if isinstance(item, Action)]
        assert tuple(actions) == schedule.actions(6, schedule.graphs)
        assert {slot.strand.chunk for action in actions for slot in action.slots} == own
        assert {slot.strand.graph for a in actions for slot in a.slots} <= set(schedule.graphs)
        assert all(item.rank != rank for item in items if isinstance(item, (Send, Receive)))


def test_ranks_of_one_pipeline_have_one_digest() -> None:
    """Which differs from that of another schedule."""
    digests = {
        name: {stage(name, 4, rank).digest(stage(name, 4, rank).graphs) for rank in range(4)}
        for name in PIPELINES
    }
    assert all(len(each) == 1 for each in digests.values())
    assert len({next(iter(each)) for each in digests.values()}) == len(PIPELINES)


def test_whole_backwards_do_not_run_in_halves() -> None:
    """A rank whose graphs are whole says what it would need."""
    schedule = stage("zb_v", 2, 0)
    whole = [name for name in schedule.graphs if "input" not in name and "weight" not in name]
    with pytest.raises(InputError, match="the backward graphs of this step are whole"):
        schedule.actions(4, whole)
