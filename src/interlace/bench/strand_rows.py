"""What a comparison of ways to run strands shows: rows for the result file, tables for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from interlace.bench.results import ResultRow, speedup
from interlace.text import aligned, number, percent

OURS = "merge"
"""The way of running that stands for us: the search that a run uses by default."""
RIVALS = {
    "eager": "eager",
    "1": "one_strand",
    "inductor": "inductor",
    "segment_pairs": "segment_pairs",
}
"""What `merge` and `list` are compared with, and how metrics call it."""
PREDICTED = ("1", "segment_pairs", "list", "merge")
"""Ways whose predicted times are compared with measured ones."""
COLUMNS = ("eager", "1", "inductor", "segment_pairs", "list", "merge")
"""Ways of running, as columns of the tables."""
NAMES = {"1": "one strand"}
"""What the tables call a way that does not explain itself."""
MIB = 2**20
"""Bytes of a MiB."""


@dataclass(frozen=True, kw_only=True)
class StrandCase:
    """One link rate and number of micro-batches."""

    target: float
    """Communication time over compute time that the rate was chosen for."""
    rate: str
    micro_batches: int
    comparison: Mapping[str, Any]
    """Content of comparison.json."""

    @property
    def name(self) -> str:
        """`comm 0.5x, 8 micro-batches`."""
        return f"comm {self.target:g}x, {self.micro_batches} micro-batches"

    @property
    def modes(self) -> Mapping[str, Any]:
        """Results by way of running."""
        return self.comparison["modes"]

    def timed(self, mode: str, key: str) -> list[float]:
        """Values of the timed steps; the first step of each way only warms up."""
        return self.modes[mode][key][1:]

    @property
    def achieved(self) -> float:
        """Communication over compute time, as measured with one strand."""
        return self.modes["1"]["communication_ms"] / self.modes["1"]["compute_ms"]


def rows_of(case: StrandCase) -> list[ResultRow]:
    """All metrics of one case. Repeats pair step i of one way with step i of the other."""
    return [
        _row(case, "communication_over_compute", case.achieved, case.target),
        *_speedups(case),
        *_fractions(case),
        *_predictions(case),
        *_memory(case),
    ]


def _row(
    case: StrandCase, metric: str, ours: float, baseline: float, ratio: float | None = None
) -> ResultRow:
    if ratio is None and baseline:
        ratio = ours / baseline
    return ResultRow(
        case=case.name, metric=metric, ours=ours, baseline=baseline, ratio=ratio, spread=None
    )


def _speedups(case: StrandCase) -> Iterator[ResultRow]:
    ours = case.timed(OURS, "step_ms")
    for mode, name in RIVALS.items():
        if mode in case.modes:
            yield speedup(case.name, f"speedup_vs_{name}", ours, case.timed(mode, "step_ms"))
    if "list" in case.modes:
        listed = case.timed("list", "step_ms")
        yield speedup(case.name, "speedup_vs_list", ours, listed)
        if "segment_pairs" in case.modes:
            pairs = case.timed("segment_pairs", "step_ms")
            yield speedup(case.name, "list_speedup_vs_segment_pairs", listed, pairs)
    if "eager" in case.modes:
        cpu = case.timed(OURS, "cpu_ms")
        yield speedup(case.name, "cpu_time_vs_eager", cpu, case.timed("eager", "cpu_ms"))


def _fractions(case: StrandCase) -> Iterator[ResultRow]:
    base = "eager" if "eager" in case.modes else "1"
    for metric in ("hidden_fraction", "steady_hidden_fraction"):
        ours, baseline = case.modes[OURS][metric], case.modes[base].get(metric)
        if ours is not None and baseline is not None:
            yield _row(case, metric, ours, baseline)


def _predictions(case: StrandCase) -> Iterator[ResultRow]:
    for mode in PREDICTED:
        if mode in case.modes:
            predicted = case.modes[mode]["predicted_ms"]
            measured = median(case.timed(mode, "graph_ms"))
            suffix = "" if mode == OURS else f"_{RIVALS.get(mode, mode)}"
            yield _row(case, f"predicted_over_measured{suffix}", predicted, measured)
    ours = case.modes[OURS]
    gap = ours["predicted_ms"] / ours["bound_ms"] - 1
    yield _row(case, "gap_to_bound", ours["predicted_ms"], ours["bound_ms"], gap)


def _memory(case: StrandCase) -> Iterator[ResultRow]:
    """Two strands over one strand - 1: everything that a step needs, then only its values.

    In MiB; the constant part (weights, gradients, optimizer state) is counted in all of them.
    """
    constant = case.comparison["constant_bytes"] / MIB
    two, one = case.modes[OURS], case.modes["1"]
    for key, suffix in (
        ("allocated_bytes", ""),
        ("counted_bytes", "_counted"),
        ("resident_bytes", "_resident"),
    ):
        if two.get(key) is None or not one.get(key):
            continue
        ours, baseline = two[key] / MIB, one[key] / MIB
        total = (constant + ours) / (constant + baseline) - 1
        yield _row(
            case, f"extra_memory_fraction{suffix}", constant + ours, constant + baseline, total
        )
        yield _row(
            case, f"extra_value_memory_fraction{suffix}", ours, baseline, ours / baseline - 1
        )


def summary_rows(cases: Sequence[StrandCase]) -> list[ResultRow]:
    """How far predictions are off over all cases: the median of |predicted / measured - 1|."""
    return [
        ResultRow(
            case="all",
            metric="prediction_error" + ("" if mode == OURS else f"_{RIVALS.get(mode, mode)}"),
            ours=median(errors),
            baseline=0.0,
            ratio=None,
            spread=(min(errors), max(errors)),
        )
        for mode in PREDICTED
        if (errors := _errors(cases, mode))
    ]


def _errors(cases: Sequence[StrandCase], mode: str) -> list[float]:
    return [
        abs(case.modes[mode]["predicted_ms"] / median(case.timed(mode, "graph_ms")) - 1)
        for case in cases
        if mode in case.modes
    ]


def tables(cases: Sequence[StrandCase]) -> str:
    """Step times, hiding and predictions, and memory, one line per case."""
    parts = [
        "step time in ms",
        _times(cases),
        f"communication hidden by each way; the columns from `steady` on are of {OURS}",
        _quality(cases),
    ]
    memory = [case for case in cases if "allocated_bytes" in case.modes[OURS]]
    if memory:
        parts += ["memory of one step in MiB: all, and values alone", _memory_table(memory)]
    return "\n\n".join(parts)


def _times(cases: Sequence[StrandCase]) -> str:
    header = ("comm", "micro-b.", "link", "measured", *(NAMES.get(c, c) for c in COLUMNS))
    gained = ("eager", "one_strand", "segment_pairs")
    gains = ("vs eager", "vs one", "vs pairs")
    rows = []
    for case in cases:
        cells = [
            number(median(case.timed(mode, "step_ms"))) if mode in case.modes else "-"
            for mode in COLUMNS
        ]
        by_metric = {row.metric: row for row in rows_of(case)}
        ratios = [by_metric.get(f"speedup_vs_{name}") for name in gained]
        rows.append(
            (
                f"{case.target:g}x",
                str(case.micro_batches),
                case.rate,
                f"{case.achieved:.2f}x",
                *cells,
                *("-" if row is None else f"{row.ratio:.2f}x" for row in ratios),
            )
        )
    return aligned((*header, *gains), rows, text_columns=1)


def _quality(cases: Sequence[StrandCase]) -> str:
    columns = tuple(NAMES.get(mode, mode) for mode in COLUMNS)
    header = ("comm", "micro-b.", *columns, "steady", "pred/meas", "over bound", "CPU vs eager")
    rows = []
    for case in cases:
        by_metric = {row.metric: row for row in rows_of(case)}
        steady = case.modes[OURS]["steady_hidden_fraction"]
        cpu = by_metric.get("cpu_time_vs_eager")
        hidden = [case.modes.get(mode, {}).get("hidden_fraction") for mode in COLUMNS]
        rows.append(
            (
                f"{case.target:g}x",
                str(case.micro_batches),
                *("-" if fraction is None else percent(fraction) for fraction in hidden),
                "-" if steady is None else percent(steady),
                f"{by_metric['predicted_over_measured'].ratio:.3f}",
                percent(by_metric["gap_to_bound"].ratio or 0.0),
                "-" if cpu is None else f"{cpu.ours / cpu.baseline:.2f}x",
            )
        )
    return aligned(header, rows, text_columns=1)


def _memory_table(cases: Sequence[StrandCase]) -> str:
    header = ("case", "metric", "two strands", "one strand", "extra")
    rows = [
        (row.case, row.metric, number(row.ours), number(row.baseline), percent(row.ratio or 0.0))
        for case in cases
        for row in _memory(case)
    ]
    return aligned(header, rows, text_columns=2)
