"""Schedules of a pipeline beside each other: the time, bubble and memory of a step, by
simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import chain
from interlace.schedules.finder import PLAIN, Schedule, find, names
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import PipelineStep, simulate_pipeline
from interlace.text import aligned, milliseconds, percent

_MS = 1e6
"""Nanoseconds of a millisecond."""
_MOST_MS = 1e9
"""Times from here on, in ms, are mistakes: 11 days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of a rank's part of the model for one micro-batch, the same on all ranks, in ns. Where
    a rank has several chunks each has an equal share of them."""

    forward_ns: int
    input_ns: int
    """Gradients of inputs."""
    weight_ns: int
    """Gradients of weights."""
    transfer_ns: int = 0
    """What a stage hands to the next, from rank to rank."""
    overlap: float = 0.0
    """How much shorter a forward and a backward are side by side than one after the other: their
    time times 1 - `overlap`."""

    @classmethod
    def of_ms(
        cls, *, forward: float, input: float, weight: float, transfer: float, overlap: float
    ) -> "StageTimes":
        """From milliseconds. Raises InputError for times below 0 and shares beyond 0 to 1."""
        given = {"forward": forward, "input": input, "weight": weight, "transfer": transfer}
        for name, value in given.items():
            if not 0 <= value < _MOST_MS:
                raise InputError(
                    f"--{name}-ms {value:g} is no time of a pass", hint="a number of milliseconds"
                )
        if forward + input + weight == 0:
            raise InputError("all passes take no time", hint="set --forward-ms above 0")
        if not 0 <= overlap <= 1:
            raise InputError(f"--overlap {overlap:g} is no share", hint="0 (nothing hidden) to 1")
        ns = {f"{name}_ns": round(value * _MS) for name, value in given.items()}
        return cls(**ns, overlap=overlap)

    def costs(self, ranks: Sequence[Sequence[Action]]) -> PipelineCosts:
        """Of these actions."""
        total = 1 + max(s.strand.chunk or 0 for actions in ranks for a in actions for s in a.slots)
        share = total // len(ranks)
        chunk = ChunkCosts(
            forward_ns=self.forward_ns // share,
            input_ns=self.input_ns // share,
            weight_ns=self.weight_ns // share,
        )
        plain = PipelineCosts(chunks=[chunk] * total)
        pairs = {
            action.phase: round(plain.action_ns(action) * (1 - self.overlap))
            for actions in ranks
            for action in actions
            if len(action.slots) > 1
        }
        edges = dict.fromkeys(chain(total), self.transfer_ns)
        return PipelineCosts(chunks=plain.chunks, pairs_ns=pairs, messages_ns=edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One schedule."""

    schedule: str
    chunks: int
    """On each rank."""
    step_ns: int
    bubble: float
    """The share of all ranks' time in which they do not compute."""
    peak_micro_batches: float
    """The most that a rank keeps of forward values, in those of one micro-batch through its whole
    part of the model."""


def simulated(
    schedule: Schedule, ranks: int, micro_batches: int, times: StageTimes
) -> PipelineStep:
    """A step by a schedule, with the options that these times ask for. Raises
    InputError if the schedule does not run so."""
    actions = schedule.of_ranks(ranks, micro_batches, options=options(schedule, ranks, times))
    return simulate_pipeline(actions, times.costs(actions), label=schedule.name)


def options(schedule: Schedule, ranks: int, times: StageTimes) -> Mapping[str, object]:
    """What a schedule takes from the times of a pipeline."""
    of_times = schedule.declared.for_times
    if of_times is None:
        return {}
    both = (times.forward_ns + times.input_ns + times.weight_ns) // 2
    return of_times(ranks, both * (1 - times.overlap), 2 * times.transfer_ns)


def row_of(name: str, chunks: int, found: PipelineStep) -> PipelineRow:
    """What a step with so many chunks on each rank says."""
    return PipelineRow(
        schedule=name,
        chunks=chunks,
        step_ns=found.step_ns,
        bubble=found.bubble_fraction,
        peak_micro_batches=max(found.peak_chunks) / chunks,
    )


def compared(
    ranks: int, micro_batches: int, times: StageTimes
) -> tuple[tuple[PipelineRow, ...], dict[str, str]]:
    """All schedules of the package that run on so many ranks, the fastest first; and why the others
    do not, by name."""
    rows, left_out = [], {}
    for schedule in map(find, names()):
        try:
            found = simulated(schedule, ranks, micro_batches, times)
        except InputError as error:
            left_out[schedule.name] = error.message
        else:
            rows.append(row_of(schedule.name, schedule.chunks, found))
    return tuple(sorted(rows, key=lambda row: (row.step_ns, row.peak_micro_batches))), left_out


def comparison_table(rows: Sequence[PipelineRow]) -> str:
    """The rows as lines of text, with the time of 1F1B over each."""
    plain = next((row.step_ns for row in rows if row.schedule == PLAIN), 0)
    header = [
        "schedule",
        "chunks a rank",
        "step ms",
        "against 1F1B",
        "bubble",
        "kept micro-batches",
    ]
    lines = [
        [
            row.schedule,
            str(row.chunks),
            milliseconds(row.step_ns),
            f"{plain / row.step_ns:.2f}x" if plain else "-",
            percent(row.bubble),
            f"{row.peak_micro_batches:.1f}",
        ]
        for row in rows
    ]
    return aligned(header, lines, text_columns=1)


def as_data(rows: Sequence[PipelineRow]) -> list[dict[str, Any]]:
    """The rows for a JSON file."""
    return [asdict(row) for row in rows]
