"""A cost table as text: overlap effectiveness of kinds, slow-downs, links."""

from collections.abc import Sequence

from interlace.ir.costs import CostTable, PairCost
from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.noise import noise_of, relative_spread
from interlace.text import aligned, milliseconds, number

FIT_HEADER = ("collective", "lane", "latency us", "MB/s", "1 MiB in ms", "largest error")
"""Columns of `fit_rows`."""
TOGETHER_HEADER = ("together", "first ms", "second ms", "both ms", "OEF")
"""Columns of `together_rows`."""
OPERATOR_HEADER = ("operator and shapes", "kind", "lane", "ms", "spread ms")
"""Columns of `operator_rows`."""


def dashed(kind: str) -> str:
    """`all-gather` for `all_gather`."""
    return kind.replace("_", "-")


def oef_grid(table: CostTable) -> tuple[list[str], list[str], dict[tuple[str, str], PairCost]]:
    """(rows, columns, pairs by row and column): compute kinds, collectives with their lane."""
    cells = {(str(p.compute), f"{dashed(p.collective)} {p.lane}"): p for p in table.pairs}
    rows = list(dict.fromkeys(row for row, _ in cells))
    return rows, list(dict.fromkeys(column for _, column in cells)), cells


def oef_rows(table: CostTable, *, factors: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table of pairs: their OEF, or both slow-down factors."""
    rows, columns, cells = oef_grid(table)

    def cell(row: str, column: str) -> str:
        pair = cells.get((row, column))
        if pair is None:
            return "-"
        if factors:
            return f"{pair.compute_factor:.2f} / {pair.transfer_factor:.2f}"
        return f"{pair.oef:.2f}"

    return ("", *columns), [(row, *(cell(row, column) for column in columns)) for row in rows]


def fit_rows(table: CostTable) -> list[tuple[str, ...]]:
    """One row per fitted link and collective, as under FIT_HEADER; bytes are of the full tensor."""
    return [
        (
            dashed(fit.kind),
            fit.lane,
            number(fit.latency_ns / 1e3),
            number(1e3 / fit.ns_per_byte) if fit.ns_per_byte else "-",
            milliseconds(fit.ns(2**20)),
            f"{100 * fit.largest_error:.0f} %",
        )
        for fit in table.fits
    ]


def together_rows(table: CostTable) -> list[tuple[str, ...]]:
    """Two lanes at the same time, then compute beside compute, as under TOGETHER_HEADER."""
    return [
        (
            f"{pair.first} + {pair.second}",
            *map(milliseconds, (pair.first_ns, pair.second_ns, pair.pair_ns)),
            f"{pair.oef:.2f}",
        )
        for pair in (*table.lane_pairs, *table.compute_pairs)
    ]


def operator_rows(table: CostTable) -> list[tuple[str, ...]]:
    """Every operator and collective alone, the slowest first, as under OPERATOR_HEADER."""
    ordered = sorted(table.operators.items(), key=lambda item: (-item[1].solo_ns, item[0]))
    return [
        (key, dashed(c.kind), c.lane, milliseconds(c.solo_ns), milliseconds(c.spread_ns))
        for key, c in ordered
    ]


def headline(table: CostTable) -> str:
    """What the table holds, in one line."""
    collectives = sum(cost.lane != COMPUTE_LANE for cost in table.operators.values())
    compute = len(table.operators) - collectives
    start = number(table.issue_ns / 1e3)
    return (
        f"{compute} operators and {collectives} collectives alone, spread "
        f"{100 * relative_spread(table.operators.values()):.0f} %; starting a collective takes "
        f"{start} us"
    )


def warning(table: CostTable) -> str:
    """That times are noisy and why, as a line; empty if nothing looks wrong."""
    reasons = noise_of(table)
    return f"warning: noisy times: {'; '.join(reasons)}" if reasons else ""


def cost_summary(table: CostTable) -> str:
    """The table for a terminal."""
    parts = [headline(table), *filter(None, [warning(table)])]
    if table.pairs:
        header, rows = oef_rows(table, factors=False)
        parts += ["overlap effectiveness (1: the shorter one is free)", _text(header, rows)]
        header, rows = oef_rows(table, factors=True)
        parts += ["slow-down while both run (compute / transfer)", _text(header, rows)]
    if table.fits:
        parts.append("collectives alone, by bytes of the full tensor")
        parts.append(aligned(FIT_HEADER, fit_rows(table), text_columns=2))
    if table.lane_pairs or table.compute_pairs:
        parts += ["of one sort at the same time", _text(TOGETHER_HEADER, together_rows(table))]
    if table.links:
        shared = ", ".join(f"{lane}: {link}" for lane, link in sorted(table.links.items()))
        parts.append(f"lanes that share a link: {shared}")
    if table.queues:
        behind = ", ".join(f"{lane} behind {other}" for lane, other in sorted(table.queues.items()))
        parts.append(f"transfers that stand in one queue: {behind}")
    return "\n\n".join(parts)


def _text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return aligned(header, rows, text_columns=1)
