"""The form of every bench result: rows, the environment, a table, a JSON file."""

import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

import interlace
from interlace.errors import InputError
from interlace.measure.machine import processor_name


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One comparison. `ratio` is above 1 when ours is better, unless the metric says otherwise."""

    case: str
    metric: str
    ours: float
    baseline: float
    ratio: float | None
    """None where the baseline is 0."""
    spread: tuple[float, float] | None
    """Smallest and largest ratio over repeats; None for a single measurement."""


def speedup(case: str, metric: str, ours: Sequence[float], baseline: Sequence[float]) -> ResultRow:
    """A row from paired times: pair i of both lists ran next to each other."""
    return _paired(
        case, metric, ours, baseline, [b / o for o, b in zip(ours, baseline, strict=True)]
    )


def slowdown(case: str, metric: str, ours: Sequence[float], baseline: Sequence[float]) -> ResultRow:
    """The same with how much longer ours takes as the ratio."""
    return _paired(
        case, metric, ours, baseline, [o / b for o, b in zip(ours, baseline, strict=True)]
    )


def predicted_over_measured(
    case: str, predicted: Sequence[float], measured: Sequence[float]
) -> ResultRow:
    """Simulated times over measured ones, by pairs."""
    row = speedup(case, "predicted_over_measured", measured, predicted)
    return replace(row, ours=row.baseline, baseline=row.ours)


def _paired(
    case: str, metric: str, ours: Sequence[float], baseline: Sequence[float], ratios: list[float]
) -> ResultRow:
    return ResultRow(
        case=case,
        metric=metric,
        ours=median(ours),
        baseline=median(baseline),
        ratio=median(ratios),
        spread=(min(ratios), max(ratios)),
    )


def environment(link: str) -> dict[str, str | int]:
    """Where and when the figures were measured."""
    return {
        "interlace": interlace.__version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "processor": processor_name(),
        "gpu": _gpu(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.release()}",
        "link": link,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def write_json(
    path: Path, bench: str, where: dict[str, str | int], rows: Sequence[ResultRow]
) -> None:
    """Write the result file. Raises InputError if the path cannot be written."""
    content = {"bench": bench, "environment": where, "rows": [asdict(row) for row in rows]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
