"""ZeRO-3 under two strands against PyTorch's own `fully_shard`, over several link rates.

Two ranks, one core each, share masters, gradients, optimizer state and weights of a Llama in
float32 (`parallel.data_shard = 2`); gradients are reduced after each micro-batch, as `fully_shard`
does by default. Eager is `fully_shard` on the same module, one group per block, weights resharded
after the forward. A short run of one strand says how long compute and communication take; from it
follow the rates. At each rate all ways of running take turns step by step in one run. The first
step of each way is not counted.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.bench.job import train_on_link
from interlace.bench.results import environment, write_json
from interlace.bench.strand_rows import Case, rows_of, summary_rows, tables
from interlace.bench.strands import rate_for

CALIBRATION_RATE = "1gbit"
CALIBRATION_MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run."""

    layers: int
    width: int
    sequence_length: int
    steps: int
    ratios: tuple[float, ...]
    """Communication time over compute time."""
    micro_batches: int = 8


FULL = Size(layers=2, width=1024, sequence_length=128, steps=3, ratios=(0.5, 1.0, 2.0))
QUICK = Size(layers=2, width=512, sequence_length=256, steps=2, ratios=(1.0,), micro_batches=4)
_MODES = ("eager", "1", "list", "exact")


def run(*, quick: bool, json_path: Path | None) -> int:
    """Calibrate, run all cases, print the tables; write JSON if asked."""
    size = QUICK if quick else FULL
    cases: list[Case] = []
    links: set[str] = set()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
        first = _overrides(size, CALIBRATION_MICRO_BATCHES, ("1",), Path(folder) / "calibration")
        _, comparison = _measure(CALIBRATION_RATE, first, Path(folder) / "calibration")
        rate = CALIBRATION_RATE
        for ratio in size.ratios:
            directory = Path(folder) / f"{ratio:g}"
            rate = rate_for(ratio, comparison["modes"]["1"], rate)
            words = _overrides(size, size.micro_batches, _MODES, directory)
            link, comparison = _measure(rate, words, directory)
            links.add(link.partition(" link")[0])
            cases.append(
                Case(
                    target=ratio,
                    rate=rate,
                    micro_batches=size.micro_batches,
                    comparison=comparison,
                )
            )
            elapsed = f"{time.monotonic() - began:.0f} s"
            print(f"{elapsed}: {cases[-1].name} at {rate} done", file=sys.stderr)
    print(tables(cases))
    if json_path is not None:
        where = environment(" and ".join(sorted(links)) + " link")
        rows = [row for case in cases for row in rows_of(case)] + summary_rows(cases)
        write_json(json_path, "zero3", where, rows)
        print(json_path)
    return 0


def _measure(rate: str, overrides: list[str], directory: Path) -> tuple[str, dict[str, Any]]:
    """(how the link was made, content of comparison.json) of one training job."""
    link = train_on_link("quickstart", rate, overrides)
    return link, json.loads((directory / "comparison.json").read_text(encoding="utf-8"))


def _overrides(
    size: Size, micro_batches: int, modes: tuple[str, ...], directory: Path
) -> list[str]:
    values = {
        "strands": "2" if len(modes) > 1 else "1",
        "model.layers": size.layers,
        "model.width": size.width,
        "model.heads": size.width // 128,
        "model.kv_heads": size.width // 128,
        "model.ffn_width": 11 * size.width // 4,
        "parallel.data_shard": 2,
        "parallel.zero": 3,
        "parallel.reduce": "micro_batch",
        "data.sequence_length": size.sequence_length,
        "train.micro_batch_size": 1,
        "train.micro_batches": micro_batches,
        "train.steps": 1,
        "train.evaluate_batches": 1,
        "compare.steps": size.steps,
        "compare.modes": ",".join(modes),
        "output.directory": directory,
        "output.record_every": 0,
        "plan.profile_repeats": 3,
        "plan.cache": "false",
    }
    return [f"--{key}={value}" for key, value in values.items()]
