"""A run whose layers are dealt to the stages of a pipeline: what it says and records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace import run_files
from interlace.claims import Claims
from interlace.ir import store
from interlace.parallel.local_parts import local
from interlace.runtime.executor import Batch
from interlace.sim.pipeline_step import ComparedStep
from interlace.step import Step
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
