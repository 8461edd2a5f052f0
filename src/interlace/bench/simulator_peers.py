"""Other simulators on the rows of `simulator`: their recorded times beside ours, on the same rows.

`presets/measured/peers.csv` holds what they said; `scripts/record_peers.py` runs them, and nothing
here does. A peer that leaves rows out is compared with ours on those that it has.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import interlace.presets
from interlace.bench.results import ResultRow
from interlace.bench.simulator_rows import MeasuredStep, SourceRows
from interlace.bench.simulator_scores import FEWEST_TO_FIT, mean_error, prediction, spearman

NAMES = {"calculon": "Calculon", "simumax": "SimuMax"}
FACTORS = tuple(0.5 + 0.02 * step for step in range(126))
"""On the recorded times of a peer; the best on every third row is held against the others."""


@dataclass(frozen=True, slots=True)
class PeerStep:
    """What a peer said of one row."""

    version: str
    """Of its checkout."""
    recorded: str
    """Day, as in 2026-11-25."""
    seconds: float
    memory_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsScore:
    """How far off times of some rows are."""

    rows: int
    error: float
    """Mean of |predicted / measured - 1|."""
    bias: float
    held_out: float | None
    """Mean error of two thirds of the rows as they are; None with too few rows."""
    fitted: float | None
    """Of the same, with one factor on all times that was fitted to the other third."""
    speed: float | None
    """The factor's inverse, as of a device."""
    rank_correlation: float | None
    memory_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerScore:
    """A peer on the rows of a source that it describes."""

    peer: str
    """With the version of its checkout."""
    source: str
    theirs: RowsScore
    ours: RowsScore
    """Of the same rows, fitted in the same way."""


@cache
def peer_steps() -> dict[str, dict[tuple[str, int], PeerStep]]:
    """By peer: by table and row."""
    path = Path(interlace.presets.__path__[0]) / "measured" / "peers.csv"
    found: dict[str, dict[tuple[str, int], PeerStep]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            memory = float(row["memory_gib"]) if row["memory_gib"] else None
            found.setdefault(row["peer"], {})[row["table"], int(row["row"])] = PeerStep(
                row["commit"], row["recorded"], float(row["step_time_s"]), memory
            )
    return found


def peer_scores(rows: SourceRows) -> list[PeerScore]:
    """One for each peer that has rows of the source."""
    found = []
    for peer, known in peer_steps().items():
        steps = [step for step in rows.steps if (step.table, step.row) in known]
        said = [known[step.table, step.row] for step in steps]
        if said:
            found.append(
                PeerScore(
                    peer=f"{NAMES[peer]} {said[0].version}",
                    source=rows.name,
                    theirs=_score(steps, said),
                    ours=_score(steps, [_ours(step) for step in steps]),
                )
            )
    return found


def _ours(step: MeasuredStep) -> PeerStep:
    return PeerStep("", "", *prediction(step))


def _score(steps: list[MeasuredStep], said: list[PeerStep]) -> RowsScore:
    predicted = [each.seconds for each in said]
    measured = [each.seconds for each in steps]
    held_out = fitted = speed = None
    enough = len(steps) >= FEWEST_TO_FIT
    if enough:
        factor = min(
            FACTORS, key=lambda f: mean_error([f * p for p in predicted[::3]], measured[::3])
        )
        rest = [(p, m) for i, (p, m) in enumerate(zip(predicted, measured, strict=True)) if i % 3]
        held_out = mean(abs(p / m - 1) for p, m in rest)
        fitted = mean(abs(factor * p / m - 1) for p, m in rest)
        speed = 1 / factor
    known = [
        (each.memory_gib, step.memory_gib)
        for each, step in zip(said, steps, strict=True)
        if each.memory_gib is not None and step.memory_gib is not None
    ]
    return RowsScore(
        rows=len(steps),
        error=mean_error(predicted, measured),
        bias=mean(p / m - 1 for p, m in zip(predicted, measured, strict=True)),
        held_out=held_out,
        fitted=fitted,
        speed=speed,
        rank_correlation=spearman(predicted, measured) if enough else None,
        memory_error=mean_error(*map(list, zip(*known, strict=True))) if known else None,
    )


def peer_rows(scores: list[PeerScore]) -> list[ResultRow]:
    """In the form of all benches: the peer is the baseline, on the same rows."""
    found = []
    for score in scores:
        ours, theirs = score.ours, score.theirs
        case = f"{score.source}: {score.peer}"

        def row(metric: str, ours: float, theirs: float, case: str = case) -> ResultRow:
            ratio = theirs / ours if metric == "mean_error" else None
            return ResultRow(
                case=case, metric=metric, ours=ours, baseline=theirs, ratio=ratio, spread=None
            )

        found.append(row("mean_error", ours.error, theirs.error))
        if ours.rank_correlation is not None and theirs.rank_correlation is not None:
            found.append(row("rank_correlation", ours.rank_correlation, theirs.rank_correlation))
        if ours.memory_error is not None and theirs.memory_error is not None:
            found.append(row("memory_error", ours.memory_error, theirs.memory_error))
    return found


def recorded_on() -> str:
    """Of each peer, its version and the day of its figures: a line for people."""
    first = {peer: next(iter(steps.values())) for peer, steps in peer_steps().items()}
    return ", ".join(f"{NAMES[p]} {s.version} on {s.recorded}" for p, s in sorted(first.items()))
