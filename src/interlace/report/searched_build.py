"""What `interlace schedule searched` shows: a pipeline made for the units of a file, beside the
schedules of the package on the same units."""

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.errors import InputError
from interlace.ir.stage_messages import chain
from interlace.report.pipeline_picture import pipeline_png
from interlace.run_files import write_whole
from interlace.schedules.finder import PLAIN
from interlace.schedules.grid import as_grid
from interlace.schedules.schedule_text import write_schedule
from interlace.schedules.sends_receives import with_messages
from interlace.schedules.torch_csv import to_csv
from interlace.search.pipelines.fixed_orders import BALANCED, EQUAL, FixedPipeline
from interlace.search.pipelines.model_units import PipelineProblem
from interlace.search.pipelines.pipeline_search import (
    TRIES,
    WITHOUT_NUMBA,
    SearchedPipeline,
    search_pipeline,
)
from interlace.search.pipelines.units_file import read_units
from interlace.text import aligned, milliseconds, percent, size

_GIB = 1 << 30
"""Bytes of a GiB."""
USUAL = "interleaved"
"""The schedule that users take, with as many layers in each chunk, and that others are compared
with; with one chunk on a rank it is 1F1B."""


@dataclass(frozen=True, slots=True)
class SearchWishes:
    """What is searched for, as the command line says it."""

    ranks: int
    micro_batches: int
    overlap: float
    costs: Path | None
    memory_gib: float = 0.0
    """Of a rank; 0 for no limit."""
    most_chunks: int = 2
    tries: int = TRIES

    def problem(self) -> PipelineProblem:
        """The units of the file as a problem. Raises InputError for what cannot be."""
        if self.costs is None:
            raise InputError("no units are given", hint="--costs examples/uneven_pipeline.toml")
        if not 0 <= self.memory_gib < 1e6:
            raise InputError(
                f"--memory-gib {self.memory_gib:g} is no size", hint="GiB of a rank, 0 for no limit"
            )
        if self.tries < 1:
            raise InputError(f"--tries {self.tries}", hint="1 or more")
        return PipelineProblem(
            units=read_units(self.costs), ranks=self.ranks, micro_batches=self.micro_batches,
            memory_bytes=round(self.memory_gib * _GIB), overlap=self.overlap,
            most_chunks=self.most_chunks,
        )  # fmt: skip


def show_searched(
    wishes: SearchWishes, *, form: str, messages: bool, picture: Path | None, json: Path | None
) -> int:
    """Search, and print what was found: a page for people, or the schedule alone."""
    if picture is not None and picture.suffix != ".png":
        raise InputError(f"--picture {picture} is not a .png file", hint="end its name in .png")
    if messages and form == "grid":
        raise InputError("the grid shows no messages", hint="add --form text or --form csv")
    found = search_pipeline(wishes.problem(), tries=wishes.tries)
    actions = found.actions
    if form == "grid":
        print(as_grid(actions))
        print(searched_page(found))
    else:
        items = with_messages(actions, chain(len(found.layout.starts))) if messages else actions
        text = write_schedule(items, found.split_at) if form == "text" else to_csv(items)
        print(text, end="")
    if picture is not None:
        title = f"searched: {wishes.ranks} ranks, {wishes.micro_batches} micro-batches"
        write_whole(picture, pipeline_png(actions, found.step, title=title))
    if json is not None:
        write_whole(json, (json_format.dumps(as_json(found), indent=1) + "\n").encode())
    return 0


def usual_of(fixed: Sequence[FixedPipeline]) -> FixedPipeline:
    """Interleaved 1F1B with an equal number of layers in each of two chunks, or, if the model has
    too few units for two, 1F1B."""
    equal = [each for each in fixed if each.cut == EQUAL]
    fewest_last = sorted(equal, key=lambda each: -each.chunks)
    found = {each.schedule: each for each in fewest_last}
    return found.get(USUAL) or found[PLAIN]


