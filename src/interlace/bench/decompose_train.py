"""Training with decomposed collectives, with two strands, with both and with neither.

A case is several jobs, one after the other. Each measures its operators, predicts its steps from
that and runs them, so that a machine that is faster in one minute than in the next makes no
difference between what is predicted and what is measured.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from interlace.bench.results import ResultRow, speedup
from interlace.bench.strand_rows import StrandCase
from interlace.bench.strands import Point, Size, measure, rate_for
from interlace.text import aligned, number, percent

MODES = {
    "eager": "eager",
    "plain-1": "one strand",
    "decomposed-1": "decomposed",
    "plain-2": "two strands",
    "2": "both",
}
"""Ways to run a step, and what people read for them."""
_PLAIN = (("parallel.tensor", 2),)
"""Flags of a run whose collectives stay whole."""
_DECOMPOSED = (*_PLAIN, ("overlap.decompose", "auto"))
"""Flags of a run that cuts every collective where that is faster."""
_CALIBRATION = Point(ratio=0.0, micro_batches=2, modes=("1",))
"""A short run of one strand, from whose times the first point's link rate follows."""


@dataclass(frozen=True, kw_only=True)
class TrainSize(Size):
    """How much is run."""

    jobs: int
    """Of each case."""


def _points(*micro_batches: int, ratio: float) -> tuple[Point, ...]:
    return tuple(Point(ratio=ratio, micro_batches=n, modes=tuple(MODES)) for n in micro_batches)


FULL = TrainSize(
    layers=2,
    width=2048,
    sequence_length=256,  # slices of 128 rows: each matmul packs its whole weight
    steps=3,  # of a job, of which two count
    points=_points(2, 4, ratio=0.6),
    layout=_DECOMPOSED,
    jobs=3,
)
"""What the README's table was measured with."""
QUICK = TrainSize(
    layers=1,
    width=512,
    sequence_length=256,
    steps=2,
    points=_points(2, ratio=0.0),
    calibration_rate="1gbit",
    layout=_DECOMPOSED,
    jobs=1,
)
"""A smaller model: that all runs, not how fast."""


@dataclass(frozen=True, kw_only=True)
class TrainCase(StrandCase):
    """One number of micro-batches; a `target` of 0 if the rate was given."""

    @property
    def name(self) -> str:
        """Label of the rows."""
        return f"training, TP 2, {self.micro_batches} micro-batches"

    @property
    def achieved(self) -> float:
        """Communication over compute time of one strand without decomposition."""
        plain = self.modes["plain-1"]
        return plain["communication_ms"] / plain["compute_ms"]

    def step_ms(self, mode: str) -> list[float]:
        """Times of the counted steps."""
        return self.timed(mode, "step_ms")


def measure_training(size: TrainSize, folder: Path) -> list[TrainCase]:
    """Run every point, at rates that follow from a short run of one strand and from the point
    before; a point of ratio 0 runs at `size.calibration_rate`."""
    rate, one = size.calibration_rate, {}
    if any(point.ratio for point in size.points):
        plain = replace(size, layout=_PLAIN)
        _, comparison = measure(plain, _CALIBRATION, rate, folder / "calibration")
        one = comparison["modes"]["1"]
    cases = []
    for point in size.points:
        rate = rate_for(point.ratio, one, rate) if point.ratio else size.calibration_rate
        directory = folder / f"{point.micro_batches}-micro-batches"
        jobs = [measure(size, point, rate, directory / str(job))[1] for job in range(size.jobs)]
        comparison = {"modes": together([job["modes"] for job in jobs])}
        one = comparison["modes"]["plain-1"]
        cases.append(
            TrainCase(
                target=point.ratio,
                rate=rate,
                micro_batches=point.micro_batches,
                comparison=comparison,
            )
        )
        print(f"{cases[-1].name} at {rate} done", file=sys.stderr)
    return cases


def together(jobs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results of several jobs by way of running: times of all steps, less the first of each job but
    the first, and the means of what is one number."""
    found: dict[str, dict[str, Any]] = {}
    for mode, first in jobs[0].items():
        found[mode] = {}
        for key, value in first.items():
            values = [job[mode][key] for job in jobs]
            if key.endswith("_ms") and isinstance(value, list):
                found[mode][key] = [*value, *(step for more in values[1:] for step in more[1:])]
            elif isinstance(value, float):
                found[mode][key] = mean(values)
    return found


def rows_of(case: TrainCase) -> list[ResultRow]:
    """Speed-ups of step times; repeats pair step i of one way with step i of the other."""
    achieved = ResultRow(
        case=case.name,
        metric="communication_over_compute",
        ours=case.achieved,
        baseline=case.target,
        ratio=case.achieved / case.target if case.target else None,
        spread=None,
    )

    def row(metric: str, ours: str, baseline: str) -> ResultRow:
        return speedup(case.name, metric, case.step_ms(ours), case.step_ms(baseline))

    better = min(("decomposed-1", "plain-2"), key=lambda mode: median(case.step_ms(mode)))
    return [
        achieved,
        row("decompose_vs_eager", "decomposed-1", "eager"),
        row("decompose_vs_one_strand", "decomposed-1", "plain-1"),
        row("strands_vs_one_strand", "plain-2", "plain-1"),
        row("both_vs_eager", "2", "eager"),
        row("both_vs_one_strand", "2", "plain-1"),
        row("both_vs_better_of_two", "2", better),
        *_predictions(case),
    ]


def _predictions(case: TrainCase) -> Iterator[ResultRow]:
    """The simulator's step over the median of those that were measured, of the ways that it
    describes; its mean over the jobs, each of which measured its own operators."""
    for mode, name in MODES.items():
        predicted = case.modes[mode].get("predicted_ms")
        if predicted is not None:
            measured = median(case.timed(mode, "graph_ms"))
            suffix = "" if mode == "2" else f"_{name.replace(' ', '_')}"
            yield ResultRow(
                case=case.name,
                metric=f"predicted_over_measured{suffix}",
                ours=predicted,
                baseline=measured,
                ratio=predicted / measured,
                spread=None,
            )


def tables(cases: Sequence[TrainCase]) -> str:
    """Step times and hidden fractions, one line per number of micro-batches."""
    header = ("training", "link", "measured", *MODES.values())
    times = []
    hidden = []
    for case in cases:
        start = (case.name, case.rate, f"{case.achieved:.2f}x")
        times.append((*start, *(number(median(case.step_ms(mode))) for mode in MODES)))
        hidden.append((*start, *(percent(case.modes[mode]["hidden_fraction"]) for mode in MODES)))
    return "\n\n".join(
        [
            "training, step time in ms",
            aligned(header, times, text_columns=1),
            "training, communication hidden",
            aligned(header, hidden, text_columns=1),
        ]
    )
