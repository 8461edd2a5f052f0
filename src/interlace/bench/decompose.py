"""Decomposed collectives against plain ones and against data slicing, in blocks and in training.

MLP and attention blocks with the ratios of CommFuse's tables (transfer time of a slice 0.5 to 1.5
times its compute), forward and forward + backward, on links that are shaped for each. Two ranks
have a core each, which computes and does the copying of the link too. Paced, they compute and then
sleep until a matmul has taken a set time, so that neither the copying nor other load on the core
changes what is measured. Others compute as fast as they can: blocks of the tables' widths by MKL's
code path for any CPU, 2 to 3 times as slow, so that the copying is a few per cent of a transfer;
and at full speed an MLP that is wider inside, for the same reason, and one of the tables' width,
where the copying shows. Four ranks share the cores and sleep as long as their matmuls would take.
All of it is said in every row. All ways take turns step by step in one run, after an untimed step
of each. gloo's own collectives move more bytes, or use one direction of a link at a time: vanilla
and slicing use those of `graphs.collectives`, and an all-to-all with a local sum for a
reduce-scatter. Then a training run: eager, one strand, decomposed, two strands, both.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from interlace.bench import decompose_rows, decompose_train
from interlace.bench.decompose_rows import DecomposeCase
from interlace.bench.decompose_shapes import Job, Shape, write_job
from interlace.bench.decompose_train import TrainCase, TrainSize
from interlace.bench.results import environment, write_json
from interlace.errors import InputError, RunError, nearest
from interlace.lab import hosts
from interlace.ranks.launch import launch

_PARTS = ("all", "blocks", "training")
"""Words that `--part` takes."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is run."""

    blocks: tuple[tuple[int, Job], ...]
    """Ranks, and what they do."""
    training: TrainSize


# At most a quarter of what a quiet core does, so that moments in which others slow it down change
# nothing; a transfer hides under 170 ms of compute, beside which a send's 2 ms are few.
_PACED = (
    Shape(block="mlp", width=1024, rows=1024, ratios=(0.8, 1.5), flops_per_s=2.5e10, paced=True),
    Shape(block="attention", width=1024, rows=512, ratios=(0.8,), flops_per_s=1e10, paced=True),
)
# What a core spends while it computes, 5 to 8 ms on copying 8 MiB each way and up to 3 ms on a
# send, in which gloo's thread may wait for a lock, must be little against the transfer: so more is
# computed for each byte than by a fast core at the tables' width.
_SLOWED = (
    Shape(block="mlp", width=2048, rows=1024, ratios=(0.8, 1.5), compatible=True),
    Shape(block="attention", width=2048, rows=1024, ratios=(0.8, 1.5), compatible=True),
)
_WIDE = Shape(block="mlp", width=256, inner=64, rows=4096, ratios=(0.8,))
"""An MLP of 64 times its width inside, so that much is computed for each byte."""
_TABLE = Shape(block="mlp", width=2048, rows=1024, ratios=(0.8,))
"""The MLP of CommFuse's tables, 4 times its width inside."""
FULL = Sizes(
    blocks=(
        (2, Job(shapes=_PACED, turns=3, most_turns=5)),
        (2, Job(shapes=_SLOWED, turns=3, most_turns=5)),
        (2, Job(shapes=(_WIDE, _TABLE), turns=4, most_turns=8)),
        (
            4,
            Job(
                shapes=(
                    Shape(block="mlp", width=1024, rows=256, flops_per_s=4.5e9),
                    Shape(
                        block="attention",
                        width=1024,
                        rows=256,
                        flops_per_s=3.5e9,
                        ratios=(0.8, 1.5),
                    ),
                ),  # a transfer hides under 120 ms of compute, beside which a send's 2 ms are few
                turns=2,
            ),
        ),
    ),
    training=decompose_train.FULL,
)
"""What the README's tables were measured with."""
QUICK = Sizes(
    blocks=(
        (2, Job(shapes=(Shape(block="mlp", width=1024, rows=128, ratios=(0.8,)),), turns=2)),
        (
            4,
            Job(
                shapes=(
                    Shape(block="attention", width=512, rows=128, ratios=(0.8,), flops_per_s=2e9),
                ),
                turns=1,
            ),
        ),
    ),
    training=decompose_train.QUICK,
)
"""One small shape of each block: that all runs, not how fast."""


def run(*, quick: bool, json_path: Path | None, part: str = "all") -> int:
    """Measure, print the tables, write JSON if asked. `part` is `all`, `blocks` or `training`."""
    if part not in _PARTS:
        raise InputError(f"--part {part} is no part of this bench", hint=nearest(part, _PARTS))
    sizes = QUICK if quick else FULL
    began = time.monotonic()
    cases: list[DecomposeCase] = []
    trained: list[TrainCase] = []
    if part != "training":
        for ranks, job in sizes.blocks:
            cases += measure_blocks(ranks, job)
            print(f"{time.monotonic() - began:.0f} s: {ranks} ranks done", file=sys.stderr)
    if part != "blocks":
        with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
            trained = decompose_train.measure_training(sizes.training, Path(folder))
    print(_tables(cases, trained))
    if json_path is not None:
        rows = [row for case in cases for row in decompose_rows.rows_of(case)]
        rows += [row for case in trained for row in decompose_train.rows_of(case)]
        rows += decompose_rows.summary_rows(cases)
        kind = "emulated" if _no_lab() else "lab"
        write_json(json_path, "decompose", environment(f"{kind} links"), rows)
        print(json_path)
    return 0


def measure_blocks(ranks: int, job: Job) -> list[DecomposeCase]:
    """Run `job` on so many ranks, each a host of a lab where that is possible, else a local process
    with emulated links. Raises RunError when a rank fails."""
    with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
        told, result = Path(folder) / "job.json", Path(folder) / "cases.json"
        reason = _no_lab()
        write_job(replace(job, emulated_links=bool(reason)), told)
        rank = ["-m", "interlace.bench.decompose_job", str(told), str(result)]
        settings = [f"{name}={value}" for name, value in job.environment.items()]
        command = ["env", *settings, sys.executable, *rank]
        if reason:
            print(f"note: no network namespaces here ({reason}): emulated links", file=sys.stderr)
            launch(command, ranks=ranks)
        else:
            code = hosts.run_in_lab(command, hosts=ranks, ranks_per_host=1, rate="")
            if code:
                raise RunError(
                    f"the blocks on {ranks} ranks ended with exit code {code}",
                    hint="the message of a rank is above",
                )
        return [
            DecomposeCase.of(fields) for fields in json.loads(result.read_text(encoding="utf-8"))
        ]


def _no_lab() -> str:
    """Why no lab can be made here; empty if one can."""
    return "this is already a lab" if hosts.inside_lab() else hosts.available()


def _tables(cases: Sequence[DecomposeCase], trained: Sequence[TrainCase]) -> str:
    parts = [decompose_rows.tables(cases)] if cases else []
    parts += [decompose_train.tables(trained)] if trained else []
    return "\n\n".join(parts)
