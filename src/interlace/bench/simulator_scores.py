"""Scores of `simulator`: errors, ranks, and the two numbers that are fitted to a third of the rows.

The two are a factor on all rates of the device (clock, power, version of the libraries) and the
time that the host takes to start one kernel. They are chosen from a grid by the mean error on every
third row, and are held against the others. Nothing is fitted to rows that are simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import correlation, mean

from interlace.bench.simulator_jobs import simulated_step
from interlace.bench.simulator_rows import MeasuredStep, SourceRows
from interlace.hardware.device_rates import DeviceRates
from interlace.hardware.step_memory import peak_memory
from interlace.hardware.step_model import estimate_step

FEWEST_TO_FIT = 6
"""With fewer rows a third says nothing."""
SPEEDS = tuple(0.7 + 0.1 * step for step in range(7))
"""Factors on the rates of the device; then by steps of 0.02 around the best."""
FINE = (-0.08, -0.06, -0.04, -0.02, 0.0, 0.02, 0.04, 0.06, 0.08)
LAUNCHES_S = tuple(1e-6 * us for us in (6, 3, 9, 12, 16, 20, 26, 34, 44))
"""Host time for each kernel; 6 us without a fit."""


@dataclass(frozen=True, kw_only=True)
class SourceScore:
    """What came out for one source."""

    name: str
    rows: int
    left_out: dict[str, int]
    before: float
    """Mean relative error of all rows without any fit."""
    bias: float
    """Mean of predicted over measured, less 1, without any fit."""
    after: float | None
    """Mean relative error of the rows that the fit did not see; None if there were too few."""
    unfitted: float | None
    """Of the same rows without any fit."""
    speed: float | None
    launch_us: float | None
    rank_correlation: float | None
    """Spearman's, without any fit; None with too few rows."""
    memory_error: float | None
    memory_rows: int


def score_source(rows: SourceRows) -> SourceScore | None:
    """Scores of a source; None if none of its rows is used."""
    steps = rows.steps
    if not steps:
        return None
    predicted = [prediction(step) for step in steps]
    plain = [seconds for seconds, _ in predicted]
    measured = [step.seconds for step in steps]
    after = unfitted = speed = launch_s = None
    if len(steps) >= FEWEST_TO_FIT and all(step.layout is None for step in steps):
        rest = [step for index, step in enumerate(steps) if index % 3]
        speed, launch_s = fit(steps[::3])
        fitted = [seconds_of(step, speed, launch_s) for step in rest]
        after = mean_error(fitted, [step.seconds for step in rest])
        unfitted = mean_error([seconds_of(step) for step in rest], [s.seconds for s in rest])
    known = [
        (gib, step.memory_gib)
        for (_, gib), step in zip(predicted, steps, strict=True)
        if step.memory_gib is not None
    ]
    return SourceScore(
        name=rows.name,
        rows=len(steps),
        left_out=rows.left_out,
        before=mean_error(plain, measured),
        bias=mean(p / m - 1 for p, m in zip(plain, measured, strict=True)),
        after=after,
        unfitted=unfitted,
        speed=speed,
        launch_us=None if launch_s is None else launch_s * 1e6,
        rank_correlation=spearman(plain, measured) if len(steps) >= FEWEST_TO_FIT else None,
        memory_error=mean_error(*map(list, zip(*known, strict=True))) if known else None,
        memory_rows=len(known),
    )


def prediction(step: MeasuredStep) -> tuple[float, float]:
    """(seconds, GiB of the fullest rank), with nothing fitted."""
    if step.layout is not None:
        found = simulated_step(step.cluster, step.job, step.layout, user_buffers=step.user_buffers)
        return found.seconds, found.memory_gib
    return seconds_of(step), peak_memory(step.job).total_bytes / 2**30


def seconds_of(step: MeasuredStep, speed: float = 1.0, launch_s: float | None = None) -> float:
    """Predicted seconds by the step model, with the rates of the device times `speed`."""
    device = step.cluster.device
    changed: DeviceRates = replace(
        device,
        flops_per_s=device.flops_per_s * speed,
        bytes_per_s=device.bytes_per_s * speed,
        launch_s=device.launch_s if launch_s is None else launch_s,
    )
    return estimate_step(step.cluster, step.job, changed).seconds


def fit(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """The factor and the host time with the least mean error: each in turn, three times."""

    @cache
    def error(speed: float, launch_s: float) -> float:
        predicted = [seconds_of(step, speed, launch_s) for step in steps]
        return mean_error(predicted, [step.seconds for step in steps])

    launch_s, speed = 6e-6, 1.0
    for speeds in (SPEEDS, FINE, FINE):
        around = speeds if speeds is SPEEDS else [round(speed + each, 3) for each in speeds]
        speed = min(around, key=lambda each, launch=launch_s: error(each, launch))
        launch_s = min(LAUNCHES_S, key=lambda each, at=speed: error(at, each))
    return speed, launch_s


def mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return mean(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks, ties sharing the mean of theirs."""
    return correlation(_ranks(first), _ranks(second))  # its method "ranked" is of Python 3.12


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in ordered}
    count = {value: ordered.count(value) for value in first}
    return [first[value] + (count[value] - 1) / 2 for value in values]
