"""Expected against measured: did the plan hide what it said it would?"""

from collections.abc import Mapping
from typing import Any

from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.report.tables import aligned, milliseconds
from interlace.sim.strands import simulate

HEADER = ("collective", "link", "count", "expected ms", "measured ms", "exp. exposed", "exposed ms")


def proof_rows(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    measured: Timeline,
    micro_batches: int,
) -> list[dict[str, Any]]:
    """Per kind of collective: count, busy and exposed time of one step, expected and measured."""
    expected: dict[tuple[str, str], list[int]] = {}
    for name, phase in plan.phases.items():
        times = costs.of(graphs[name])
        timeline = simulate(graphs[name], phase.order, times, issue_ns=costs.issue_ns)
        repeats = micro_batches - 1 if name == "pair" else 1
        for row in timeline.collective_rows():
            sums = expected.setdefault((row.kind, row.lane), [0, 0])
            sums[0] += repeats * row.busy_ns
            sums[1] += repeats * row.exposed_ns
    return [
        {
            "kind": str(row.kind),
            "lane": row.lane,
            "count": row.count,
            "expected_busy_ms": expected.get((row.kind, row.lane), [0, 0])[0] / 1e6,
            "measured_busy_ms": row.busy_ns / 1e6,
            "expected_exposed_ms": expected.get((row.kind, row.lane), [0, 0])[1] / 1e6,
            "measured_exposed_ms": row.exposed_ns / 1e6,
        }
        for row in measured.collective_rows()
    ]


def proof_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    cells = [
        (
            row["kind"],
            row["lane"],
            str(row["count"]),
            *(
                milliseconds(row[key] * 1e6)
                for key in (
                    "expected_busy_ms",
                    "measured_busy_ms",
                    "expected_exposed_ms",
                    "measured_exposed_ms",
                )
            ),
        )
        for row in rows
    ]
    return aligned(HEADER, cells, text_columns=2)
