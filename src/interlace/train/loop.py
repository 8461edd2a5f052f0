"""The training loop and what it writes."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from interlace import run_files
from interlace.claims import Claims
from interlace.config import RunConfig, StrandsChoice
from interlace.errors import RunError
from interlace.hardware.devices import peak_flops
from interlace.ir import store
from interlace.ir.noise import noise_of
from interlace.ir.timeline import Timeline
from interlace.ranks.signals import StopFlag, agreed_with
from interlace.report.tables import comparison_lines
from interlace.runtime.executor import Batch
from interlace.sim.expected_step import expected_step_ns
from interlace.step import Step
from interlace.text import bits_per_byte, in_bits
from interlace.train.checkpointer import Checkpointer
from interlace.train.compare import compare
from interlace.train.environment import describe_environment, describe_plan
from interlace.train.expert_load import load_values, move_biases, skew_values
from interlace.train.fallback import Trial
from interlace.train.gradient_check import check_gradients
from interlace.train.metrics import MetricsWriter, step_line
from interlace.train.model_flops import flops_per_token
from interlace.train.recorded_steps import (
    LABEL,
    collective_values,
    proof_rows,
    proof_table,
    record_stages,
    stages_line,
)
from interlace.train.renewal import Drift, Renewal, RenewalRequest, why_not
from interlace.train.session import Session


def say(session: Session, text: str) -> None:
    """One line for people, from the first rank."""
    if session.rank == 0:
        print(text, file=sys.stderr, flush=True)


class Trainer:
    """Takes a session through its steps; the first rank writes metrics and files."""

    def __init__(self, session: Session, claims: Claims) -> None:
        self.session = session
        self.claims = claims
        config = session.config
        self.config = config
        self.directory = Path(config.output.directory)
        self.batches = session.batches()
        self.held_out = session.held_out()
        self.metrics: MetricsWriter | None = None
        self._compared: set[str] = set()
        self.last_recorded: Timeline | None = None
        self.trial = Trial(config, config.strands)
        self.drift = Drift(config.train.renew_plan_at)
        if session.rank == 0:
            claims.output.check()
            # Not before: a run that cannot start must not cost the user an earlier one.
            if not claims.resumes:
                _remove_results(self.directory)
            describe_environment(session, self.directory)
            self.metrics = MetricsWriter(
                self.directory, tensorboard=config.output.tensorboard, claim=claims.output
            )
        asked = self.directory / run_files.RENEW_PLAN
        self.request = RenewalRequest(asked if session.rank == 0 else None)
        self.example: Batch | None = None
        self.peak_flops = _peak(config, session.device)
        self.flops_per_token = self._flops_per_token()
        self.checkpoints = Checkpointer(session, self._tell_checkpoint, claims.checkpoints)

    def run(self, stop: StopFlag) -> str:
        """Train to the end, or until a signal. Returns why it ended."""
        try:
            return self._run(stop)
        finally:
            self.checkpoints.close()
            if self.metrics is not None:
                self.metrics.close()

    def _run(self, stop: StopFlag) -> str:
        session, config = self.session, self.config
        say(session, session.dataset.summary)
        if session.main is not None and session.main.decomposed is not None:
            say(session, session.main.decomposed.summary())
        if session.stages is not None and session.main is not None:
            say(session, stages_line(session, session.main))
        elif session.plan is not None:
            say(session, f"plan by search {session.plan.search!r}{self._predicted()}")
        if config.compare.steps:
            self._compare()
        step = done = self.checkpoints.resume(self.batches)
        if config.compare.check:
            self._check()
        if not done:
            self.evaluate(0)
        ended = "finished"
        for step in range(done + 1, config.train.steps + 1):
            self._step(step)
            every = config.train.evaluate_every
            if step == config.train.steps or (every and step % every == 0):
                self.evaluate(step)
            self.checkpoints.after_step(step, self.batches)
            stops, renews = agreed_with(stop, wish=self.request.made())
            if stops:
                ended = f"stopped by {stop.requested or 'another rank'} after step {step}"
                break
            if renews:
                self._renew_as_asked(step)
        self.checkpoints.finish(step, self.batches)
        self._prove()
        self.write("end", step=step, reason=ended)
        say(session, f"{ended}; `interlace report {self.directory}` draws it")
        return ended

    def _predicted(self) -> str:
        session = self.session
        step = session.steps["2"]
        if step.costs is None:
            return ""
        count, graphs = self.config.train.micro_batches, step.strands.op_graphs
        step_ms = expected_step_ns(step.plan, graphs, step.costs, count) / 1e6
        noisy = ", from noisy times" if noise_of(step.costs) else ""
        return f": {step_ms:.0f} ms predicted for the {count} micro-batches of a step{noisy}"

    def _step(self, step: int) -> None:
        session, config = self.session, self.config
        every = config.output.record_every
        due = bool(every) and (step % every == 0 or step == config.train.steps)
        mode, trying = self.trial.next_mode(), self.trial.running
        runner = session.runners[mode]
        runner.number = step
        batches = self._next_batches()
        self.example = batches[0]
        began = time.perf_counter_ns()
        timeline, of_stages = None, {}
        if due and step == config.train.steps and session.stages is not None:
            assert isinstance(runner, Step)
            writes = self.claims if session.rank == 0 else None
            of_stages = record_stages(runner, batches, self.directory, writes)
        elif due and not trying:
            timeline = runner.record(batches, label=LABEL if session.stages else mode)
        else:
            runner(batches)
        rate = session.optimizer.param_groups[0]["lr"]
        loss = session.mean(torch.stack(runner.losses).mean())
        norm = self._update(step, loss)
        move_biases(session, runner.results)
        step_ns = time.perf_counter_ns() - began
        sharing = config.parallel.data_replicate * config.parallel.data_shard
        tokens = len(batches) * batches[0][0].numel() * sharing * config.parallel.context
        values: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "bits_per_byte": bits_per_byte(loss, session.dataset.held_out_bytes_per_token),
            "step_ms": step_ns / 1e6,
            "tokens_per_s": tokens / step_ns * 1e9,
            "lr": rate,
            "grad_norm": norm,
        }
        values |= of_stages
        values |= load_values(session, runner.results)
        if timeline is not None:
            values["exposed_ms"] = timeline.exposed_ns() / 1e6
            values["hidden_fraction"] = timeline.hidden_fraction()
            values["collectives"] = collective_values(timeline)
            values |= skew_values(session, runner, timeline, values)
            self._keep(timeline)
            self.last_recorded = timeline
        if self.peak_flops and self.flops_per_token:
            spent = self.flops_per_token * tokens / session.world_size
            values["mfu"] = spent / (step_ns / 1e9) / self.peak_flops
        self.write("step", **values)
        say(session, step_line({**values, "steps": config.train.steps}))
        self._judge(mode, step_ns)
        if mode == "2" and not trying and "expert_imbalance" in values:
            self._renew_if_drifted(step, values["expert_imbalance"])

    def _renew_if_drifted(self, step: int, load: float) -> None:
        """Plan again, on all ranks, where the load of experts has."""
        moved = self.drift.add(load)
        if moved is None or self.session.compiled is None:
            return
        before, now = moved
        why = f"the busiest expert had {before:.2f} times the mean and has {now:.2f}"
        self._renew(step, why, load_before=before, load=now)

    def _renew_as_asked(self, step: int) -> None:
        """Plan again, or say why not: a run that cannot goes on as it is. Whether two strands win
        is tried again, and load drifts from what it is now."""
        asked = f"{self.directory / run_files.RENEW_PLAN} was made"
        if reason := why_not(self.config):
            self.write("renewal", step=step, asked=True, refused=reason)
            say(self.session, f"{asked}, but {reason}: the plan stays")
            return
        self._renew(step, asked, asked=True)
        self.trial = Trial(self.config, self.config.strands)
        self.drift = Drift(self.config.train.renew_plan_at)

    def _renew(self, step: int, why: str, **values: Any) -> None:
        """Measure on the last micro-batches, and plan again. Collective."""
        assert self.session.compiled is not None
        assert self.example is not None
        began = time.perf_counter_ns()
        plan = Renewal(*self.session.compiled).renew(self.session, self.example).plan
        if self.session.rank == 0:
            self.claims.output.check()
            describe_plan(self.session, self.directory)
        seconds = (time.perf_counter_ns() - began) / 1e9
        self.write("renewal", step=step, **values, plan=plan.digest)
        say(self.session, f"{why}: planned again in {seconds:.1f} s{self._predicted()}")

    def _judge(self, mode: StrandsChoice, step_ns: int) -> None:
        verdict = self.trial.add(mode, step_ns)
        if verdict is not None:
            self.write(
                "trial",
                two_strands_ms=verdict.two_strands_ns / 1e6,
                one_strand_ms=verdict.one_strand_ns / 1e6,
                keeps_plan=verdict.keeps_plan,
            )
            say(self.session, str(verdict))

    def _update(self, step: int, loss: float) -> float:
        """Apply the gradients, unless loss or gradients are not finite: then nothing changes."""
        if not math.isfinite(loss):
            raise RunError(
                f"the loss of step {step} is {loss}; the weights are those of the step before",
                hint="lower optimizer.learning_rate, or raise optimizer.warmup_steps",
            )
        return self.session.update(step)

    def _next_batches(self) -> list[Batch]:
        count = self.config.train.micro_batches
        return [self.session.move(next(self.batches)) for _ in range(count)]

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Mean loss on held-out text, written in bits per byte."""
        losses = self.session.evaluate(self.held_out)
        loss = self.session.mean(torch.stack(losses).mean())
        bits = bits_per_byte(loss, self.session.dataset.held_out_bytes_per_token)
        self.write("evaluate", step=step, loss=loss, bits_per_byte=bits)
        said = in_bits(loss, self.session.dataset.held_out_bytes_per_token)
        say(self.session, f"held out after step {step}: {said}")

    def _compare(self) -> None:
        session = self.session
        steps: list[Sequence[Batch]] = [
            self._next_batches() for _ in range(self.config.compare.steps)
        ]
        self.batches = session.batches()
        summary, timelines = compare(session, steps, lambda text: say(session, text))
        for timeline in timelines:
            self._keep(timeline, compared=True)
        if session.rank == 0:
            self.claims.output.check()
            text = json.dumps(summary, indent=1) + "\n"
            store.write_whole(self.directory / run_files.COMPARISON, text.encode())
        for line in comparison_lines(summary):
            say(session, line)
        short = {key: value for key, value in summary.items() if key != "modes"}
        self.write("compare", **short)

    def _check(self) -> None:
        """With the weights with which training begins, on the first micro-batches of the data."""
        session, drawn = self.session, self.session.batches()
        count = self.config.train.micro_batches
        text, values = check_gradients(session, [session.move(next(drawn)) for _ in range(count)])
        say(session, text)
        self.write("check", **values)

    def _prove(self) -> None:
        """Expected against measured communication of the last recorded step."""
        session, timeline = self.session, self.last_recorded
        step = session.steps.get("2")
        if timeline is None or step is None or step.costs is None or session.stages is not None:
            return
        graphs, count = step.strands.op_graphs, self.config.train.micro_batches
        plan = step.plan if timeline.label == "2" else step.strands.sequential
        rows = proof_rows(plan, graphs, step.costs, timeline, count)
        if not rows:
            return  # one rank sends nothing
        self.write("proof", rows=rows)
        say(session, "one step's communication, expected by the plan and measured on rank 0:")
        say(session, proof_table(rows))

    def _keep(self, timeline: Timeline, *, compared: bool = False) -> None:
        """The comparison's timelines belong to its figures and are not replaced by later ones."""
        folder = self.directory / run_files.TIMELINES
        self._compared |= {timeline.label} if compared else set()
        if compared or timeline.label not in self._compared:
            self.claims.output.check()
            store.save(
                timeline, folder / run_files.timeline_name(timeline.label, self.session.rank)
            )

    def _tell_checkpoint(self, text: str, values: dict[str, Any]) -> None:
        say(self.session, text)
        self.write("checkpoint", **values)

    def _flops_per_token(self) -> int | None:
        """On the first rank, which writes metrics; None where there will be no MFU."""
        session = self.session
        if session.rank or not self.peak_flops:
            return None
        flops, reason = flops_per_token(self.config, session.vocab_size)
        if reason:
            say(session, f"MFU is not shown: {reason}")
        return flops

    def write(self, event: str, **values: Any) -> None:
        """One line of metrics.jsonl, on the first rank."""
        if self.metrics is not None:
            self.metrics.write(event, **values)


def _peak(config: RunConfig, device: torch.device) -> float | None:
    if config.hardware.peak_tflops:
        return config.hardware.peak_tflops * 1e12
    if device.type == "cpu":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.train.dtype)


def _remove_results(directory: Path) -> None:
    """Of the run that was written into this directory before, which is said; first rank only."""
    results = run_files.results_of(directory)
    if not results:
        return
    names = ", ".join(sorted({str(path.relative_to(directory).parts[0]) for path in results}))
    print(
        f"{directory} holds the results of an earlier run, which this one replaces: {names}",
        file=sys.stderr,
        flush=True,
    )
    for path in results:
        path.unlink()
