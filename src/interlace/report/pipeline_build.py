"""What `interlace schedule` shows: schedules compared, or one of them read, verified, written and
drawn."""

import json as json_format
from collections.abc import Sequence
from pathlib import Path

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.ir.stage_messages import Item, chain, chunks_of
from interlace.report.pipeline_picture import pipeline_png
from interlace.report.pipeline_tables import (
    PipelineRow,
    StageTimes,
    as_data,
    compared,
    comparison_table,
    options,
    row_of,
)
from interlace.run_files import write_whole
from interlace.schedules.finder import find
from interlace.schedules.grid import as_grid
from interlace.schedules.listed import READERS, file_split_at, read_items
from interlace.schedules.schedule_text import write_schedule
from interlace.schedules.sends_receives import check_messages, with_messages, without_messages
from interlace.schedules.torch_csv import to_csv
from interlace.schedules.verify import ScheduleError, check_ranks
from interlace.sim.pipeline_step import simulate_pipeline
from interlace.text import milliseconds, percent


def show_all(
    ranks: int, micro_batches: int, times: StageTimes, *, picture: Path | None, json: Path | None
) -> int:
    """Print all schedules beside each other, the fastest first."""
    if picture is not None:
        raise InputError("a picture shows one schedule", hint="name it, as interlace schedule 1F1B")
    find("gpipe").of_ranks(ranks, micro_batches)  # refuses numbers below 1
    rows, left_out = compared(ranks, micro_batches, times)
    print(f"{ranks} ranks, {micro_batches} micro-batches, by simulation\n")
    print(comparison_table(rows))
    for reason in left_out.values():
        print(f"\nleft out: {reason}")
    _write_json(json, ranks, micro_batches, rows)
    return 0


def show_one(
    name: str,
    ranks: int,
    micro_batches: int,
    times: StageTimes,
    *,
    form: str,
    messages: bool,
    picture: Path | None,
    json: Path | None,
) -> int:
    """Print one schedule, which is verified before. A file has its own ranks and micro-batches."""
    if picture is not None and picture.suffix != ".png":
        raise InputError(f"--picture {picture} is not a .png file", hint="end its name in .png")
    if messages and form == "grid":
        raise InputError("the grid shows no messages", hint="add --form text or --form csv")
    is_file = Path(name).suffix in READERS
    split_at = file_split_at(Path(name)) if is_file else ()
    if is_file:
        lists = read_items(Path(name))
        actions = without_messages(lists)
        chunks, count = _size(actions, name)
        _verify(lists, chunks, count, name)
    else:
        schedule = find(name)
        name = schedule.name
        actions = schedule.of_ranks(ranks, micro_batches, options=options(schedule, ranks, times))
        chunks, count = 1 + max(chunks_of(actions)), micro_batches
        lists = with_messages(actions, chain(chunks))
    step = simulate_pipeline(actions, times.costs(actions), label=name)
    items = lists if messages else actions
    if form == "grid":
        print(as_grid(actions), end="")
    else:
        print(write_schedule(items, split_at) if form == "text" else to_csv(items), end="")
    row = row_of(name, chunks // len(actions), step)
    if form == "grid":
        print(
            f"\n{name} on {len(actions)} ranks, {count} micro-batches, by simulation: "
            f"{milliseconds(row.step_ns)} ms, bubble {percent(row.bubble)}, at most "
            f"{row.peak_micro_batches:g} micro-batches' values kept on a rank"
        )
    if picture is not None:
        title = f"{name}: {len(actions)} ranks, {count} micro-batches"
        write_whole(picture, pipeline_png(actions, step, title=title))
    _write_json(json, len(actions), count, [row])
    return 0


def _size(actions: Sequence[Sequence[Action]], name: str) -> tuple[int, int]:
    """(chunks, micro-batches) of a schedule that was read."""
    slots = [slot for each in actions for action in each for slot in action.slots]
    if not slots:
        raise InputError(f"{name} has no actions", hint="write a line for each rank")
    chunks = 1 + max(slot.strand.chunk or 0 for slot in slots)
    if chunks % len(actions):
        raise InputError(
            f"{name} has {chunks} chunks on {len(actions)} ranks",
            hint="times are given for a rank, so each rank has as many chunks as the others",
        )
    return chunks, max(slot.micro_batch for slot in slots)


def _verify(lists: Sequence[Sequence[Item]], chunks: int, count: int, name: str) -> None:
    """Raise InputError with the grid if it cannot run. Lists without messages get them later."""
    actions = without_messages(lists)
    try:
        check_ranks(actions, micro_batches=count, chunks=chunks, name=name)
    except ScheduleError as error:
        message = f"{error.message}\n\n{as_grid(actions, marked=error.places)}"
        raise InputError(message, hint=error.hint) from error
    if actions != tuple(map(tuple, lists)):
        check_messages(lists, edges=chain(chunks), name=name)


def _write_json(
    path: Path | None, ranks: int, micro_batches: int, rows: Sequence[PipelineRow]
) -> None:
    if path is not None:
        data = {"ranks": ranks, "micro_batches": micro_batches, "schedules": as_data(rows)}
        write_whole(path, (json_format.dumps(data, indent=1) + "\n").encode())
