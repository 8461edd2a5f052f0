"""Two strands by each search against one strand and plain eager PyTorch, over several link rates.

Two ranks, one core each, tensor + sequence parallel Llama in float32, of width 2560: wide enough
that gloo's own work on the core is small beside its transfers. `merge` plans within
plan.extra_memory, 3 % above one strand; the other searches know no bound. A short run of one strand
says how long compute and communication take, and later each point says it again; from that follow
the rates at which communication takes 0.25 to 2 times as long as compute. At each rate all ways of
running take turns step by step in one run; a step is all micro-batches, warm-up and drain, gradient
clipping and AdamW. The first step of each way is not counted.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from interlace.bench.results import environment, write_json
from interlace.bench.strand_rows import StrandCase, rows_of, summary_rows, tables
from interlace.config import parse_rate
from interlace.errors import RunError
from interlace.lab import hosts
from interlace.runtime.rival import has_inductor_schedule

CALIBRATION_RATE = "300mbit"
"""Rate of the link in the short run that says how long compute and communication take."""
CALIBRATION_MICRO_BATCHES = 2
"""Micro-batches of that run, as few as two strands need."""


def train_on_link(run_file: str | Path, rate: str, overrides: list[str]) -> str:
    """`interlace train RUN_FILE OVERRIDES` on a link of `rate`; returns how the link was made.

    Two network namespaces joined by a shaped link if this process may make them; otherwise two
    local processes on an emulated link, which is said on stderr and in every result. Empty
    `rate` leaves the link as fast as it is. Raises RunError when the job fails.
    """
    command = ["train", str(run_file), *overrides]
    reason = "this is already a lab" if hosts.inside_lab() else hosts.available()
    if not reason:
        code = hosts.run_in_lab(["interlace", *command], hosts=2, ranks_per_host=1, rate=rate)
        link = f"lab link {rate}" if rate else "lab link, not shaped"
    else:
        print(f"note: no network namespaces here ({reason}); the link is emulated", file=sys.stderr)
        extra = ["--link.rate", rate] if rate else []
        argv = [sys.executable, "-m", "interlace", *command, *extra]
        code = subprocess.run(argv, check=False).returncode
        link = f"emulated link {rate}" if rate else "real link of this machine"
    if code:
        raise RunError(
            f"the training job on a link of {rate or 'full'} rate ended with exit code {code}",
            hint="its own message is above",
        )
    return link


@dataclass(frozen=True, kw_only=True)
class Point:
    """One case to measure."""

    ratio: float
    """Communication time over compute time."""
    micro_batches: int
    modes: tuple[str, ...]
    memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run."""

    layers: int
    width: int
    sequence_length: int
    steps: int
    points: tuple[Point, ...]
    calibration_rate: str = CALIBRATION_RATE
    layout: tuple[tuple[str, object], ...] = (("parallel.tensor", 2),)
    """Flags that lay two ranks out."""
    thrifty: bool = True
    """Whether even a small model keeps to plan.extra_memory."""


_ALL = ("eager", "1", "segment_pairs", "list", "merge")
"""Ways to run a step: PyTorch's, one strand, and two strands by each search."""
FULL = Size(
    layers=2,
    width=2560,
    sequence_length=112,
    steps=3,
    points=(
        Point(ratio=0.25, micro_batches=8, modes=_ALL),
        Point(ratio=0.5, micro_batches=8, modes=_ALL),
        Point(ratio=1.0, micro_batches=8, modes=(*_ALL, "inductor"), memory=True),
        Point(ratio=2.0, micro_batches=8, modes=_ALL),
        Point(ratio=1.0, micro_batches=16, modes=("eager", "1", "merge")),
    ),
)
"""What the README's table was measured with."""
QUICK = Size(
    layers=1,
    width=1024,
    sequence_length=256,
    steps=2,
    points=(
        Point(
            ratio=1.0,
            micro_batches=4,
            modes=("eager", "1", "segment_pairs", "list", "merge"),
            memory=True,
        ),
    ),
)
"""A smaller model: that all runs, and roughly how fast."""


