"""Hold the step model against a sweep of layouts that another team published, blind.

    git clone https://github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts
    pip install pandas openpyxl
    python scripts/try_layout_sweep.py CHECKOUT

Hagemann et al. (arXiv 2311.05610) ran Llamas of 13, 30 and 65 billion parameters on 32 to 256 A100
in all layouts that they thought of, and say which ran out of memory. The tables are not part of the
package, as their licence (CC BY-NC-SA 4.0) would not allow it. What a row does not say follows from
others: the batch and the vocabulary from the operations that a step is said to have, and gradients
in 16 bits, as 13B ran on devices that could not hold them in 32 (times differ by 0.3 % by that).
Nothing is fitted, but for the last column.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pandas as pd

from interlace.bench.simulator_rows import MeasuredStep
from interlace.bench.simulator_scores import fit, mean_error, seconds_of, spearman
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.hardware.step_job import StepJob
from interlace.hardware.step_memory import peak_memory
from interlace.text import aligned, percent

MODELS: dict[str, dict[str, int]] = {
    "13B": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824},
    "30B": {"layers": 60, "hidden": 6656, "heads": 52, "ffn": 17920},
    "65B": {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 22016},
}
VOCAB = 128_000
TOKENS = 2**22
"""Of a step: 2,048 sequences of 2,048 tokens, or 512 of 8,192."""
KERNELS: dict[str, dict[str, Any]] = {
    "flash_attention2 + RMS kernel": {"attention": "flash2", "fused_operators": True},
    "flash_attention2": {"attention": "flash2", "fused_operators": False},
    "flash_attentionv1.0.8": {"attention": "flash1", "fused_operators": False},
}
"""Other kernels of attention are left out: what they keep and move is not known."""
RECOMPUTED = {"disabled": "none", "every_layer": "full"}
HEADER = (
    "steps of",
    "kernels",
    "steps",
    "error",
    "bias",
    "ranks",
    "its best is slower by",
    "out of memory, seen",
    "fitted to a third, the others",
)
FEWEST = 6
"""Steps of a group that is scored on its own."""


class Row(NamedTuple):
    """A step that was tried."""

    step: MeasuredStep
    out_of_memory: bool
    group: tuple[str, str]
    """Model and devices; kernel."""


def main() -> int:
    """Score each model and kernel, and all steps together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of the repository with the tables")
    cluster = load_cluster("a100-80")
    found = list(rows_of(parser.parse_args().checkout, cluster))
    groups = sorted({row.group for row in found})
    lines = [
        cells
        for group in groups
        if (cells := scored([row for row in found if row.group == group], *group)) is not None
    ]
    lines.append(scored(found, "all", "", "") or ())
    print(aligned(HEADER, lines, text_columns=2))
    return 0


def rows_of(checkout: Path, cluster: Cluster) -> Iterator[Row]:
    """All rows of the kernels that are known, but for layouts that do not divide the batch."""
    for file in sorted((checkout / "data").rglob("*.xlsx")):
        model = next(name for name in MODELS if name in file.name)
        sequence = 8192 if "8k" in file.name else 2048
        for number, row in enumerate(pd.read_excel(file, header=1).to_dict("records"), 1):
            seconds = pd.to_numeric(row["Average Step Time"], errors="coerce")
            lost = row["Average Step Time"] == "OOM Error"
            if row["kernel"] not in KERNELS or (pd.isna(seconds) and not lost):
                continue
            try:
                job = job_of(row, model, sequence)
            except InputError:  # 512 sequences do not divide
                continue
            name = f"{model}, {sequence // 1024}k tokens, {row['World Size']} devices"
            step = MeasuredStep(cluster, job, float(seconds), None, file.name, number)
            yield Row(step, lost, (name, row["kernel"]))


def job_of(row: dict[str, Any], model: str, sequence: int) -> StepJob:
    """Raises InputError if the layout does not divide the batch."""
    tensor, pipeline = int(row["model_parallel_size"]), int(row["pipe_parallel_size"])
    data, micro_batch = int(row["World Size"]) // (tensor * pipeline), int(row["micro_batch_size"])
    count, left = divmod(TOKENS // sequence, data * micro_batch)
    if left:
        raise InputError(f"{TOKENS // sequence} sequences on {data} replicas", hint="leave it out")
    return StepJob(
        **MODELS[model],
        **KERNELS[row["kernel"]],
        vocab=VOCAB,
        sequence=sequence,
        gated=True,
        micro_batch=micro_batch,
        micro_batches=count,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        recompute=RECOMPUTED[row["activation_checkpointing_type"]],
        sequence_parallel=bool(row.get("sequence_parallel", False)),
        gradient_bytes=2,
        sharding=1,
    )


def scored(rows: list[Row], name: str, kernel: str, best: str | None = None) -> Any:
    """The cells of a group; None if it has too few steps."""
    ran = [row.step for row in rows if not row.out_of_memory]
    if len(ran) < FEWEST:
        return None
    predicted, measured = [seconds_of(step) for step in ran], [step.seconds for step in ran]
    if best is None:
        chosen = measured[predicted.index(min(predicted))]
        best = percent(chosen / min(measured) - 1)
    lost = [not fits(row.step) for row in rows if row.out_of_memory]
    refused = sum(not fits(step) for step in ran)
    factors = fit(ran[::3])
    others = [step for at, step in enumerate(ran) if at % 3]
    after = mean_error([seconds_of(s, *factors) for s in others], [s.seconds for s in others])
    return (
        name,
        kernel,
        str(len(ran)),
        percent(mean_error(predicted, measured)),
        percent(mean(p / m - 1 for p, m in zip(predicted, measured, strict=True))),
        f"{spearman(predicted, measured):.2f}",
        best,
        f"{sum(lost)} of {len(lost)}; {refused} of {len(ran)} that ran",
        percent(after),
    )


def fits(step: MeasuredStep) -> bool:
    """Whether the whole of a device is enough, by the model."""
    return peak_memory(step.job).total_bytes <= step.cluster.memory_gib * 2**30


if __name__ == "__main__":
    sys.exit(main())
