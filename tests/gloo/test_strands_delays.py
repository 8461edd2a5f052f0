"""Proves that ranks which run apart neither hang nor change a bit, whatever the plan.

Pauses are compiled into the executable graphs before and after every operator, collective and
wait; which of them sleep, and for how long, differs between ranks, seeds and moments.
"""

import random
import time
from typing import Any

import pytest
from processes import gloo_group, run_ranks
from strand_world import Case, World, differences, fingerprint, losses_of, open_world

from interlace.search.planner import SEARCHES
from interlace.step import Step

CASE = Case(layers=1, heads=4, kv_heads=2, sequence=16)
SEEDS = 20
"""Per plan; with three searches, one strand and two random plans 120 steps in all."""
SLEEPS = 0.03
LONGEST_S = 0.004
RANDOM_PLANS = (2, 3)


class Pauses:
    """Sleeps now and then; each rank and seed draws its own."""

    def __init__(self) -> None:
        self.draw = random.Random()
        self.calls = 0
        self.slept: list[float] = []

    def __call__(self) -> None:
        self.calls += 1
        if self.draw.random() < SLEEPS:
            self.slept.append(self.draw.uniform(0, LONGEST_S))
            time.sleep(self.slept[-1])

    def compile_into(self, runner: Step) -> None:
        """Before and after everything that the runner's graphs call."""

        def pause() -> None:  # a graph calls functions, not objects
            self()

        for lowered in runner.executor.lowered.values():
            graph = lowered.module.graph
            for node in list(graph.nodes):
                if node.op == "call_function":
                    with graph.inserting_before(node):
                        graph.call_function(pause)
            with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
                graph.call_function(pause)
            lowered.module.recompile()


def plans(world: World) -> dict[str, Step]:
    costs = world.computed()
    runners = {search: world.planned(search, costs) for search in SEARCHES}
    runners |= {f"random {seed}": world.runner(world.random_plan(seed)) for seed in RANDOM_PLANS}
    return runners | {"one strand": world.runner()}


def facts(world: World) -> dict[str, Any]:
    """What differs from one undisturbed strand, by plan."""
    batches = CASE.batches(0)
    expected = fingerprint(world, losses_of(world.runner(), batches))
    pauses = Pauses()
    different: dict[str, list[str]] = {}
    for name, runner in plans(world).items():
        pauses.compile_into(runner)
        different[name] = []
        for seed in range(SEEDS):
            pauses.draw.seed(2 * seed + world.meshes.layout.get_rank())
            found = fingerprint(world, losses_of(runner, batches))
            different[name] += differences([expected], [found])
    return {
        "different": different,
        "calls": pauses.calls,
        "sleeps": len(pauses.slept),
        "first": pauses.slept[:3],
    }


def child() -> dict[str, Any]:
    with gloo_group():
        return facts(open_world(CASE, 2))


@pytest.mark.timeout(600)
def test_ranks_that_run_apart_neither_hang_nor_change_a_bit() -> None:
    """Losses, gradients and weights of 120 disturbed steps, on both ranks."""
    results = [r.value for r in run_ranks("test_strands_delays:child", 2, timeout_s=400)]
    for found in results:
        assert set(found["different"]) == {*SEARCHES, "random 2", "random 3", "one strand"}
        assert not any(found["different"].values()), found["different"]
        assert found["calls"] > SEEDS * 6 * 1000
        assert found["sleeps"] > SEEDS * 6 * 15
    assert results[0]["first"] != results[1]["first"]
