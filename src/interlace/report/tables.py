"""Tables and lines for the terminal: plain text, aligned, without any dependency.

Trainers on bare GPU machines print these too, so nothing here needs more than the standard library.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from interlace.ir.timeline import Timeline
from interlace.text import aligned, milliseconds, number, percent, size

MODE_NAMES = {
    "eager": "PyTorch eager",
    "plain-1": "one strand, not decomposed",
    "1": "one strand",
    "plain-2": "two strands, not decomposed",
    "2": "two strands, interlaced",
    "pipeline": "one stage of a pipeline",
    "decomposed-1": "one strand, all passes decomposed",
    "decomposed-2": "two strands, all passes decomposed",
}
"""What people read for each way of running a step."""
MODE_ORDER = ("eager", "plain-1", "decomposed-1", "1", "plain-2", "decomposed-2", "2")
"""Ways of running, from what a user has today to what interlace does."""


PROOF_HEADER = (
    "collective", "link", "count", "expected ms", "measured ms", "exp. exposed", "exposed ms",
)  # fmt: skip
"""Columns of `proof_cells`."""
COMPARISON_HEADER = ("way of running", "step ms", "min to max", "CPU ms", "exposed ms", "hidden")
"""Columns of `comparison_rows`."""
COLLECTIVE_HEADER = (
    "collective",
    "lane",
    "count",
    "bytes",
    "busy ms",
    "hidden ms",
    "exposed ms",
    "hidden",
)
"""Columns of `collective_cells`."""


def collective_cells(timeline: Timeline) -> list[tuple[str, ...]]:
    """One row of text per kind and lane, as under COLLECTIVE_HEADER, then the sum of all."""
    rows = timeline.collective_rows()
    cells: list[tuple[str, ...]] = []
    for row in rows:
        hidden = row.hidden_ns / row.busy_ns if row.busy_ns else 1.0
        times = (row.busy_ns, row.hidden_ns, row.exposed_ns)
        cells.append(
            (
                row.kind.replace("_", "-"),
                row.lane,
                f"{row.count:,}",
                size(row.bytes),
                *map(milliseconds, times),
                percent(hidden),
            )
        )
    busy, exposed = timeline.communication_ns(), timeline.exposed_ns()
    cells.append(
        (
            "all",
            "",
            f"{sum(row.count for row in rows):,}",
            size(sum(row.bytes for row in rows)),
            *map(milliseconds, (busy, max(0, busy - exposed), exposed)),
            percent(timeline.hidden_fraction()),
        )
    )
    return cells


def collective_table(timeline: Timeline) -> str:
    """A step's collectives as text: count, bytes, busy, hidden and exposed time per kind."""
    if not timeline.collectives:
        return "no collectives were recorded"
    return aligned(COLLECTIVE_HEADER, collective_cells(timeline), text_columns=2)


def bench_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a bench (`case`, `metric`, `ours`, `baseline`, `ratio`, `spread`) as text."""
    header = ("case", "metric", "ours", "baseline", "ratio", "spread")
    cells = [
        (
            str(row["case"]),
            str(row["metric"]),
            _optional(row["ours"]),
            _optional(row["baseline"]),
            _optional(row["ratio"]),
            "-" if row["spread"] is None else " to ".join(map(_optional, row["spread"])),
        )
        for row in rows
    ]
    return aligned(header, cells, text_columns=2) if cells else "no rows"


def _optional(value: float | None) -> str:
    return "-" if value is None else number(value)


def ordered_modes(modes: Mapping[str, Any]) -> list[str]:
    """Modes from what a user has today to what interlace does; others after them."""
    known = [mode for mode in MODE_ORDER if mode in modes]
    return known + sorted(set(modes) - set(known))


def comparison_lines(comparison: Mapping[str, Any]) -> list[str]:
    """What a comparison of ways to run showed: step times, identity of losses, gain.

    `comparison` is the content of comparison.json; what was not measured is said to be so.
    """
    modes = comparison["modes"]
    lines = [
        f"{comparison['steps']} steps of {comparison['micro_batches']} micro-batches per way, "
        f"taken in turn, on {comparison['link']}",
        "",
    ]
    table = aligned(COMPARISON_HEADER, comparison_rows(comparison), text_columns=1)
    lines += [*table.splitlines(), ""]
    lines.append(_identity_line(comparison))
    difference = comparison.get("max_relative_difference_to_eager")
    if difference is not None:
        lines.append(f"largest relative difference of a loss to eager: {difference:.1e}")
    lines.append(f"hidden fraction: {_hidden(modes.get('2', {})) or 'not recorded'}")
    for key, name in (
        ("speedup_vs_eager", "PyTorch eager"),
        ("speedup_vs_one_strand", "one strand"),
        ("speedup_vs_plain_one_strand", "one strand, not decomposed"),
        ("speedup_vs_plain_two_strands", "two strands, not decomposed"),
        ("speedup_vs_decomposed_one_strand", "one strand, all passes decomposed"),
        ("speedup_vs_decomposed_two_strands", "two strands, all passes decomposed"),
    ):
        gain = comparison.get(key)
        if gain is not None:
            spread = f"{gain['min']:.2f}x to {gain['max']:.2f}x"
            lines.append(f"speed-up over {name}: {gain['median']:.2f}x ({spread})")
    return lines


def comparison_rows(comparison: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of text per compared way, as under COMPARISON_HEADER; times are medians."""
    modes = comparison["modes"]
    return [_step_time_cells(name, modes[name]) for name in ordered_modes(modes)]


def _step_time_cells(name: str, mode: Mapping[str, Any]) -> tuple[str, ...]:
    times, exposed = mode["step_ms"], mode.get("exposed_ms")
    return (
        MODE_NAMES.get(name, name),
        number(median(times)),
        f"{number(min(times))} to {number(max(times))}",
        number(median(mode["cpu_ms"])) if mode.get("cpu_ms") else "-",
        _optional(exposed),
        "-" if _sends_nothing(mode) else _hidden(mode) or "-",
    )


def _hidden(mode: Mapping[str, Any]) -> str:
    """The hidden fraction of a way to run, empty if it was not recorded."""
    if _sends_nothing(mode):
        return "nothing to hide, a step has no communication"
    hidden = mode.get("hidden_fraction")
    return "" if hidden is None else percent(hidden)


def _sends_nothing(mode: Mapping[str, Any]) -> bool:
    """Whether a recorded step had no communication, as on one rank."""
    return mode.get("communication_ms") == 0


def _identity_line(comparison: Mapping[str, Any]) -> str:
    identical = comparison.get("losses_identical")
    if identical is None:
        return "losses identical: not compared (needs both one strand and two strands)"
    answer = "yes" if identical else "NO"
    return f"losses identical: {answer} (two strands against one, {comparison['steps']} steps)"


def proof_cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Per kind of collective and link: busy and exposed time of a step, expected by the plan and
    measured. `rows` are those of the event `proof` of a run."""
    times = ("expected_busy_ms", "measured_busy_ms", "expected_exposed_ms", "measured_exposed_ms")
    return [
        (
            *(row["kind"], row["lane"], str(row["count"])),
            *(milliseconds(row[key] * 1e6) for key in times),
        )
        for row in rows
    ]
