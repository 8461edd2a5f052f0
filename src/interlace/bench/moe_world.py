"""One rank of the bench of experts: `python -m interlace.bench.moe_world JOB RESULT`.

All ways of running a step take turns in one run, with the same weights and data. Their gradients
are compared before: all of ours bit for bit, eager PyTorch's within rounding.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.moe_model import (
    ROUTINGS,
    MoeLlama,
    MoeSize,
    imbalance,
    micro_batches,
    set_weights,
)
from interlace.bench.moe_order import fixed_plan
from interlace.bench.moe_rivals import EagerExperts, deal_experts, eager_step
from interlace.bench.moe_strands import (
    BOTH,
    CALIBRATION_RATE,
    EAGER,
    FIXED,
    GROUPS,
    ONE,
    TWO,
    WAYS,
    rate_for,
)
from interlace.bench.pipeline_world import LIMIT, Batch, StepFunction, check_same, take_turns
from interlace.config import OverlapConfig, ParallelConfig
from interlace.errors import RunError
from interlace.ir.costs import CostTable
from interlace.ir.graph import Kind
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline, compute_ns, steady_state
from interlace.lab.hosts import set_own_rate
from interlace.measure.site_times import decompose_of
from interlace.measure.start_up import profile_strands
from interlace.parallel.data import data_layout
from interlace.parallel.expert import apply_expert_parallel
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import COUNTS_AXIS, EXPERT_AXIS, build_meshes
from interlace.ranks.launched import follow_launcher
from interlace.runtime.candidates import with_ends
from interlace.runtime.traced_strands import build_strands
from interlace.search.planner import make_plan
from interlace.sim.expected_step import expected_step_ns
from interlace.step import Step
from interlace.train.step_runners import planned_step
from interlace.train.weights import MasterWeights

_PROFILED = 3
"""Runs of the graphs whose times a plan is made from; as many are timed again in each turn."""
_PROFILE = "profile"
"""The turn in which they are."""
_COMPARED = 4
"""Micro-batches of the steps whose gradients are compared: the first, the last, and two beside each
other."""
_IN_GROUPS = OverlapConfig(decompose="slicing", pieces=2)
"""Exchanges cut by two groups of experts."""
_LANES = {
    "": (EXPERT_AXIS, COUNTS_AXIS),
    "rows_": (EXPERT_AXIS,),
    "counts_": (COUNTS_AXIS,),
}
"""Lanes of the all-to-alls that are looked at together, by what stands before their names."""
_CALIBRATED, _ROUNDS = 2, 2
"""Steps of one strand, behind the first, that say how long compute and all-to-all take; and how
often, as a part of a transfer does not depend on the rate."""


class MoeWays:
    """Ways of running a step, on weights of their own for eager PyTorch and for us."""

    def __init__(self, size: MoeSize) -> None:
        """Trace the model. Collective on the default group."""
        self.size = size
        ranks = dist.get_world_size()
        parallel = ParallelConfig(data_replicate=ranks, expert=ranks)
        meshes = build_meshes(parallel, "cpu")
        assert meshes.experts is not None
        model = MoeLlama(size)
        set_weights(model)
        apply_expert_parallel(model, meshes.experts[EXPERT_AXIS], meshes.counts)
        data = data_layout(model, parallel, meshes, torch.float32)
        self.weights = MasterWeights(model, torch.float32, data=data, meshes=meshes)
        self.batches: list[Batch] = self._batches(ROUTINGS[0])
        build = partial(build_strands, model, self.batches[0], meshes.axis_of_group, data=data)
        whole, groups = build(), build(decompose=decompose_of(_IN_GROUPS, torch.device("cpu")))
        self.both = with_ends(whole, groups)
        self.strands = {ONE: whole, TWO: whole, FIXED: whole, GROUPS: groups, BOTH: self.both}
        self.plans: dict[str, Plan] = {
            name: self.strands[name].sequential for name in (ONE, GROUPS)
        }
        self.steps: dict[str, Step] = {name: self._step(name) for name in self.plans}
        self.eager = MoeLlama(size, EagerExperts)
        set_weights(self.eager)
        deal_experts(self.eager)

    def emulated(self) -> AbstractContextManager[Callable[[], None]]:
        """Inside, matmuls sleep if this bench emulates compute; yields what forgets late sleeps."""
        rate = self.size.flops_per_s
        return emulated_compute(rate) if rate else nullcontext(lambda: None)

    def use(self, routing: str) -> None:
        """Plan for this routing and the link as it is. Collective."""
        self.batches = self._batches(routing)
        with self.emulated():
            costs = self.profile()
        for name in (TWO, BOTH):
            self.plans[name] = make_plan(self.strands[name].op_graphs, costs, "merge")
        self.plans[FIXED] = fixed_plan(self.strands[FIXED].op_graphs)
        for name in (TWO, FIXED, BOTH):
            self.steps[name] = self._step(name)
        self.profiles = [costs]

    def profile(self) -> CostTable:
        """Times of operators and exchanges, as they are now. Collective."""
        return profile_strands(
            self.both, self.batches[0], "cpu", self._constants, repeats=_PROFILED, machine="bench"
        )

    def profile_again(self, _batches: Sequence[Batch]) -> Mapping[str, Tensor]:
        """A turn in which nothing is run but the profile."""
        self.profiles.append(self.profile())
        return {}

    def _batches(self, routing: str) -> list[Batch]:
        return micro_batches(self.size, dist.get_rank(), routing)

    @property
    def _constants(self) -> dict[tuple[str, str], Tensor]:
        return {**self.weights.constants(), **self.weights.buffers()}

    def _step(self, name: str) -> Step:
        return planned_step(self.weights, self.strands[name], self.plans[name], self._constants)

    def recorded(self, name: str, count: int) -> list[dict[str, float]]:
        """What was seen in so many recorded steps: means over ranks."""
        step = self.steps[name]
        with self.emulated():
            return [_agreed(_seen(step.record(self.batches))) for _ in range(count)]

    def way(self, name: str) -> StepFunction:
        """Runs a step that way."""

        def eager(batches: Sequence[Batch]) -> Mapping[str, Tensor]:
            eager_step(self.eager, batches)
            return {n: p.grad for n, p in self.eager.named_parameters() if p.grad is not None}

        def planned(batches: Sequence[Batch]) -> Mapping[str, Tensor]:
            self.steps[name](batches)
            masters = self.weights.masters.items()
            return {n: local(m.grad) for n, m in masters if m.grad is not None}

        return eager if name == EAGER else planned

    def predicted_ns(self, name: str) -> float:
        """The simulator's step, from the times before the steps and those of each turn: the mean,
        as a shared machine gets faster and slower over the minutes."""
        graphs, count, plan = self.strands[name].op_graphs, len(self.batches), self.plans[name]
        return mean(expected_step_ns(plan, graphs, each, count) for each in self.profiles)


def measure_routing(ways: MoeWays, routing: str) -> dict[str, Any]:
    """One case: steps of all ways, records of ours, and how uneven the load is."""
    ways.use(routing)
    size = ways.size
    runs = {name: ways.way(name) for name in WAYS}
    compared = ways.batches[:_COMPARED]
    check_same(runs, compared)
    # Of groups the last bits may follow from where rows lie in memory.
    others = (EAGER, GROUPS, BOTH)
    check_bits({name: run for name, run in runs.items() if name not in others}, compared)
    with ways.emulated() as forget:
        timed: dict[str, StepFunction] = {
            name: partial(_afresh, run, forget) for name, run in runs.items()
        }
        timed[_PROFILE] = ways.profile_again
        turns = take_turns(timed, ways.batches, size.repeats, warm_up=1)
    records = {name: ways.recorded(name, size.recorded) for name in ways.steps}
    return {
        "times": {name: turns[name] for name in runs},
        "records": records,
        "predicted_ns": {name: ways.predicted_ns(name) for name in ways.steps},
        "load": _load(size, ways.batches),
    }


def _afresh(
    way: StepFunction, forget: Callable[[], None], batches: Sequence[Batch]
) -> Mapping[str, Tensor]:
    """A step whose sleeps are not shortened by those of the step before."""
    forget()
    return way(batches)


def _told(case: dict[str, Any]) -> str:
    return ", ".join(f"{name} {median(ns) / 1e6:.0f} ms" for name, ns in case["times"].items())


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def check_bits(runs: Mapping[str, StepFunction], batches: Sequence[Batch]) -> None:
    """Raise RunError unless these ways give the same gradients, bit for bit."""
    first: dict[str, Tensor] = {}
    for name, run in runs.items():
        found = run(batches)
        if not first:
            first = {weight: gradient.clone() for weight, gradient in found.items()}
        other = [weight for weight in first if not torch.equal(found[weight], first[weight])]
        if other:
            raise RunError(f"{name} has other bits in the gradient of {other[:3]}")


def _seen(timeline: Timeline) -> dict[str, float]:
    """Of a recorded step, in ns: compute, an exchange of counts, and exchanges of experts in flight
    and waited for; those also while two micro-batches are under way, and of either by lane: rows,
    and counts of rows."""
    found: dict[str, float] = {"compute": compute_ns(timeline), "counts": _counts_ns(timeline)}
    parts = {"": timeline}
    if steady := steady_state(timeline):
        parts["steady_"] = steady
    for part, each in parts.items():
        for of, lanes in _LANES.items():
            busy, exposed = _all_to_all_ns(each, lanes)
            found |= {f"{part}{of}busy": busy, f"{part}{of}exposed": exposed}
    return found


def _all_to_all_ns(timeline: Timeline, lanes: Sequence[str]) -> tuple[int, int]:
    """In flight and waited for, on these lanes."""
    rows = [row for row in timeline.collective_rows() if row.kind == Kind.ALL_TO_ALL]
    rows = [row for row in rows if row.lane in lanes]
    return sum(row.busy_ns for row in rows), sum(row.exposed_ns for row in rows)


def _counts_ns(timeline: Timeline) -> float:
    """The median of the exchanges of counts of rows."""
    return median(span.duration_ns for span in timeline.spans if span.lane == COUNTS_AXIS)


def _agreed(values: Mapping[str, float]) -> dict[str, float]:
    """Their means over ranks."""
    total = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(values, (total / dist.get_world_size()).tolist(), strict=True))


def _load(size: MoeSize, batches: Sequence[Batch]) -> dict[str, float]:
    """Largest over mean rows of a layer and micro-batch, by expert and by rank: the means over
    layers and micro-batches."""
    of_expert = [
        torch.stack([layer.flatten().bincount(minlength=size.experts) for layer in ids])
        for *_, ids in batches
    ]
    rows = torch.stack(of_expert).view(-1, size.experts).double()
    dist.all_reduce(rows)
    of_rank = rows.view(len(rows), dist.get_world_size(), -1).sum(2)
    return {
        "expert": sum(map(imbalance, rows)) / len(rows),
        "rank": sum(map(imbalance, of_rank)) / len(rows),
    }


def main(job_path: str, result_path: str) -> int:
    """Measure as this rank; rank 0 writes what it found."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    job: dict[str, Any] = json.loads(Path(job_path).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        size = MoeSize(**job)
        ways = MoeWays(size)
        rate = CALIBRATION_RATE
        for _ in range(_ROUNDS):
            rate = rate_for(ways.recorded(ONE, 1 + _CALIBRATED)[1:], rate)
            set_own_rate(rate)
        cases = {}
        for routing in size.routings:
            cases[routing] = measure_routing(ways, routing)
            _say(f"{routing} on a link of {rate}: {_told(cases[routing])}")
        found = {"rate": rate, "cases": cases}
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
