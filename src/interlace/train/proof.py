"""Expected against measured: did the plan hide what it said it would?"""

from collections.abc import Mapping
from typing import Any

from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.plan import Plan
from interlace.ir.timeline import CollectiveRow, Timeline
from interlace.report.tables import PROOF_HEADER, proof_cells
from interlace.sim.simulated_step import simulate_step
from interlace.text import aligned


def proof_rows(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    measured: Timeline,
    micro_batches: int,
) -> list[dict[str, Any]]:
    """Per kind of collective: count, busy and exposed time of one step, expected and measured."""
    timeline = simulate_step(plan, graphs, costs, micro_batches)
    expected = {(row.kind, row.lane): row for row in timeline.collective_rows()}
    nothing = CollectiveRow("", "", 0, 0, 0, 0)
    return [
        {
            "kind": str(row.kind),
            "lane": row.lane,
            "count": row.count,
            "expected_busy_ms": expected.get((row.kind, row.lane), nothing).busy_ns / 1e6,
            "measured_busy_ms": row.busy_ns / 1e6,
            "expected_exposed_ms": expected.get((row.kind, row.lane), nothing).exposed_ns / 1e6,
            "measured_exposed_ms": row.exposed_ns / 1e6,
        }
        for row in measured.collective_rows()
    ]


def proof_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    return aligned(PROOF_HEADER, proof_cells(rows), text_columns=2)
