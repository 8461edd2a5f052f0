"""One rank of the bench of stages: `python -m interlace.bench.stage_transfers_world JOB RESULT`.

For each case, three schedules are compiled, of GPT also one that is searched, and 1F1B gets several
links: blocking ones by three strategies of resharding. Gradients of all ways are compared as they
are computed, bit for bit; then compute is emulated at a rate at which what crosses between stages
takes the share of the paper's machines, and all ways take turns.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.pipeline_world import LIMIT, Batch, StepFunction, check_same, take_turns
from interlace.bench.stage_transfers import (
    BLOCKING,
    OURS,
    PAPER,
    SEARCHED,
    SIGNAL,
    TORCH,
    WAYS,
)
from interlace.bench.stage_transfers_cases import StageCase
from interlace.bench.stage_transfers_links import BlockingLink, ClockedSchedule, SignalLink
from interlace.bench.stage_transfers_models import StageModel, model_of
from interlace.bench.stage_transfers_search import searched_schedule
from interlace.errors import RunError
from interlace.ir.actions import Direction
from interlace.ir.stage_messages import StageMessage
from interlace.ranks.launched import follow_launcher
from interlace.runtime.handovers import Handovers
from interlace.runtime.laid_out_link import LaidOutLink
from interlace.runtime.pipeline_executor import PipelineExecutor
from interlace.runtime.pipeline_record import PipelineRecord
from interlace.runtime.stage_meshes import StageMeshes
from interlace.schedules.listed import ListedSchedule
from interlace.schedules.stage import StageSchedule
from interlace.step import Step

_PINGS = 7
"""Messages that are timed, one after the other; the shortest counts."""
_RECORDED = 3
"""Steps of each of our ways that are recorded."""
_TIMED, _ROUNDS = 5, 3
"""Steps whose passes are timed for the rate of compute, and how often it is set again."""
_CHECKED = 4
"""Micro-batches whose gradients are compared."""
_AT_FIRST, _AT_ONCE = 1e10, 1e18
"""FLOP/s of emulated compute at which passes are timed, to find the rate."""


class StageWays:
    """The ways of running a step of a case."""

    def __init__(self, case: StageCase) -> None:
        """Compile them. Collective on the default group."""
        self.model: StageModel = model_of(case)
        self.batches = self.model.batches()
        self.steps: dict[str, Step] = {}
        """By schedule."""
        self.executors: dict[str, PipelineExecutor] = {}
        self._schedule_of: dict[str, str] = {}
        for name, schedule, kind, strategy in WAYS:
            self.add(name, schedule, kind, strategy)

    def add(self, name: str, schedule: str | ListedSchedule, kind: str, strategy: str) -> None:
        """One way more: an executor of its own, with a link of its own."""
        called = schedule if isinstance(schedule, str) else schedule.name
        if called not in self.steps:
            self.steps[called] = self.model.compiled(called, schedule, self.batches[0])
        step = self.steps[called]
        handovers = self.handovers(called)
        link = self._link(kind, strategy)
        link.prepare(handovers)
        actions = step.executor.schedule
        assert isinstance(actions, StageSchedule)
        if kind == "blocking":
            actions = ClockedSchedule.of(actions)
        constants = {**step.strands.buffers(), **step.tensors.constants}
        executor = step.strands.executor(step.plan, constants, actions, link)
        assert isinstance(executor, PipelineExecutor)
        self.executors[name] = executor
        self._schedule_of[name] = called

    def _link(self, kind: str, strategy: str) -> LaidOutLink:
        kinds = {"blocking": BlockingLink, "signal": SignalLink, "beside": LaidOutLink}
        meshes = self.model.meshes
        stages = StageMeshes.of(meshes)
        axis = (stages.mesh.mesh_dim_names or ("",))[0]
        group = stages.mesh.get_group()
        replicas, around = (group, []) if axis == "dp_replicate" else (None, [group])
        return kinds[kind](
            stages, torch.device("cpu"), replicas=replicas, around=around, strategy=strategy
        )

    def handovers(self, schedule: str) -> Handovers:
        """What its chunks hand to each other."""
        found = self.steps[schedule].strands.handovers
        assert found is not None
        return found

    def way(self, name: str) -> StepFunction:
        """Runs a step that way."""

        def run(batches: Sequence[Batch]) -> Mapping[str, torch.Tensor]:
            step = self._taken(name)
            self.model.forget_gradients(self._schedule_of[name])
            step(batches)
            return self.model.gradients(self._schedule_of[name])

        return run

    def record(self, name: str, batches: Sequence[Batch]) -> PipelineRecord:
        """A step that way, with the times of its actions."""
        return self._taken(name).record_pipeline(batches)

    def _taken(self, name: str) -> Step:
        step = self.steps[self._schedule_of[name]]
        step.executor = self.executors[name]
        step.link = step.executor.link
        return step

    def boundary_ns(self) -> float:
        """How long what a micro-batch hands over takes from stage to stage, once, when nothing else
        is under way: the shortest of some, equal on all ranks."""
        link = self.executors[PAPER].link
        route = (Direction.FORWARD, 0, 1)
        like = [each.like for each in self.handovers("one_f_one_b").messages[route]]
        times = []
        for number in range(_PINGS):
            message, what = StageMessage(*route, 1000 + number), "a message that is timed"
            arrival = None
            if link.rank == 1:
                arrival = link.receive_message(message, like, 0, what)
            dist.barrier()
            began = time.perf_counter_ns()
            if arrival is None:
                link.send_message(message, [link.empty(each).zero_() for each in like], 1, what)
            else:
                link.wait(arrival)
            dist.barrier()
            times.append(float(time.perf_counter_ns() - began))
            link.finish()
        return _agreed(min(times))


def measure_case(case: StageCase) -> dict[str, Any]:
    """One case: steps of all ways, records of ours."""
    ways = StageWays(case)
    runs: dict[str, StepFunction] = {name: ways.way(name) for name, *_ in WAYS}
    if case.is_tensor_parallel:
        runs[TORCH] = ways.model.rival()
    check_bits({name: run for name, run in runs.items() if not name.startswith(SIGNAL)}, ways)
    crossing = ways.boundary_ns()
    rate = _rate(ways, crossing / case.share)
    if case.searched:
        _add_searched(ways, rate)
        runs |= {name: ways.way(name) for name in (SEARCHED, SIGNAL + SEARCHED)}
        check_bits({name: runs[name] for name in (BLOCKING, SEARCHED)}, ways)
    with emulated_compute(rate) as forget:
        fresh = {name: partial(_afresh, run, forget) for name, run in runs.items()}
        times = take_turns(fresh, ways.batches, case.repeats)
        records = {
            name: [_recorded(ways, name, forget) for _ in range(_RECORDED)]
            for name in (PAPER, OURS, SEARCHED)
            if name in runs
        }
    return {
        "times": times,
        "predicted": {n: [each.predicted.step_ns for each in own] for n, own in records.items()},
        "measured": {n: [each.measured.step_ns for each in own] for n, own in records.items()},
        "crossing_ns": crossing,
        "pass_ns": [_agreed(_pass_ns(record)) for record in records[PAPER]],
        "flops_per_s": rate,
    }


def _add_searched(ways: StageWays, rate: float) -> None:
    """The order that is searched from the quickest of some steps of ours, within the memory of the
    paper's way; and the same with signals."""
    with emulated_compute(rate) as forget:
        steps = [_recorded(ways, OURS, forget) for _ in range(_RECORDED)]
        most = max(_recorded(ways, PAPER, forget).predicted.peak_bytes)
    schedule = searched_schedule(
        min(steps, key=lambda each: each.measured.step_ns), ways.model.chunk_names("zb_v"),
        ways.model.case.micro_batches, most,
    )  # fmt: skip
    ways.add(SEARCHED, schedule, "beside", "auto")
    ways.add(SIGNAL + SEARCHED, schedule, "signal", "auto")


