"""Names of the files in the folder of a run: what training writes and what the report adds."""

from pathlib import Path

RUN = "run.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
COMPARISON = "comparison.json"
COSTS = "costs.json"
PLAN = "plan.txt"
DECOMPOSE = "decompose.json"
TIMELINES = "timelines"
"""Folder of `MODE-rankN.json`, see `timeline_name`."""
TENSORBOARD = "tensorboard"

REPORT = "report.html"
PICTURE = "timeline.png"
TRACE = "trace.json.gz"
HEAT_MAP = "oef.png"

MARKERS = (RUN, METRICS, COMPARISON)
"""A folder that holds one of these is that of a run."""
_RECORDS = (METRICS, COMPARISON, PLAN, COSTS, ENVIRONMENT, DECOMPOSE)
_DRAWN = (REPORT, PICTURE, TRACE, HEAT_MAP)


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
