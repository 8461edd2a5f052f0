"""Run the same first steps under each runner, and compare losses, weights and step times.

Runners take turns step by step, so that a machine that slows down slows all of them. Each has its
own copy of weights and optimizer state, which is put in place before its turn and taken out after
it; that copying is not timed. Afterwards everything is as it was before.
"""

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.config import Mode
from interlace.ir.timeline import Timeline, compute_ns, steady_state
from interlace.lab.links import link_label
from interlace.parallel.local_parts import local
from interlace.runtime.executor import Batch
from interlace.runtime.peak_memory import Growth, measure_growth
from interlace.search.memory import step_peak_bytes
from interlace.search.step_bounds import step_bound_ns
from interlace.sim.expected_step import expected_step_ns
from interlace.sim.simulated_step import simulate_step
from interlace.step import Step
from interlace.train.optimizer import set_step
from interlace.train.session import Session

State = list[Tensor]


@dataclass
class ModeResult:
    """What one runner did over the compared steps."""

    step_ns: list[int] = field(default_factory=list)
    graph_ns: list[int] = field(default_factory=list)
    """The part of each step before gradient clipping and the optimizer."""
    cpu_ns: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    timeline: Timeline | None = None
    state: State = field(default_factory=list)
    growth: Growth | None = None


def compare(
    session: Session, steps: Sequence[Sequence[Batch]], report: Callable[[str], None]
) -> tuple[dict[str, Any], list[Timeline]]:
    """Run `steps` under every configured runner: (summary for comparison.json, timelines).

    The step after the timed ones is recorded, and the one after that looks at memory if asked,
    so neither touches a measured time.
    Collective; all ranks return equal losses and their own times.
    """
    start = _state(session)
    modes = list(session.config.compare.modes)
    results = {mode: ModeResult(state=[t.clone() for t in start]) for mode in modes}
    first = session.schedule.last_epoch
    for number, batches in enumerate(steps):
        for mode in modes:
            _take_turn(session, results[mode], mode, batches, first + number)
        report(f"compared step {number + 1}/{len(steps)}")
    for mode in modes:
        _load(session, results[mode].state)
        runner = session.runners[mode]
        results[mode].timeline = runner.record(steps[-1], label=mode)
        if session.config.compare.memory:
            run = partial(runner, steps[-1])
            results[mode].growth = measure_growth(run, session.device)
    _load(session, start)
    set_step(session.schedule, first)
    timelines = [r.timeline for r in results.values() if r.timeline is not None]
    return _summary(session, results, len(steps)), timelines


def _take_turn(
    session: Session,
    result: ModeResult,
    mode: Mode,
    batches: Sequence[Batch],
    step: int,
) -> None:
    _load(session, result.state)
    set_step(session.schedule, step)
    _synchronise(session)  # what `_load` copies on a device is no part of the step
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    session.runners[mode].number = step
    loss = session.runners[mode](batches)
    if session.device.type == "cuda":
        torch.cuda.synchronize()
    result.graph_ns.append(time.perf_counter_ns() - wall)
    session.update(step + 1)
    _synchronise(session)
    result.step_ns.append(time.perf_counter_ns() - wall)
    result.cpu_ns.append(time.process_time_ns() - cpu)
    result.losses.append(float(loss))
    _save(session, result.state)


def _synchronise(session: Session) -> None:
    if session.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _tensors(session: Session) -> list[Tensor]:
    """Every tensor that a step changes: masters and the optimizer's state, in a fixed order."""
    found = []
    for parameter in session.weights.parameters:
        found.append(local(parameter))
        state = session.optimizer.state.get(parameter, {})
        found += [local(state[key]) for key in sorted(state) if isinstance(state[key], Tensor)]
    return found


def _state(session: Session) -> State:
    """Copies of all state; gives the optimizer its (zero) state first if it has none yet."""
    if not session.optimizer.state:
        _initialise(session)
    return [tensor.clone() for tensor in _tensors(session)]


