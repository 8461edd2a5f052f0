"""Searches of layouts, kept on disk by what went into them.

The name of a file is the digest of the run, the cluster, the devices, the batch, and the source of
the packages that compute times, so that another version searches again. What is kept are layouts,
not times: they are simulated again when they are read.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from interlace.run_files import write_whole
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.layout_search import FoundLayouts, SearchProgress, search_layouts
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.simulated_job import SimulatedJob, simulate_job

_COMPUTING = ("hardware", "ir", "schedules", "search", "sim", "strategy")
"""Packages whose source decides what is found."""


def cached_search(
    space: LayoutSpace, folder: Path | None, progress: SearchProgress = lambda _: None
) -> FoundLayouts:
    """Search, or read what the same search found; without a folder, search and keep nothing.

    Raises InputError as `search_layouts`; what was refused is not kept."""
    if folder is None:
        return search_layouts(space, progress)
    path = folder / f"{search_key(space)}.json"
    if path.is_file():
        known = _read(path)
        if known is not None:
            progress(f"found before: {path}")
            return _simulated(space, known)
        progress(f"{path} cannot be read and is written anew")
    found = search_layouts(space, progress)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(_kept(found), indent=1) + "\n").encode())
    return found


def search_key(space: LayoutSpace) -> str:
    """The digest of all that decides what a search finds; the folder of a run does not."""
    config = space.config.as_dict()
    told = {name: config[name] for name in ("model", "data", "parallel", "pipeline", "train")}
    told |= {"strands": space.config.strands, "cluster": asdict(space.cluster)}
    told |= {"devices": space.devices, "batch": space.global_batch, "code": _code()}
    told |= {"expert_load": space.expert_load}
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in _COMPUTING:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _kept(found: FoundLayouts) -> dict[str, Any]:
    one, two = found.one_strand, found.two_strands
    return {
        "best": [asdict(each.layout) for each in found.best],
        "one_strand": None if one is None else asdict(one.layout),
        "two_strands": None if two is None else asdict(two.layout),
        "looked_at": found.looked_at,
        "too_large": found.too_large,
        "simulated": found.simulated,
        "exhaustive": found.exhaustive,
    }


def _read(path: Path) -> dict[str, Any] | None:
    """None for a file that is not one of ours, or cut off."""
    try:
        known = json.loads(path.read_bytes())
        known["best"] = [JobLayout(**each) for each in known["best"]]
        for strands in ("one_strand", "two_strands"):
            own = known[strands]
            known[strands] = None if own is None else JobLayout(**own)
    except (ValueError, KeyError, TypeError):
        return None
    return known


def _simulated(space: LayoutSpace, known: dict[str, Any]) -> FoundLayouts:
    jobs: dict[JobLayout, SimulatedJob] = {}

    def job(layout: JobLayout) -> SimulatedJob:
        if layout not in jobs:
            jobs[layout] = simulate_job(space.config, space.cluster, layout)
        return jobs[layout]

    one, two = known.pop("one_strand"), known.pop("two_strands")
    return FoundLayouts(
        space=space,
        best=tuple(job(layout) for layout in known.pop("best")),
        one_strand=None if one is None else job(one),
        two_strands=None if two is None else job(two),
        **known,
    )