def run(*, quick: bool, json_path: Path | None) -> int:
    """Calibrate, run all cases, print the tables; write JSON if asked."""
    return run_size("strands", QUICK if quick else FULL, json_path)


def run_size(name: str, size: Size, json_path: Path | None) -> int:
    """The bench `name` at one size."""
    cases: list[StrandCase] = []
    links: set[str] = set()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
        calibration = Point(ratio=0.0, micro_batches=CALIBRATION_MICRO_BATCHES, modes=("1",))
        _, comparison = measure(
            size, calibration, size.calibration_rate, Path(folder) / "calibration"
        )
        rate = size.calibration_rate
        for number, point in enumerate(map(runnable, size.points)):
            rate = rate_for(point.ratio, comparison["modes"]["1"], rate)
            link, comparison = measure(size, point, rate, Path(folder) / str(number))
            links.add(link.partition(" link")[0])
            cases.append(
                StrandCase(
                    target=point.ratio,
                    rate=rate,
                    micro_batches=point.micro_batches,
                    comparison=comparison,
                )
            )
            elapsed = f"{time.monotonic() - began:.0f} s"
            print(f"{elapsed}: {cases[-1].name} at {rate} done", file=sys.stderr)
    print(tables(cases))
    if json_path is not None:
        where = environment(" and ".join(sorted(links)) + " link")
        rows = [row for case in cases for row in rows_of(case)] + summary_rows(cases)
        write_json(json_path, name, where, rows)
        print(json_path)
    return 0


def runnable(point: Point) -> Point:
    """`point` without a way that this torch lacks, which is said."""
    if "inductor" not in point.modes or has_inductor_schedule():
        return point
    print("note: without inductor, which needs torch 2.13 or newer", file=sys.stderr)
    return replace(point, modes=tuple(mode for mode in point.modes if mode != "inductor"))


def rate_for(ratio: float, one_strand: Mapping[str, Any], rate: str) -> str:
    """The link rate at which communication takes `ratio` times as long as compute, given how long
    both took one strand at `rate`. The time of a transfer goes with the inverse of the rate."""
    communication, compute = one_strand["communication_ms"], one_strand["compute_ms"]
    wanted = parse_rate(rate, "rate") * communication / (ratio * compute)
    return f"{max(1, round(wanted / 1e6))}mbit"


def measure(size: Size, point: Point, rate: str, directory: Path) -> tuple[str, dict[str, Any]]:
    """(how the link was made, content of comparison.json) of one training job."""
    link = train_on_link("quickstart", rate, _overrides(size, point, directory))
    return link, json.loads((directory / "comparison.json").read_text(encoding="utf-8"))


def _overrides(size: Size, point: Point, directory: Path) -> list[str]:
    planned = [mode for mode in point.modes if mode not in ("eager", "1")]
    values = {
        "strands": "2" if planned else "1",
        "model.layers": size.layers,
        "model.width": size.width,
        "model.heads": size.width // 128,
        "model.kv_heads": size.width // 128,
        "model.ffn_width": 11 * size.width // 4,
        **dict(size.layout),
        "data.sequence_length": size.sequence_length,
        "train.micro_batch_size": 1,
        "train.micro_batches": point.micro_batches,
        "train.steps": 1,
        "train.evaluate_batches": 1,
        "compare.steps": size.steps,
        "compare.modes": ",".join(point.modes),
        "compare.memory": str(point.memory).lower(),
        "output.directory": directory,
        "output.record_every": 0,
        "plan.profile_repeats": 3,
        "plan.cache": "false",
    }
    if size.thrifty:
        values["plan.extra_memory_mib"] = 0
    return [f"--{key}={value}" for key, value in values.items()]
