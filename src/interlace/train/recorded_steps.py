"""What a run says and keeps of a recorded step: expected against measured, stage by stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace import run_files
from interlace.claims import Claims
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.plan import Plan
from interlace.ir.timeline import CollectiveRow, Timeline
from interlace.parallel.local_parts import local
from interlace.report.tables import PROOF_HEADER, proof_cells
from interlace.runtime.executor import Batch
from interlace.sim.pipeline_step import ComparedStep
from interlace.sim.simulated_step import simulate_step
from interlace.step import Step
from interlace.text import aligned
from interlace.train.session import Session

LABEL = "pipeline"
"""Of timelines of one stage, operator by operator."""


def stages_line(session: Session, main: Step) -> str:
    """What the stages of a pipeline are."""
    assert main.strands.handovers is not None
    chunks = len(main.strands.handovers.rank_of)
    held = sum(local(each).numel() for each in session.weights.parameters)
    return (
        f"pipeline by schedule {main.plan.schedule!r}: {chunks} chunks on "
        f"{session.config.parallel.pipeline} stages; the first rank holds {held:,} parameters"
    )


def record_stages(
    step: Step, batches: Sequence[Batch], folder: Path, claims: Claims | None
) -> dict[str, Any]:
    """Run a step and note what all ranks of the pipeline did in it. The first rank, which has
    `claims`, writes that down. Returns values for the metrics."""
    record = step.record_pipeline(batches)
    if claims is not None:
        claims.output.check()
        plain = ComparedStep(
            actions=record.actions, measured=record.measured, predicted=record.predicted
        )
        store.save(plain, folder / run_files.PIPELINE)
    return {
        "bubble_fraction": record.measured.bubble_fraction,
        "pipeline_ms": record.measured.step_ns / 1e6,
        "predicted_ms": record.predicted.step_ns / 1e6,
    }


def collective_values(timeline: Timeline) -> dict[str, dict[str, float]]:
    """What metrics say of the collectives of a recorded step of this rank, by kind and link
    (`all_to_all.ep`): how many, their bytes, and for how many ms they kept the link busy and the
    rank waiting. Bytes of exchanges of experts are nominal, those of balanced routing."""
    return {
        f"{row.kind}.{row.lane}": {
            "count": row.count,
            "bytes": row.bytes,
            "busy_ms": row.busy_ns / 1e6,
            "exposed_ms": row.exposed_ns / 1e6,
        }
        for row in timeline.collective_rows()
    }


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
