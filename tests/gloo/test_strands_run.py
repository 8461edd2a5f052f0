"""Proves what holds while strands run: memory, recording, and that the gate can fail.

One launch of two ranks per child; the tests read the facts that it returns.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from processes import gloo_group, run_ranks
from strand_world import (
    MICRO_BATCHES,
    Case,
    World,
    differences,
    fingerprint,
    losses_of,
    open_world,
)
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.timeline import WAIT, Timeline, overlaps
from interlace.parallel.local_parts import local
from interlace.runtime.executor import StepRun
from interlace.step import Step
from phases import both

CASE = Case(heads=4, kv_heads=2)


def in_world(facts: Callable[[World], dict[str, Any]]) -> dict[str, Any]:
    with gloo_group():
        return facts(open_world(CASE, 2))


# Memory


def live_tensor_bytes() -> int:
    """Bytes of all storages that any plain tensor known to Python holds, each counted once."""
    gc.collect()
    storages = [
        tensor.untyped_storage()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    ]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class AliveAtEachOperator(TorchDispatchMode):
    """Counts, before each operator, how many of some tensors still exist."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.references = [weakref.ref(tensor) for tensor in tensors]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.append(sum(reference() is not None for reference in self.references))
        return func(*args, **(kwargs or {}))


def deaths_of_saved_values(runner: Step) -> list[int]:
    """How many values that forward saved for backward exist before each backward operator."""
    executor, batch = runner.executor, CASE.batches(0)[0]
    with torch.no_grad():
        run = StepRun(executor, [batch], None)
        run.run(executor.lowered["forward"], {"forward": 1})
        constants = {id(value) for value in executor._constants.values()}
        watched = [t for t in run.handed.values() if id(t) not in constants and t is not batch[0]]
        mode = AliveAtEachOperator([t for t in watched if t is not batch[1]])
        del watched
        with mode:
            run.run(executor.lowered["backward"], {"backward": 1})
    return mode.counts


def memory_facts(world: World) -> dict[str, Any]:
    runner = world.planned()
    places, live = [], []
    for step in range(5):
        losses = losses_of(runner, CASE.batches(step))
        gradients = [p.grad for p in world.weights.parameters]
        places.append([local(g).untyped_storage().data_ptr() for g in gradients if g.dim() > 1])
        del losses, gradients
        runner.losses = []
        live.append(live_tensor_bytes())
    buffers = {b.untyped_storage().data_ptr() for b in world.buffers.values()}
    return {
        "always the same buffers": all(place == places[0] for place in places),
        "gradients are buffers": set(places[0]) <= buffers,
        "live bytes": live,
        "saved values alive": deaths_of_saved_values(world.runner()),
    }


def memory() -> dict[str, Any]:
    """A child."""
    return in_world(memory_facts)