def _rate(ways: StageWays, pass_ns: float) -> float:
    """The FLOP/s of emulated compute at which forward and backward of a stage take so long, with
    everything that is real in them: the median of some, as that is what steps take."""
    few = ways.batches[:_CHECKED]

    def took(rate: float) -> float:
        with emulated_compute(rate):
            return _agreed(median(_pass_ns(ways.record(PAPER, few)) for _ in range(_TIMED)))

    real, rate = took(_AT_ONCE), _AT_FIRST
    for _ in range(_ROUNDS):
        rate *= (took(rate) - real) / max(pass_ns - real, pass_ns / 10)
    return rate


def _pass_ns(record: PipelineRecord) -> float:
    """Forward and backward of a stage, the mean of stages."""
    chunks = record.costs.chunks
    return sum(each.forward_ns + each.input_ns + each.weight_ns for each in chunks) / len(chunks)


def check_bits(runs: Mapping[str, StepFunction], ways: StageWays) -> None:
    """Raise RunError unless all ways give the bits of the blocking one for all weights; and
    PyTorch's pipeline, which adds up otherwise, gradients within a bound."""
    if TORCH in runs:
        check_same({name: runs[name] for name in (BLOCKING, TORCH)}, ways.batches)
    seen: dict[str, str] = {}
    for name, run in runs.items():
        if name == TORCH:
            continue
        gradients = run(ways.batches[:_CHECKED])
        place = dist.get_rank() % ways.model.ranks_of_stage
        own = {
            f"{weight} on rank {place} of its stage": _digest(each)
            for weight, each in gradients.items()
        }
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        found = {weight: digest for each in of_ranks for weight, digest in each.items()}
        if name == BLOCKING:
            seen = found
        elif not ways.model.same_parts(found, seen, moved=name in (OURS, SEARCHED)):
            other = [weight for weight in seen if found.get(weight) != seen[weight]]
            raise RunError(f"{name} has other bits than {BLOCKING} in the gradient of {other[:3]}")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _agreed(value: float) -> float:
    """Its mean over ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _recorded(ways: StageWays, name: str, forget: Callable[[], None]) -> PipelineRecord:
    forget()
    return ways.record(name, ways.batches)


def _afresh(way: StepFunction, forget: Any, batches: Sequence[Batch]) -> Mapping[str, Any]:
    """A step whose sleeps are not shortened by those of the step before."""
    forget()
    return way(batches)


def main(job_path: str, result_path: str) -> int:
    """Measure as this rank; rank 0 writes what it found."""
    follow_launcher(os.environ)
    torch.set_num_threads(1)
    case = StageCase(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        found = measure_case(case)
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
