"""Two strands against one strand and against plain eager PyTorch, over several link rates.

Two ranks, one core each, tensor + sequence parallel Llama of width 1024 in float32. The three
ways take turns step by step in one run; a step is all micro-batches, warm-up and drain of the
pipeline of two, gradient clipping and AdamW. The first step of each way is not counted.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interlace.bench.job import train_on_link
from interlace.bench.results import Row, environment, speedup, write_json
from interlace.report.tables import bench_table


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run."""

    rates: tuple[str, ...]
    layers: int
    steps: int
    micro_batches: int


FULL = Size(rates=("1gbit", "500mbit", "250mbit", ""), layers=2, steps=3, micro_batches=8)
QUICK = Size(rates=("500mbit",), layers=1, steps=3, micro_batches=4)


def run(*, quick: bool, json_path: Path | None) -> int:
    """Run all rates; print the table; write JSON if asked."""
    size = QUICK if quick else FULL
    rows: list[Row] = []
    links: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
        for rate in size.rates:
            directory = Path(folder) / (rate or "unshaped")
            link = train_on_link("quickstart", rate, _overrides(size, directory))
            links.add(link.partition(" link")[0])
            comparison = json.loads((directory / "comparison.json").read_text(encoding="utf-8"))
            rows += rows_of(rate or "unshaped", comparison)
    print(bench_table([asdict(row) for row in rows]))
    if json_path is not None:
        where = environment(" and ".join(sorted(links)) + " link")
        write_json(json_path, "strands", where, rows)
        print(json_path)
    return 0


def _overrides(size: Size, directory: Path) -> list[str]:
    values = {
        "model.layers": size.layers,
        "model.width": 1024,
        "model.heads": 8,
        "model.kv_heads": 8,
        "model.ffn_width": 2816,
        "parallel.tensor": 2,
        "data.sequence_length": 256,
        "train.micro_batch_size": 1,
        "train.micro_batches": size.micro_batches,
        "train.steps": 1,
        "train.evaluate_batches": 1,
        "compare.steps": size.steps,
        "output.directory": directory,
        "output.record_every": 0,
        "plan.profile_repeats": 3,
        "plan.cache": "false",
    }
    return [f"--{key}={value}" for key, value in values.items()]


def rows_of(case: str, comparison: dict[str, Any]) -> list[Row]:
    """The rows of one link rate. Repeats pair step i of one way with step i of the other."""
    modes = comparison["modes"]
    two = modes["2"]["step_ms"][1:]
    rows = [
        speedup(case, "speedup_vs_eager", two, modes["eager"]["step_ms"][1:]),
        speedup(case, "speedup_vs_one_strand", two, modes["1"]["step_ms"][1:]),
        speedup(case, "cpu_time_vs_eager", modes["2"]["cpu_ms"][1:], modes["eager"]["cpu_ms"][1:]),
    ]
    ours, baseline = modes["2"]["hidden_fraction"], modes["eager"]["hidden_fraction"]
    ratio = ours / baseline if baseline else None
    rows.append(
        Row(
            case=case,
            metric="hidden_fraction",
            ours=ours,
            baseline=baseline,
            ratio=ratio,
            spread=None,
        )
    )
    return rows