def searched_page(found: SearchedPipeline) -> str:
    """The partition, and a table of what was found beside all others."""
    problem = found.problem
    layout, step = found.layout, found.step
    loads = layout.chunk_costs(problem.units)
    lines = []
    for chunk, rank in enumerate(layout.rank_of):
        units, cost = layout.of_chunk(problem.units, chunk), loads[chunk]
        name = units[0].name if len(units) == 1 else f"{units[0].name} to {units[-1].name}"
        work = cost.forward_ns + cost.input_ns + cost.weight_ns
        lines.append([str(chunk), name, str(rank), str(len(units)), milliseconds(work)])
    chunks = aligned(["chunk", "units", "rank", "count", "ms"], lines, text_columns=2)
    peaks = ", ".join(size(each) for each in found.peak_bytes)
    limit = f" of {size(problem.memory_bytes)}" if problem.memory_bytes else ""
    split = ", ".join(found.split_at)
    return (
        f"{problem.ranks} ranks, {problem.micro_batches} micro-batches, {len(problem.units)} "
        f"units, by simulation\n\n{chunks}\n\n{_table(found)}\n\n"
        f"no pipeline of these units is shorter than {milliseconds(found.floor_ns)} ms; this one "
        f"takes {milliseconds(step.step_ns)} ms\n"
        f"held and kept on the ranks, at most: {peaks}{limit}\n"
        f"chunks begin with {split}" + ("" if found.annealed else f"\n\n{WITHOUT_NUMBA}")
    )


def _table(found: SearchedPipeline) -> str:
    """What was found, the usual way, and each schedule balanced: the fastest of its options."""
    usual = usual_of(found.fixed)
    best: dict[str, FixedPipeline] = {}
    for each in found.fixed:
        if each.cut == BALANCED:
            known = best.get(each.schedule)
            if known is None or (each.fits and not known.fits):
                best[each.schedule] = each
    rows = [
        [
            "searched", "searched", f"{len(found.layout.starts) / found.problem.ranks:g}",
            milliseconds(found.step.step_ns), f"{usual.length_ns / found.step.step_ns:.2f}x",
            percent(found.step.bubble_fraction), size(max(found.peak_bytes)),
        ]
    ]  # fmt: skip
    for each in [usual, *sorted(best.values(), key=lambda each: each.length_ns)]:
        bubble = 1 - _busy_ns(each, found.problem) / (each.length_ns * found.problem.ranks)
        rows.append(
            [
                each.schedule, each.cut, str(each.chunks), milliseconds(each.length_ns),
                f"{usual.length_ns / each.length_ns:.2f}x", percent(bubble),
                size(each.peak_bytes) + ("" if each.fits else " (too much)"),
            ]
        )  # fmt: skip
    header = ["schedule", "cut", "chunks a rank", "step ms", f"against {usual.schedule}", "bubble",
              "most on a rank"]  # fmt: skip
    return aligned(header, rows, text_columns=2)


def _busy_ns(each: FixedPipeline, problem: PipelineProblem) -> int:
    costs = each.layout.costs(problem, each.actions)
    return sum(costs.action_ns(action) for own in each.actions for action in own)


def as_json(found: SearchedPipeline) -> dict[str, Any]:
    """For a JSON file: the pipeline, and every schedule that it was compared with."""
    problem = found.problem
    usual = usual_of(found.fixed)
    return {
        "ranks": problem.ranks,
        "micro_batches": problem.micro_batches,
        "memory_bytes": problem.memory_bytes,
        "overlap": problem.overlap,
        "step_ns": found.step.step_ns,
        "floor_ns": found.floor_ns,
        "bubble": found.step.bubble_fraction,
        "peak_bytes": list(found.peak_bytes),
        "origin": found.origin,
        "annealed": found.annealed,
        "chunks": [
            {"rank": rank, "units": [u.name for u in found.layout.of_chunk(problem.units, chunk)]}
            for chunk, rank in enumerate(found.layout.rank_of)
        ],
        "split_at": list(found.split_at),
        "against": {"schedule": usual.schedule, "cut": usual.cut, "chunks": usual.chunks,
                    "step_ns": usual.length_ns, "peak_bytes": usual.peak_bytes},
        "fixed": [
            {"schedule": each.schedule, "cut": each.cut, "chunks": each.chunks,
             "step_ns": each.length_ns, "peak_bytes": each.peak_bytes, "fits": each.fits}
            for each in found.fixed
        ],
    }  # fmt: skip
