"""Names of the files in the folder of a run, what training writes and what the report adds, and
how metrics.jsonl is read."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from interlace.errors import InputError, RunError
from interlace.ir import store

RUN = "run.toml"
"""The run file, with all defaults filled in."""
ENVIRONMENT = "environment.json"
"""Versions and machine of the run."""
METRICS = "metrics.jsonl"
"""Events of the run, one a line."""
COMPARISON = "comparison.json"
"""Step times and losses of the compared ways of running."""
COSTS = "costs.json"
"""The measured cost table."""
PLAN = "plan.txt"
"""The plan that the run took."""
DECOMPOSE = "decompose.json"
"""Which collectives were cut into sends and which not."""
TIMELINES = "timelines"
"""Folder of `MODE-rankN.json`, see `timeline_name`."""
PIPELINE = "pipeline.json"
"""A step of all ranks of a pipeline, measured and simulated."""
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's event files."""
RENEW_PLAN = "renew-plan"
"""A user makes this file, and the run that writes into the folder measures and plans again."""

REPORT = "report.html"
"""The report as a page."""
PICTURE = "timeline.png"
"""The picture of one step."""
TRACE = "trace.json.gz"
"""Recorded steps as a Chrome trace."""
PIPELINE_PICTURE = "pipeline.png"
"""The picture of a step of all ranks of a pipeline."""
HEAT_MAP = "oef.png"
"""The picture of overlap effectiveness."""

MARKERS = (RUN, METRICS, COMPARISON)
"""A folder that holds one of these is that of a run."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""JSON has none of these numbers, so metrics.jsonl holds them as strings."""
_RECORDS = (METRICS, COMPARISON, PLAN, COSTS, ENVIRONMENT, DECOMPOSE, PIPELINE)
"""What training writes, the run file apart."""
_DRAWN = (REPORT, PICTURE, TRACE, HEAT_MAP, PIPELINE_PICTURE)
"""What the report adds."""


def timeline_name(mode: str, rank: int) -> str:
    """Name of the file with the recorded step of one way of running on one rank."""
    return f"{mode}-rank{rank}.json"


def rank_of(timeline: Path) -> int:
    """The rank that recorded a file of `timeline_files`."""
    return int(timeline.stem.rpartition("-rank")[2])


def timeline_files(directory: Path) -> list[Path]:
    """All recorded steps in the folder of a run."""
    files = (directory / TIMELINES).glob("*-rank*.json")
    return sorted(path for path in files if path.stem.rpartition("-rank")[2].isdecimal())


def records_of(directory: Path) -> list[Path]:
    """Files that a run has written about itself into its folder, but for run.toml, which may be
    the user's own. None: the folder holds no run."""
    found = [directory / name for name in _RECORDS] + timeline_files(directory)
    return [path for path in found if path.is_file()]


def results_of(directory: Path) -> list[Path]:
    """Everything that belongs to the results of the run in this folder: its records, and what
    was drawn from them. Files with other names, and checkpoints, are not among them."""
    records = records_of(directory)
    if not records:
        return []
    drawn = [directory / name for name in _DRAWN]
    events = (directory / TENSORBOARD).glob("events.out.tfevents.*")
    return records + [path for path in (*drawn, *sorted(events)) if path.is_file()]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Events of a metrics.jsonl, oldest first; InputError if a line is not one.

    A run that was killed may leave a last line without an end. It is left out, and an event
    {"event": "truncated", "line", "size_bytes"} stands in its place.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}",
            hint="give the output folder of a run that interlace train wrote",
        ) from error
    *lines, rest = data.split(b"\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(change_each(_event(line), _number))
        except ValueError as error:
            raise InputError(
                f"{path}, line {number} is not an event: {error}",
                hint="the file was changed by something else; remove that line",
            ) from error
    if rest:
        events.append({"event": "truncated", "line": len(lines) + 1, "size_bytes": len(rest)})
    return _without_repeated_steps(events)


def _without_repeated_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run does the steps after its checkpoint again: the first tries are left out."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "checkpoint" and event.get("action") == "resumed":
            kept = [
                earlier
                for earlier in kept
                if earlier["event"] not in ("step", "evaluate", "end", "proof")
                or earlier.get("step", 0) <= event["step"]
            ]
        kept.append(event)
    return kept


def _event(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError('it has no "event"')
    return record


def _number(value: Any) -> Any:
    """A string that `_finite` wrote, as a float again."""
    return float(value) if value in NOT_FINITE else value


def change_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to everything inside dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): change_each(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [change_each(part, change) for part in value]
    return change(value)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, making its folder. Raises RunError when the disk refuses."""
    try:
        store.write_whole(path, content)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}",
            hint="free some space, or name another file with --output",
        ) from error


def cache_directory(name: str) -> Path:
    """`$XDG_CACHE_HOME/interlace/NAME`, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:  # a user of no name, as in some containers
            raise InputError(
                "there is no home directory to keep tokens and measured times in",
                hint="set XDG_CACHE_HOME to a folder that can be written",
            ) from error
    return Path(base) / "interlace" / name
