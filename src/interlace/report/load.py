"""Reads a run's directory. What is missing is None or empty; what is there must be sound."""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace import run_files
from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.ir.timeline import Timeline
from interlace.report.tables import ordered_modes
from interlace.run_files import read_metrics
from interlace.sim.pipeline_step import ComparedStep

_DAMAGED = "the file was changed or damaged after the run; repeat the run, or remove the file"
"""Hint where a file of a run cannot be read or does not hold what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that a run wrote down."""

    directory: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    events: list[dict[str, Any]]
    comparison: dict[str, Any] | None
    plan: str
    costs: CostTable | None
    timelines: dict[str, dict[int, Timeline]]
    """By mode, then by rank, in the order of reading: eager, one strand, two strands."""
    pipeline: ComparedStep | None = None
    """A step of all ranks of a pipeline, if the run was one."""

    def of(self, event: str) -> list[dict[str, Any]]:
        """The events of one type, oldest first."""
        return [entry for entry in self.events if entry.get("event") == event]

    @property
    def link(self) -> str:
        """How the ranks were joined, or empty."""
        return str((self.comparison or {}).get("link") or self.environment.get("link") or "")

    def first_ranks(self) -> dict[str, Timeline]:
        """By mode, the timeline of the lowest rank that was recorded."""
        return {mode: by_rank[min(by_rank)] for mode, by_rank in self.timelines.items()}


def is_cost_folder(directory: Path) -> bool:
    """Whether a folder holds a cost file and no run."""
    is_run = any((directory / name).is_file() for name in run_files.MARKERS)
    return (directory / run_files.COSTS).is_file() and not is_run


def load_run(directory: Path) -> RunRecord:
    """Read `directory`. Raises InputError naming the file that is missing or damaged."""
    if not directory.is_dir():
        raise InputError(
            f"there is no folder {directory}", hint="give the output.directory of a run"
        )
    if not any((directory / name).is_file() for name in run_files.MARKERS):
        markers = ", ".join(run_files.MARKERS)
        raise InputError(
            f"{directory} is not the folder of a run: it has none of {markers}",
            hint="give the output.directory of a run of `interlace train`",
        )
    metrics = directory / run_files.METRICS
    events = read_metrics(metrics) if metrics.exists() else []
    for event in events:
        _check_numbers(event, metrics)
    comparison = directory / run_files.COMPARISON
    costs = directory / run_files.COSTS
    pipeline = directory / run_files.PIPELINE
    return RunRecord(
        directory=directory,
        config=_toml(directory / run_files.RUN),
        environment=_json(directory / run_files.ENVIRONMENT),
        events=events,
        comparison=_checked_comparison(comparison) if comparison.exists() else None,
        plan=_text(directory / run_files.PLAN),
        costs=store.load(costs, CostTable) if costs.exists() else None,
        timelines=_timelines(directory / run_files.TIMELINES),
        pipeline=store.load(pipeline, ComparedStep) if pipeline.exists() else None,
    )


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", hint=_DAMAGED) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}", hint=_DAMAGED) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} does not hold a JSON object", hint=_DAMAGED)
    return value


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}", hint=_DAMAGED) from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(event: Mapping[str, Any], path: Path) -> None:
    if event.get("event") not in ("step", "evaluate"):
        return
    for key in ("step", "loss", "bits_per_byte", "step_ms"):
        if key in event and not (_is_number(event[key]) or event[key] is None):
            raise InputError(
                f"{path}: {event['event']} {event.get('step')}: {key} = {event[key]!r} "
                "is not a number",
                hint=_DAMAGED,
            )
    if not _is_number(event.get("step")):
        raise InputError(f"{path}: an event {event['event']!r} has no step", hint=_DAMAGED)


def _checked_comparison(path: Path) -> dict[str, Any]:
    """comparison.json with everything that tables and pictures rely on."""
    value = _json(path)
    for key, kind in (("steps", int), ("micro_batches", int), ("link", str), ("modes", dict)):
        if not isinstance(value.get(key), kind):
            raise InputError(
                f"{path}: {key} = {value.get(key)!r} is not of type {kind.__name__}", hint=_DAMAGED
            )
    if not value["modes"]:
        raise InputError(f"{path}: modes is empty", hint=_DAMAGED)
    for mode, result in value["modes"].items():
        times = result.get("step_ms") if isinstance(result, dict) else None
        if not _are_times(times) or not _are_times(result.get("cpu_ms", [0.0])):
            raise InputError(
                f"{path}: modes.{mode} must hold step_ms and cpu_ms, lists of milliseconds",
                hint=_DAMAGED,
            )
        for key in ("exposed_ms", "communication_ms", "hidden_fraction"):
            if result.get(key) is not None and not _is_number(result[key]):
                raise InputError(f"{path}: modes.{mode}.{key} is not a number", hint=_DAMAGED)
    for key in ("speedup_vs_eager", "speedup_vs_one_strand"):
        gain = value.get(key)
        if gain is not None and not _is_gain(gain):
            raise InputError(f"{path}: {key} must hold median, min and max", hint=_DAMAGED)
    difference = value.get("max_relative_difference_to_eager")
    if difference is not None and not _is_number(difference):
        raise InputError(f"{path}: max_relative_difference_to_eager is not a number", hint=_DAMAGED)
    return value


def _is_gain(value: object) -> bool:
    names = ("median", "min", "max")
    return isinstance(value, dict) and all(_is_number(value.get(name)) for name in names)


def _are_times(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(_is_number(time) and math.isfinite(time) and time >= 0 for time in value)


def _timelines(folder: Path) -> dict[str, dict[int, Timeline]]:
    found: dict[str, dict[int, Timeline]] = {}
    for path in sorted(folder.glob("*.json")):
        name = re.fullmatch(r"(.+)-rank(\d+)", path.stem)
        if name is None:
            raise InputError(
                f"{path} is not named MODE-rankN.json", hint="move other files out of timelines/"
            )
        timeline = store.load(path, Timeline)
        for span in timeline.spans:
            if not 0 <= span.start_ns <= span.end_ns:
                raise InputError(
                    f"{path}: span {span.name!r} runs from {span.start_ns} to {span.end_ns} ns",
                    hint=_DAMAGED,
                )
        found.setdefault(name[1], {})[int(name[2])] = timeline
    return {mode: dict(sorted(found[mode].items())) for mode in ordered_modes(found)}
