"""What the blocks of `interlace bench decompose` show: rows for the result file, tables for people.

Overhead is the time of a step above that of COMPUTE, its compute alone. Of each way the fastest
step counts: whatever else runs on the machine, or beside it on the same processor, only ever adds
time, by bursts that are as long as a step and larger than what is looked for. Spreads are over the
turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from interlace.bench.decompose_shapes import (
    COMPUTE,
    QUERY_SPLIT,
    SLICES,
    VANILLA,
    VARIANTS,
    Shape,
    hidden_under_ns,
    shape_of,
)
from interlace.bench.results import ResultRow
from interlace.sim.decomposed import overhead_ns
from interlace.text import aligned, number, percent

OURS = {"mlp": "ring", "attention": QUERY_SPLIT}
"""The way that stands for us in the summary."""
COLUMNS = (COMPUTE, VANILLA, *SLICES, *VARIANTS, QUERY_SPLIT)
"""Ways that are measured, in the order of the table's columns."""
_HIDDEN_RATIO = 1.0
"""Up to this transfer time over compute time, nothing need be exposed."""
_MS = 1e6
"""Nanoseconds of a millisecond."""


@dataclass(frozen=True, kw_only=True)
class DecomposeCase:
    """One shape, rate and direction of passes."""

    ranks: int
    shape: Shape
    ratio: float
    backward: bool
    calibration: Mapping[str, Any]
    """Fields of `decompose_job.Calibration`."""
    ways: Mapping[str, Mapping[str, Sequence[int]]]
    """Way -> ns and cpu_ns of each step."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "DecomposeCase":
        """From what a rank wrote."""
        values: dict[str, Any] = {**fields, "shape": shape_of(fields["shape"])}
        return cls(**values)

    @property
    def group(self) -> str:
        """`TP 2, forward`: what is summed up together."""
        passes = "forward + backward" if self.backward else "forward"
        return f"TP {self.ranks}{self.shape.compute}, {passes}"

    @property
    def name(self) -> str:
        """Label of its rows."""
        return f"{self.shape.name}, {self.group}, t_p {self.ratio:g} t_c"

    @property
    def ours(self) -> str:
        """The way that counts for us."""
        return OURS[self.shape.block]

    def ns(self, way: str) -> Sequence[int]:
        """Times of the counted steps."""
        return self.ways[way]["ns"]

    def fastest(self, way: str) -> int:
        """ns of the fastest counted step."""
        return min(self.ns(way))

    def overhead_ns(self, way: str) -> int:
        """Of the fastest step."""
        return self.fastest(way) - self.fastest(COMPUTE)

    def removed(self, way: str) -> float:
        """The share of vanilla's overhead that `way` does not have."""
        return 1 - self.overhead_ns(way) / self.overhead_ns(VANILLA)

    def removed_in_turns(self, way: str) -> list[float]:
        """The same within each turn."""
        times = zip(self.ns(way), self.ns(VANILLA), self.ns(COMPUTE), strict=True)
        return [1 - (own - alone) / (vanilla - alone) for own, vanilla, alone in times]

    def expected_ns(self, way: str) -> int:
        """Compute alone plus what the formula leaves exposed."""
        return self.fastest(COMPUTE) + expected_overhead_ns(self, way)


def expected_overhead_ns(case: DecomposeCase, way: str) -> int:
    """What `decomposed_ns` leaves exposed at the sites of a block.

    Of a ring in both directions, both halves leave by the one link that a rank of a lab has. With a
    causal mask, the first partial sum of a query split travels under the shortest slice. In the
    backward pass of a scatter, each arriving slice is multiplied twice, for x and for the weight;
    in that of a gather, the weights' gradients fill what is left of the waits.
    """
    parts, sent, ranks = case.calibration["parts_ns"], case.calibration["transfer_ns"], case.ranks
    under = hidden_under_ns(parts, ranks) if way == QUERY_SPLIT else parts["scatter"]
    exposed = overhead_ns(parts["gather"], sent, ranks=ranks)
    scatter = overhead_ns(under, sent, ranks=ranks)
    if way == QUERY_SPLIT and case.shape.causal:
        shortest = parts["scatter"] + parts["attention"] // ranks**2
        scatter = max(scatter, sent - shortest)
    exposed += scatter
    if case.backward:
        exposed += overhead_ns(2 * under, sent, ranks=ranks)
        filler = ranks * parts["gather"]
        exposed += overhead_ns(parts["gather"], sent, ranks=ranks, filler_ns=filler)
    return exposed


def rows_of(case: DecomposeCase) -> Iterator[ResultRow]:
    """All metrics of one case; a way other than ours has its name behind the metric."""
    yield from _link_rows(case)
    for way in case.ways:
        if way in (COMPUTE, VANILLA):
            continue
        suffix = "" if way == case.ours else f"_{way.replace(' ', '_').replace('-', '_')}"
        yield _removed_row(case, way, suffix)
        yield _speedup(case, f"speedup_vs_vanilla{suffix}", way, VANILLA)
        if way not in SLICES:
            yield _formula_row(case, way, suffix)
    best = min(SLICES, key=case.fastest)
    yield _speedup(case, "speedup_vs_best_slicing", case.ours, best)


def _link_rows(case: DecomposeCase) -> Iterator[ResultRow]:
    calibration = case.calibration
    sent = calibration["transfer_ns"]
    compute = hidden_under_ns(calibration["parts_ns"], case.ranks)
    yield _row(case, "transfer_over_slice_compute", sent / compute, case.ratio)
    yield _row(case, "transport_cpu_share", calibration["transfer_cpu_ns"] / _MS, sent / _MS)


