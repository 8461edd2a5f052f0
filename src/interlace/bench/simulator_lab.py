"""Rows of `simulator` for our own benches: what was predicted of their steps, and what they took.

The other benches predict each step that they run, from times that they measured just before, and
write both down (`predicted_over_measured`). `presets/measured/lab.csv` holds what they wrote when
they were last run for the record; `scripts/record_lab.py` makes it from `bench/results`.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import interlace.presets
from interlace.bench.results import ResultRow

TABLE = Path(interlace.presets.__path__[0]) / "measured" / "lab.csv"
"""One row for each step that was predicted and run."""
FIELDS = ("bench", "case", "way", "predicted_over_measured", "machine", "torch", "date")
"""Its columns. The ratio is the bench's own: of medians, or the median of ratios."""
HEADER = ("bench", "steps", "median error", "worst", "machine", "date")


@dataclass(frozen=True, kw_only=True)
class LabScore:
    """The steps of one bench on one kind of machine."""

    bench: str
    machine: str
    date: str
    steps: int
    error: float
    """Median of |predicted / measured - 1|."""
    worst: float


def lab_scores() -> list[LabScore]:
    """One for each bench and machine, in the order of the table."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["bench"], row["machine"]), []).append(row)
    return [_score(bench, machine, rows) for (bench, machine), rows in found.items()]


def _score(bench: str, machine: str, rows: list[dict[str, str]]) -> LabScore:
    errors = [abs(float(row["predicted_over_measured"]) - 1) for row in rows]
    return LabScore(
        bench=bench, machine=machine, date=max(row["date"] for row in rows), steps=len(rows),
        error=median(errors), worst=max(errors),
    )  # fmt: skip


def lab_table(scores: list[LabScore]) -> list[tuple[str, ...]]:
    """Cells of the printed table, in the order of `HEADER`."""
    return [
        (each.bench, str(each.steps), f"{each.error:.1%}", f"{each.worst:.0%}", each.machine,
         each.date)
        for each in scores
    ]  # fmt: skip


def lab_rows(scores: list[LabScore]) -> list[ResultRow]:
    """In the form of all benches; a perfect prediction is the baseline."""
    found = []
    for each in scores:
        case = f"own bench {each.bench}, {each.machine}"
        for metric, value in (("median_error", each.error), ("worst_error", each.worst)):
            row = ResultRow(
                case=case, metric=metric, ours=value, baseline=0.0, ratio=None, spread=None
            )
            found.append(row)
    return found