def _initialise(session: Session) -> None:
    """One update with zero gradients and zero learning rate creates the state and changes no
    weight; the moments stay zero and the step count is put back."""
    rates = [group["lr"] for group in session.optimizer.param_groups]
    for parameter in session.weights.parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in session.optimizer.param_groups:
        group["lr"] = 0.0
    session.optimizer.step()
    for group, rate in zip(session.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in session.weights.parameters:
        parameter.grad = None
        local(session.optimizer.state[parameter]["step"]).zero_()


def _save(session: Session, state: State) -> None:
    for target, tensor in zip(state, _tensors(session), strict=True):
        target.copy_(tensor)


def _load(session: Session, state: State) -> None:
    for tensor, source in zip(_tensors(session), state, strict=True):
        tensor.copy_(source)
    session.weights.publish()


def _bits(loss: float) -> str:
    return struct.pack(">f", loss).hex()


def _summary(session: Session, results: Mapping[Mode, ModeResult], steps: int) -> dict[str, Any]:
    """The content of comparison.json."""
    summary: dict[str, Any] = {
        "steps": steps,
        "micro_batches": session.config.train.micro_batches,
        "link": link_label(session.config.link),
        "constant_bytes": session.constant_bytes,
        "modes": {mode: _mode_row(session, mode, result) for mode, result in results.items()},
    }
    pairs = _same_graphs(session, results)
    if pairs:
        losses = all(one.losses == other.losses for one, other in pairs)
        states = all(
            torch.equal(a, b)
            for one, other in pairs
            for a, b in zip(one.state, other.state, strict=True)
        )
        summary["losses_identical"] = _on_all_ranks(losses, session)
        summary["weights_identical"] = _on_all_ranks(states, session)
    ones = ("eager", "1", "plain-1", "decomposed-1")
    ours = "2" if "2" in results else next((m for m in results if m not in ones), None)
    if ours is not None:
        summary |= _gains(results, ours)
    return summary


def _same_graphs(
    session: Session, results: Mapping[Mode, ModeResult]
) -> list[tuple[ModeResult, ModeResult]]:
    """Every way to run strands with the first one on the same graphs: these have the same bits.

    Graphs with decomposed collectives add in another order than those without.
    """
    first: dict[str, ModeResult] = {}
    pairs = []
    for mode, result in results.items():
        step = session.runners[mode]
        if not isinstance(step, Step):
            continue
        digest = step.strands.digest
        if digest in first:
            pairs.append((first[digest], result))
        first.setdefault(digest, result)
    return pairs


def _gains(results: Mapping[Mode, ModeResult], ours: Mode) -> dict[str, Any]:
    """How two strands did against eager and against one strand, where these were run."""
    gains: dict[str, Any] = {}
    two = results[ours]
    if "eager" in results:
        pairs = zip(results["eager"].losses, two.losses, strict=True)
        gains["max_relative_difference_to_eager"] = max(abs(a - b) / abs(a) for a, b in pairs)
    bases: dict[Mode, str] = {
        "eager": "speedup_vs_eager",
        "1": "speedup_vs_one_strand",
        "plain-1": "speedup_vs_plain_one_strand",
        "plain-2": "speedup_vs_plain_two_strands",
        "decomposed-1": "speedup_vs_decomposed_one_strand",
        "decomposed-2": "speedup_vs_decomposed_two_strands",
    }
    for base, name in bases.items():
        if base in results and base != ours:
            # The first step of each way warms caches up; it counts only if it is the only one.
            first = min(1, len(two.step_ns) - 1)
            pairs = zip(results[base].step_ns[first:], two.step_ns[first:], strict=True)
            ratios = [a / b for a, b in pairs]
            gains[name] = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
    return gains


def _mode_row(session: Session, mode: Mode, result: ModeResult) -> dict[str, Any]:
    timeline = result.timeline
    row: dict[str, Any] = {
        "step_ms": [ns / 1e6 for ns in result.step_ns],
        "graph_ms": [ns / 1e6 for ns in result.graph_ns],
        "cpu_ms": [ns / 1e6 for ns in result.cpu_ns],
        "losses": result.losses,
        "loss_bits": [_bits(loss) for loss in result.losses],
        **_predicted(session, mode),
    }
    if timeline is not None:
        steady = steady_state(timeline)
        row |= {
            "compute_ms": compute_ns(timeline) / 1e6,
            "exposed_ms": timeline.exposed_ns() / 1e6,
            "communication_ms": timeline.communication_ns() / 1e6,
            "hidden_fraction": timeline.hidden_fraction(),
            "steady_hidden_fraction": steady.hidden_fraction() if steady is not None else None,
        }
    if result.growth is not None:
        row["allocated_bytes"] = result.growth.allocated_bytes
        row["resident_bytes"] = result.growth.resident_bytes
    return row


def _predicted(session: Session, mode: Mode) -> dict[str, Any]:
    """What the plan promises: time of the graphs of a step, a bound for it, peak of values."""
    step = session.runners[mode]
    if not isinstance(step, Step):
        return {}
    plan, costs, graphs = step.plan, step.costs, step.strands.op_graphs
    counted = {"search": plan.search, "counted_bytes": step_peak_bytes(plan, graphs)}
    if costs is None:
        return counted
    count = session.config.train.micro_batches
    predicted = simulate_step(plan, graphs, costs, count)
    expected_ns = expected_step_ns(plan, graphs, costs, count, of_means_ns=predicted.length_ns)
    return counted | {
        "predicted_ms": expected_ns / 1e6,
        "predicted_hidden_fraction": predicted.hidden_fraction(),
        "bound_ms": step_bound_ns(graphs, costs, count) / 1e6,
    }


def _on_all_ranks(value: bool, session: Session) -> bool:
    flag = torch.tensor(int(value), device=session.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