def test_memory_stays_the_same_and_saved_values_die_at_their_last_use() -> None:
    """Gradient buffers never move, no step leaves a tensor behind, backward frees as it goes."""
    for result in run_ranks("test_strands_run:memory", 2):
        facts = result.value
        assert facts["always the same buffers"]
        assert facts["gradients are buffers"]
        assert len(set(facts["live bytes"][1:])) == 1
        alive = facts["saved values alive"]
        assert alive[0] > 20
        assert alive == sorted(alive, reverse=True)
        assert alive[len(alive) // 2] < alive[0]
        assert alive[-1] <= 2


# Recording


def recorder_facts(world: World) -> dict[str, Any]:
    facts: dict[str, Any] = {"different": {}, "faults": {}, "collectives": {}, "kinds": {}}
    for name, runner in {"one": world.runner(), "two": world.planned()}.items():
        plain = fingerprint(world, losses_of(runner, CASE.batches(0)))
        timeline = runner.record(CASE.batches(0), label=name)
        recorded = fingerprint(world, runner.losses)
        facts["different"][name] = differences([plain], [recorded])
        facts["faults"][name] = timeline_faults(timeline, world)
        facts["collectives"][name] = [
            f"{s.micro_batch} {s.strand} {s.name}" for s in timeline.collectives
        ]
        facts["kinds"][name] = [
            f"{s.micro_batch} {s.strand} {s.kind}" for s in timeline.collectives
        ]
    eager = world.eager()
    plain = fingerprint(world, losses_of(eager, CASE.batches(0)))
    timeline = eager.record(CASE.batches(0), label="eager")
    facts["different"]["eager"] = differences([plain], [fingerprint(world, eager.losses)])
    facts["eager compute overlaps"] = len(
        overlaps(tuple(s for s in timeline.spans if s.lane == COMPUTE_LANE))
    )
    facts["kinds"]["eager"] = [f"{s.micro_batch} {s.strand} {s.kind}" for s in timeline.collectives]
    facts["dead operators"] = dead_operators(world)
    return facts


def dead_operators(world: World) -> list[str]:
    """Operators whose result nobody needs; tracing must leave none (attention once came twice)."""
    return [
        op.id
        for graph in (world.strands.op_graphs[phase] for phase in ("forward", "backward"))
        for op in graph.operators
        if not any(op.id in user.inputs for user in graph.operators)
        and op.id not in graph.outputs
        and not op.target.split(".")[1].endswith("_")  # adds to a gradient buffer
    ]


def timeline_faults(timeline: Timeline, world: World) -> list[str]:
    """Everything that a sound timeline of a whole step must not show."""
    faults = []
    compute = tuple(s for s in timeline.spans if s.lane == COMPUTE_LANE)
    faults += [f"{a.name} overlaps {b.name}" for a, b in overlaps(compute)]
    faults += [f"{s.name} ends before it starts" for s in timeline.spans if s.duration_ns < 0]
    faults += [f"{s.name} starts before 0" for s in timeline.spans if s.start_ns < 0]
    for span in timeline.collectives:
        if not span.end_known:
            faults.append(f"{span.name} was never seen to end")
        if not span.issue_ns <= span.start_ns <= span.end_ns <= timeline.length_ns:
            faults.append(f"{span.name} is out of order")
    graphs = world.strands.op_graphs
    for phase in ("forward", "backward"):
        for op in graphs[phase].operators:
            lanes = [s.lane for s in timeline.spans if (s.strand, s.name) == (phase, op.id)]
            waits = [
                s for s in timeline.spans if s.kind == WAIT and (s.strand, s.name) == (phase, op.id)
            ]
            own = lanes.count(op.lane) - (len(waits) if op.lane == COMPUTE_LANE else 0)
            if own != MICRO_BATCHES:
                faults.append(f"{phase}.{op.id} is there {own} times")
            if op.is_collective and len(waits) != MICRO_BATCHES:
                faults.append(f"{phase}.{op.id} is waited for {len(waits)} times")
    return faults + _misplaced_waits(timeline)


def _misplaced_waits(timeline: Timeline) -> list[str]:
    """A wait ends no earlier than its collective is issued, and lies within the timeline."""
    issued = {(s.strand, s.micro_batch, s.name): s for s in timeline.collectives}
    return [
        f"the wait for {wait.name} is out of place"
        for wait in timeline.spans
        if wait.kind == WAIT
        and not (
            issued[wait.strand, wait.micro_batch, wait.name].issue_ns
            <= wait.start_ns
            <= wait.end_ns
            <= timeline.length_ns
        )
    ]


def recording() -> dict[str, Any]:
    """A child."""
    return in_world(recorder_facts)


def test_a_recorded_step_has_the_same_bits_and_a_sound_timeline() -> None:
    """Also for eager; both ranks issue the same collectives in the same order.

    Strands issue exactly the collectives of eager autograd, and no operator for nothing.
    """
    results = [result.value for result in run_ranks("test_strands_run:recording", 2)]
    for facts in results:
        assert facts["different"] == {"one": [], "two": [], "eager": []}
        assert facts["faults"] == {"one": [], "two": []}
        assert facts["eager compute overlaps"] == 0
        assert facts["dead operators"] == []
        assert sorted(facts["kinds"]["one"]) == sorted(facts["kinds"]["eager"])
    assert results[0]["collectives"] == results[1]["collectives"]
    one, two = results[0]["collectives"]["one"], results[0]["collectives"]["two"]
    assert one != two
    assert sorted(one) == sorted(two)


# The gate can fail


def without_one_accumulation(world: World) -> tuple[Step, str]:
    """Two strands that forget to add one gradient; and the name of its parameter."""
    runner = world.planned()
    lowered = runner.executor.lowered[both(runner.executor.lowered)]
    graph = lowered.module.graph
    node = next(n for n in graph.nodes if n.target == torch.ops.aten.addmm_.default)
    place = list(graph.find_nodes(op="placeholder")).index(node.args[0])
    graph.erase_node(node)
    lowered.module.recompile()
    return runner, lowered.inputs[place][1].target


def reordered(world: World, order: list[int]) -> Step:
    """Two strands that take the wrong micro-batches."""
    runner = world.planned()
    step = runner.executor.step
    runner.executor.step = lambda batches, recorder: step([batches[i] for i in order], recorder)
    return runner


def mutation_facts(world: World) -> dict[str, Any]:
    """What the comparison of bits says about runners that are wrong on purpose."""
    batches = CASE.batches(0)
    one = fingerprint(world, losses_of(world.runner(), batches))
    runner, parameter = without_one_accumulation(world)
    runners = {
        "sound": world.planned(),
        "dropped": runner,
        "swapped": reordered(world, [0, 2, 1, 3]),
        "twice": reordered(world, [0, 1, 2, 2]),
    }
    facts = {
        k: differences([one], [fingerprint(world, losses_of(e, batches))])
        for k, e in runners.items()
    }
    return {**facts, "parameter": parameter, "gradients": len(world.weights.parameters)}


def mutations() -> dict[str, Any]:
    """A child."""
    return in_world(mutation_facts)


def test_the_comparison_notices_wrong_engines() -> None:
    """A gradient not added is named alone; swapped and repeated micro-batches are noticed."""
    for result in run_ranks("test_strands_run:mutations", 2):
        facts = result.value
        assert facts["sound"] == []
        assert facts["dropped"] == [f"step 1: gradient {facts['parameter']}"]
        gradients = [name for name in facts["swapped"] if "gradient" in name]
        assert len(gradients) > facts["gradients"] / 2
        assert {"step 1: loss 2", "step 1: loss 3"} <= set(facts["swapped"])
        assert "step 1: loss 1" not in facts["swapped"]
        assert "step 1: loss 4" in facts["twice"]
