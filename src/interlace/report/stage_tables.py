"""The plan of a pipeline as tables: its ranks, and schedules beside each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlace.ir.actions import Action
from interlace.schedules.finder import PLAIN
from interlace.sim.pipeline_step import PipelineStep
from interlace.text import aligned, milliseconds, percent, size

_RANK_HEADER = ("rank", "chunks", "compute ms", "bubble", "values kept", "weights and the like")
_HEADER = ("schedule", "chunks", "step ms", "against 1F1B", "bubble", "most memory of a rank")


@dataclass(frozen=True, kw_only=True)
class StagedStep:
    """A simulated step of a pipeline."""

    schedule: str
    rank_of: tuple[int, ...]
    """By chunk."""
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    step: PipelineStep
    constant_bytes: tuple[int, ...]
    """By rank: weights, sums of gradients, optimizer state, buffers."""
    split_at: tuple[str, ...] = ()
    """The sub-modules with which chunks begin, but the first; empty where arithmetic decided."""

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs the most: what it holds all the time, and what forwards keep.
        What an operator needs while it runs comes on top."""
        both = zip(self.constant_bytes, self.step.peak_bytes, strict=True)
        return max(constant + kept for constant, kept in both)

    def as_data(self) -> dict[str, Any]:
        """For a JSON file."""
        step = self.step
        return {
            "schedule": self.schedule,
            "rank_of_chunk": list(self.rank_of),
            "split_at": list(self.split_at),
            "step_ns": step.step_ns,
            "bubble_fraction": step.bubble_fraction,
            "bubble_ns": list(step.bubble_ns),
            "kept_bytes": list(step.peak_bytes),
            "constant_bytes": list(self.constant_bytes),
        }


def stages_summary(
    chosen: StagedStep,
    others: Sequence[StagedStep],
    micro_batches: int,
    *,
    limit_bytes: int = 0,
) -> str:
    """The ranks of the chosen schedule, and all schedules, the fastest first, with those marked
    that need more memory than a limit (0 for none)."""
    step = chosen.step
    rows = []
    for rank, constant in enumerate(chosen.constant_bytes):
        own = [str(chunk) for chunk, on in enumerate(chosen.rank_of) if on == rank]
        busy, bubble = step.step_ns - step.bubble_ns[rank], step.bubble_ns[rank] / step.step_ns
        kept, held = size(step.peak_bytes[rank]), size(constant)
        rows.append((str(rank), ", ".join(own), milliseconds(busy), percent(bubble), kept, held))
    return "\n".join(
        (
            f"{chosen.schedule}, {len(chosen.actions)} stages, {micro_batches} micro-batches: "
            f"{milliseconds(step.step_ns)} ms a step, bubble {percent(step.bubble_fraction)}",
            "",
            aligned(_RANK_HEADER, rows, text_columns=2),
            "",
            "all schedules on this model:",
            "",
            aligned(_HEADER, [_row(each, others, limit_bytes) for each in others], text_columns=1),
        )
    )


def stages_json(
    chosen: StagedStep, others: Sequence[StagedStep], left_out: Mapping[str, str], **about: Any
) -> dict[str, Any]:
    """The same, and why schedules are missing."""
    return {
        "chosen": chosen.as_data(),
        "schedules": [each.as_data() for each in others],
        "left_out": dict(left_out),
        **about,
    }


def _row(each: StagedStep, others: Sequence[StagedStep], limit_bytes: int) -> tuple[str, ...]:
    plain = next((other.step.step_ns for other in others if other.schedule == PLAIN), 0)
    step = each.step
    return (
        each.schedule,
        str(len(each.rank_of)),
        milliseconds(step.step_ns),
        f"{plain / step.step_ns:.2f}x" if plain else "-",
        percent(step.bubble_fraction),
        size(each.peak_bytes) + (" (too much)" if 0 < limit_bytes < each.peak_bytes else ""),
    )