def _row(
    case: DecomposeCase,
    metric: str,
    ours: float,
    baseline: float,
    ratio: float | None = None,
    spread: Sequence[float] = (),
) -> ResultRow:
    """`ratio` is ours over baseline by default; the spread is that of the given ratios."""
    if ratio is None and baseline:
        ratio = ours / baseline
    return ResultRow(
        case=case.name,
        metric=metric,
        ours=ours,
        baseline=baseline,
        ratio=ratio,
        spread=(min(spread), max(spread)) if spread else None,
    )


def _speedup(case: DecomposeCase, metric: str, way: str, rival: str) -> ResultRow:
    own, other = case.fastest(way) / _MS, case.fastest(rival) / _MS
    ratios = [b / a for a, b in zip(case.ns(way), case.ns(rival), strict=True)]
    return _row(case, metric, own, other, other / own, ratios)


def _removed_row(case: DecomposeCase, way: str, suffix: str) -> ResultRow:
    """Overheads in ms; the ratio is the share of vanilla's that is gone."""
    ours, baseline = (case.overhead_ns(name) / _MS for name in (way, VANILLA))
    spread = case.removed_in_turns(way)
    return _row(case, f"overhead_removed{suffix}", ours, baseline, case.removed(way), spread)


def _formula_row(case: DecomposeCase, way: str, suffix: str) -> ResultRow:
    """Measured and expected ms; a ratio above 1 is slower than the formula says."""
    exposed = expected_overhead_ns(case, way)
    pairs = zip(case.ns(way), case.ns(COMPUTE), strict=True)
    spread = [own / (alone + exposed) for own, alone in pairs]
    own, expected = case.fastest(way) / _MS, case.expected_ns(way) / _MS
    return _row(case, f"over_formula{suffix}", own, expected, spread=spread)


def summary_rows(cases: Sequence[DecomposeCase]) -> list[ResultRow]:
    """Per group the worst of our cases: where transfers are shorter than compute the smallest share
    removed and the smallest speed-up, where they are longer the farthest from the formula."""
    rows = []
    for group in dict.fromkeys(case.group for case in cases):
        own = [(case, list(rows_of(case))) for case in cases if case.group == group]
        hidden = [of_case for case, of_case in own if case.ratio <= _HIDDEN_RATIO]
        exposed = [of_case for case, of_case in own if case.ratio > _HIDDEN_RATIO]
        for metric in ("overhead_removed", "speedup_vs_vanilla"):
            rows += _extreme(group, metric, hidden, farness=lambda ratio: -ratio)
        rows += _extreme(group, "over_formula", exposed, farness=lambda ratio: abs(ratio - 1))
    return rows


def _extreme(
    group: str,
    metric: str,
    of_cases: Sequence[Sequence[ResultRow]],
    *,
    farness: Callable[[float], float],
) -> list[ResultRow]:
    """The row of `metric` that is farthest, as the group's; nothing if there is no case."""
    found = [row for rows in of_cases for row in rows if row.metric == metric]
    if not found:
        return []
    ratios = [row.ratio for row in found if row.ratio is not None]
    worst = max(found, key=lambda row: farness(row.ratio if row.ratio is not None else 1.0))
    spread = (min(ratios), max(ratios))
    return [
        ResultRow(
            case=f"worst of {group}",
            metric=metric,
            ours=worst.ours,
            baseline=worst.baseline,
            ratio=worst.ratio,
            spread=spread,
        )
    ]


def tables(cases: Sequence[DecomposeCase]) -> str:
    """Step times, overhead removed, and links, one line per case."""
    return "\n\n".join(
        [
            "fastest step in ms",
            _table(cases, lambda case, way: number(case.fastest(way) / _MS), COLUMNS),
            "share of vanilla's communication overhead that is gone",
            _table(cases, lambda case, way: percent(case.removed(way)), COLUMNS[2:]),
            "end-to-end time saved of vanilla's",
            _table(cases, lambda case, way: percent(_saved(case, way)), COLUMNS[2:]),
            "measured over formula",
            _table(cases, _over_formula, COLUMNS[5:]),
            "links",
            _links(cases),
        ]
    )


def _saved(case: DecomposeCase, way: str) -> float:
    return 1 - case.fastest(way) / case.fastest(VANILLA)


def _over_formula(case: DecomposeCase, way: str) -> str:
    return f"{case.fastest(way) / case.expected_ns(way):.3f}"


def _table(
    cases: Sequence[DecomposeCase], cell: Callable[[DecomposeCase, str], str], ways: Sequence[str]
) -> str:
    header = ("block", "case", "t_p/t_c", *ways)
    rows = [
        (
            case.shape.name,
            case.group,
            f"{case.ratio:g}",
            *(cell(case, way) if way in case.ways else "-" for way in ways),
        )
        for case in cases
    ]
    return aligned(header, rows, text_columns=2)


def _links(cases: Sequence[DecomposeCase]) -> str:
    figures = ("Mbit/s", "t_c ms", "t_p ms", "transport CPU", "CPU vs vanilla")
    header = ("block", "case", "t_p/t_c", *figures)
    rows = []
    for case in cases:
        calibration = case.calibration
        compute = hidden_under_ns(calibration["parts_ns"], case.ranks)
        sent, cpu = calibration["transfer_ns"], calibration["transfer_cpu_ns"]
        spent = [median(case.ways[way]["cpu_ns"]) for way in (case.ours, VANILLA)]
        rows.append(
            (
                case.shape.name,
                case.group,
                f"{case.ratio:g}",
                number(calibration["rate_mbit"]),
                number(compute / _MS),
                number(sent / _MS),
                percent(cpu / sent),
                f"{spent[0] / spent[1]:.2f}x",
            )
        )
    return aligned(header, rows, text_columns=2)
