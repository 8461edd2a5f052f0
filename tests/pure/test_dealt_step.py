"""Steps whose passes take measured times, dealt anew; and what a step does around its actions."""

from dataclasses import replace
from statistics import fmean

import pytest

from interlace.schedules.finder import find
from interlace.sim.dealt_step import simulate_dealt
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import ACTION, END, PipelineStep, simulate_pipeline

RANKS, COUNT = 4, 12
ACTIONS = find("one_f_one_b").of_ranks(RANKS, COUNT)
EVEN = PipelineCosts(chunks=[ChunkCosts(forward_ns=100, input_ns=60, weight_ns=40)] * RANKS)


def lasted(*shares: float) -> dict[str, list[int]]:
    """By phase: times of its actions, which are these shares of the mean, by turns."""
    found: dict[str, list[int]] = {}
    for actions in ACTIONS:
        for action in actions:
            own = found.setdefault(action.phase, [])
            own.append(round(EVEN.action_ns(action) * shares[len(own) % len(shares)]))
    return found


def behind(ns: int) -> dict[str, list[int]]:
    """By phase: what a rank does behind each action but its last."""
    found: dict[str, list[int]] = {}
    for actions in ACTIONS:
        for action in actions[:-1]:
            found.setdefault(action.phase, []).append(ns)
    return found


def busy_ns(step: PipelineStep) -> list[int]:
    """By rank: the sum of its actions."""
    return [
        sum(span.duration_ns for span in timeline.spans if span.kind == ACTION)
        for timeline in step.timelines
    ]


def test_equal_times_make_the_step_of_their_mean() -> None:
    """With what lies between actions, before the first ones and behind the last."""
    around = replace(EVEN, before_ns=(7, 8, 9, 10), behind_ns=50)
    phases = lasted(1.0)
    between = replace(around, between_ns=dict.fromkeys(phases, 5))
    found = simulate_dealt(ACTIONS, around, phases, behind(5))
    assert found == simulate_pipeline(ACTIONS, between)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (30, 0), (0, 20), (30, 20)])
def test_a_step_has_a_start_and_an_end(before: int, after: int) -> None:
    """They make it longer by themselves, and all of it is bubble."""
    plain = simulate_pipeline(ACTIONS, EVEN)
    found = simulate_pipeline(ACTIONS, replace(EVEN, before_ns=(before,) * RANKS, behind_ns=after))
    assert found.step_ns == plain.step_ns + before + after
    assert found.bubble_ns == tuple(ns + before + after for ns in plain.bubble_ns)
    ends = [span for timeline in found.timelines for span in timeline.spans if span.kind == END]
    assert len(ends) == (RANKS if after else 0)


def test_uneven_times_make_longer_steps() -> None:
    """Each rank computes as long as with the mean, and waits longer; the same whenever asked."""
    phases = lasted(0.7, 1.3)
    assert [fmean(own) for own in phases.values()] == [fmean(own) for own in lasted(1).values()]
    found = simulate_dealt(ACTIONS, EVEN, phases, behind(0))
    even = simulate_pipeline(ACTIONS, EVEN)
    assert busy_ns(found) == busy_ns(even)
    assert 1.03 < found.step_ns / even.step_ns < 1.3
    assert found == simulate_dealt(ACTIONS, EVEN, phases, behind(0))
