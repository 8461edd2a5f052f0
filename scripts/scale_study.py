"""From 64 to 100,000 devices: the best layouts of a model, and what each technique gives there.

    python scripts/scale_study.py                       # Llama 3.1 405B on H100, about 4 minutes
    python scripts/scale_study.py --model mixtral-8x7b  # another preset of interlace/presets/models
    python scripts/draw_scale_study.py                  # the pictures and tables of the docs

Searches a layout at each size, once with a batch that grows with the devices (weak scaling) and
once with one batch (strong scaling), and simulates every schedule on the split of the best layout
of one strand. Writes bench/results/scale/MODEL.json.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.hardware.cluster_size import load_sized_cluster
from interlace.rules import check
from interlace.strategy.contributions import contributions
from interlace.strategy.job_layout import JobLayout, with_layout
from interlace.strategy.layout_search import in_16_bits, search_layouts
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.simulated_job import SimulatedJob, parts_of, simulate_job

FOLDER = Path(__file__).resolve().parents[1] / "bench" / "results" / "scale"
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 98304)
SCALINGS = ("weak", "strong")
STRONG_SIZES = tuple(size for size in SIZES if size >= 512)
BATCH = 2048
"""Sequences of a step in strong scaling: with 8,192 tokens each, those of Llama 3 at 16,384."""
PER_DEVICE = 1 / 8
"""Sequences of a step for each device in weak scaling: the same at 16,384."""
SCHEDULES = (
    "one_f_one_b",
    "eager_one_f_one_b",
    "zb_h1",
    "interleaved(chunks=2)",
    "zb_v",
    "folded",
    "eager_folded",
    "dual_pipe_v",
    "stp",
)
"""Of pipelines that are compared on one split."""
LEAST = 64
"""Sequences in weak scaling at least, so that few devices have micro-batches to interleave."""


def main() -> int:
    """Search all sizes and write the table; rows of other sizes that it has already are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-405b", help="a preset of presets/models")
    parser.add_argument("--cluster", default="h100", help="a cluster without its size")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="numbers of devices")
    parser.add_argument("--scaling", choices=("weak", "strong"), nargs="*", default=SCALINGS)
    given = parser.parse_args()
    config = config_of(given.model, given.sequence)
    about = {key: getattr(given, key) for key in ("model", "cluster", "sequence")}
    file = FOLDER / f"{given.model}.json"
    known = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = known.pop("rows") if known | about == known else []
    found = {(row["scaling"], row["devices"]): row for row in rows}
    for scaling, devices, batch in jobs(given.sizes):
        if scaling not in given.scaling:
            continue
        row = {"scaling": scaling, "devices": devices, "batch": batch}
        row |= searched(config, f"{given.cluster}x{devices}", batch)
        found[scaling, devices] = row
        print(scaling, devices, batch, row.get("chosen", row.get("refused")), flush=True)
        order = sorted(found, key=lambda key: (SCALINGS.index(key[0]), key[1]))
        FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps(about | {"rows": [found[key] for key in order]}, indent=1) + "\n"
        )
    return 0


def config_of(model: str, sequence: int) -> RunConfig:
    """A run of a preset with sequences so long."""
    return in_16_bits(load_run_config(model, {"data.sequence_length": str(sequence)}))


def jobs(sizes: list[int]) -> Iterator[tuple[str, int, int]]:
    """(scaling, devices, sequences of a step)."""
    for devices in sizes:
        yield "weak", devices, max(LEAST, round(devices * PER_DEVICE))
    for devices in sizes:
        if devices in STRONG_SIZES:
            yield "strong", devices, BATCH


def searched(config: RunConfig, cluster: str, batch: int) -> dict[str, Any]:
    """The best layouts of one size, or why there are none."""
    on, devices = load_sized_cluster(cluster)
    space = LayoutSpace(config=config, cluster=on, devices=devices, global_batch=batch)
    try:
        found = search_layouts(space)
    except InputError as error:
        return {"refused": error.message}
    one, two = found.one_strand, found.two_strands
    schedules = {} if one is None else by_schedule(one)
    return {
        "chosen": figures(found.chosen),
        "one": None if one is None else figures(one),
        "two": None if two is None else figures(two),
        "schedules": {name: _schedule_figures(job) for name, job in schedules.items()},
        "without": {
            f"{each.technique} ({each.instead})": each.seconds / found.chosen.seconds - 1
            for each in contributions(found.chosen)
            if each.seconds
        },
    }


def figures(job: SimulatedJob) -> dict[str, Any]:
    """What the tables and pictures show; shares are of the step."""
    exposed = {lane: s / job.seconds for lane, s in job.exposed_s.items() if s}
    busy = {lane: s / job.seconds for lane, s in job.communication_s.items() if s}
    layout = job.layout
    return {
        "layout": layout.text,
        "schedule": layout.schedule,
        "micro_batches": layout.micro_batches,
        "micro_batch": layout.micro_batch,
        "recompute": layout.recompute,
        "seconds": job.seconds,
        "mfu": job.mfu,
        "tokens_per_s": job.tokens_per_s,
        "bubble": job.bubble,
        "ends": job.ends_s / job.seconds,
        "exposed": exposed,
        "busy": busy,
        "gib": job.peak.total / 2**30,
    }


def by_schedule(one: SimulatedJob) -> dict[str, SimulatedJob | str]:
    """Each schedule on the split of this job, or why it cannot run."""
    found: dict[str, SimulatedJob | str] = {}
    parts = parts_of(one.config, one.cluster, one.layout)
    for schedule in _schedules(one.layout):
        layout = replace(one.layout, schedule=schedule)
        try:
            check(with_layout(one.config, layout))
            found[schedule] = simulate_job(one.config, one.cluster, layout, parts)
        except InputError as error:
            found[schedule] = error.message
    return found


def _schedule_figures(job: SimulatedJob | str) -> dict[str, Any]:
    if isinstance(job, str):
        return {"refused": job}
    exposed = sum(job.exposed_s.values()) / job.seconds
    gib = job.peak.total / 2**30
    return {
        "seconds": job.seconds,
        "bubble": job.bubble,
        "exposed": exposed,
        "fits": job.fits,
        "gib": gib,
    }


def _schedules(layout: JobLayout) -> tuple[str, ...]:
    if layout.pipeline == 1:
        return ("one_strand", "two_strand")
    return SCHEDULES


if __name__ == "__main__":
    sys.exit(main())
