"""Rows of `simulator`: published steps as jobs on clusters, or why one is left out.

What a program does (fused attention, float32 gradients, ...) is a setting of its source. What a
host has is its cluster. Neither has a number that was made to fit a row, but for the bytes of
DeepSpeed's engine, which are those of one source and used for another.
"""

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import interlace.presets
from interlace.bench import simulator_recipes
from interlace.bench.simulator_jobs import ZERO_BUBBLE, layout_of_job
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.hardware.step_job import StepJob
from interlace.strategy.job_layout import JobLayout

RECOMPUTE = {
    "full": "full",
    "none": "none",
    "none (assumed)": "none",
    "": "none",
    "selective op": "alternate",
    "selective layer": "alternate",
    "attention": "attention",
}
"""Words of the table. torchtitan's selections keep every other matmul, or every other layer."""
DEEPSPEED_BYTES = 51.0
"""For each parameter of a rank and micro-batch, in DeepSpeed's pipeline engine of 2021 and 2022: 6,
as elsewhere, and what MT-NLG's three steps are longer than those of Megatron's own engine. What it
does in that time is not known."""
GPT2_VOCAB = 50304
"""Of Megatron's GPT-2 vocabulary, for sources that do not say theirs."""


@dataclass(frozen=True)
class MeasuredStep:
    """A row that the step model describes."""

    cluster: Cluster
    job: StepJob
    seconds: float
    memory_gib: float | None
    table: str
    """The file in `presets/measured`."""
    row: int
    """Of the table, the first below its header being 1."""
    layout: JobLayout | None = None
    """How it is simulated, if the step model does not describe it."""
    user_buffers: bool = False
    """Whether its tensor ranks overlap as TransformerEngine's do."""


@dataclass
class SourceRows:
    """All rows of a source on one sort of GPU."""

    name: str
    steps: list[MeasuredStep] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """Rows by the reason why they are not used."""


def source_settings(source: str) -> dict[str, Any]:
    """What the program of a source does, as values of a `StepJob`."""
    megatron_deepspeed = {
        "attention": "unfused",
        "sequence_parallel": False,
        "gradient_bytes": 2,
    }
    return {
        # Their script (examples/pretrain_zero_bubble.sh) trains in fp16 and does not ask Megatron
        # for sums in float32, which it makes by itself in bfloat16 alone (training/arguments.py).
        "Zero Bubble (arXiv 2401.10241)": {"attention": "unfused", "gradient_bytes": 2},
        "llm-foundry": {"attention": "flash1"},
        "torchtitan": {"gated": True, "attention": "flash2"},
        "vTrain": megatron_deepspeed,
        "vTrain, one host": megatron_deepspeed,
        "SimuMax": {"gated": True},
        "Sailor": megatron_deepspeed,
        "BigScience BLOOM": megatron_deepspeed | {"summed_bytes": DEEPSPEED_BYTES},
        "MT-NLG (arXiv 2201.11990)": megatron_deepspeed | {"summed_bytes": DEEPSPEED_BYTES},
        "Megatron-LM (SC 2021)": megatron_deepspeed,
        "Megatron-LM (arXiv 2205.05198)": megatron_deepspeed,
        "ZeRO-3 (SC 2021)": megatron_deepspeed,
        "Alpa": megatron_deepspeed,
    }[source]


def source_cluster(gpu: str) -> Cluster:
    """The hosts of a source by what it says of its GPU."""
    a100, h100, v100 = (load_cluster(name) for name in ("a100-80", "h100", "v100"))
    if "Jean Zay" in gpu:
        # Four NVLinks between GPUs (arXiv 2211.05100), which we read as two boards of 4, joined by
        # 4 x 31.5 GB/s of PCIe; 4 ports of 100 Gbit/s for all 8.
        network = replace(a100.inter_host, gbit_per_s=50, efficiency=0.6, link="omni-path")
        inside = replace(a100.intra_host, island=4, between_gb_per_s=126)
        return replace(a100, ports_per_host=4, intra_host=inside, inter_host=network)
    if "4xHDR" in gpu:  # 4 ports of 200 Gbit/s for 8 devices
        network = replace(a100.inter_host, gbit_per_s=100)
        return replace(a100, ports_per_host=4, inter_host=network)
    if "HBM2e" in gpu:
        network = replace(h100.inter_host, link="roce")
        return replace(h100, memory_gb_per_s=2400, inter_host=network)
    if "p3.16xlarge" in gpu:  # a full cube of 8
        inside = replace(v100.intra_host, efficiency=0.9)
        return replace(v100, devices_per_host=8, intra_host=inside)
    known = {"A100-40G": "a100-40", "A100": "a100-80", "H100": "h100", "H200": "h200"}
    known |= {"B200": "b200", "GH200": "gh200"}
    return load_cluster(next(name for start, name in known.items() if gpu.startswith(start)))


def measured_rows(every: int = 1) -> dict[str, SourceRows]:
    """The tables by source and GPU, in their order; of recipes, whose steps take longest to
    simulate, one in so many."""
    found: dict[str, SourceRows] = {}
    clusters: dict[str, Cluster] = {}
    for row in [*_table("training.csv"), *map(_one_host, _table("single_node.csv"))]:
        name = f"{row['source']}, {row['gpu'].partition(' ')[0]}"
        if simulated := _simulated(row):
            name += f", {simulated}"
        rows = found.setdefault(name, SourceRows(name))
        reason = _why_not(row)
        if not reason:
            try:
                if row["gpu"] not in clusters:
                    clusters[row["gpu"]] = source_cluster(row["gpu"])
                rows.steps.append(_step(row, clusters[row["gpu"]]))
            except InputError as error:
                reason = error.message
        if reason:
            rows.left_out[reason] = rows.left_out.get(reason, 0) + 1
    for row in _table(simulator_recipes.TABLE)[::every]:
        name = simulator_recipes.recipe_name(row)
        found.setdefault(name, SourceRows(name)).steps.append(_recipe(row))
    return found


def _recipe(row: dict[str, str]) -> MeasuredStep:
    job = simulator_recipes.recipe_job(row)
    return MeasuredStep(
        cluster=simulator_recipes.recipe_cluster(row["gpu"]),
        job=job,
        seconds=float(row["step_time_s"]),
        memory_gib=None,
        table=row["table"],
        row=int(row["number"]),
        layout=simulator_recipes.recipe_layout(job),
        user_buffers=True,
    )


def _table(name: str) -> list[dict[str, str]]:
    file = Path(interlace.presets.__path__[0]) / "measured" / name
    with file.open(encoding="utf-8", newline="") as lines:
        rows = enumerate(csv.DictReader(lines), start=1)
        return [row | {"table": name, "number": str(number)} for number, row in rows]


def _one_host(row: dict[str, str]) -> dict[str, str]:
    """A row of vTrain's single host with what all of them have in common."""
    common = dict.fromkeys(
        ("kv_heads", "vocab", "cp", "vpp", "ep", "zero", "memory_gib", "notes"), ""
    )
    common |= {"source": "vTrain, one host", "gpu": "A100-SXM", "model": "GPT", "seq": "1024"}
    common |= {"recompute": "full", "precision": "fp16"}
    return {**common, **row, "ffn": str(4 * int(row["hidden"]))}


def _why_not(row: dict[str, str]) -> str:
    if "8" in row["precision"].replace("bf16", "").replace("fp16", ""):
        return "computes in 8 bits"
    if row["ep"] not in ("", "1") or "DeepSeek" in row["model"]:
        return "mixture of experts"
    if "typo" in row["notes"]:
        return "a misprint in the source"
    if not all(row[key] for key in ("heads", "layers", "micro_batch", "tp", "pp", "dp")):
        return "heads or layout not given"
    replicas = int(row["dp"]) * int(row["micro_batch"])
    if int(row["global_batch"]) % replicas:
        return "batch does not divide"
    return ""


def _simulated(row: dict[str, str]) -> str:
    """What of a row the step model does not describe, and simulations do; or nothing."""
    if _zero_bubble(row):
        return f"{_zero_bubble(row)} simulated"
    if row["cp"] not in ("", "1"):
        return "rings simulated"
    if row["notes"] == "async TP":
        return "decomposed, simulated"
    return ""


def _zero_bubble(row: dict[str, str]) -> str:
    return next((name for name in ZERO_BUBBLE if f"schedule {name}" in row["notes"]), "")


def _step(row: dict[str, str], cluster: Cluster) -> MeasuredStep:
    def number(key: str, default: int) -> int:
        return int(row[key]) if row[key] else default

    settings = dict(source_settings(row["source"]))
    if "PURE" in row["notes"] or "fp32 grad" in row["precision"]:
        settings["gradient_bytes"] = 2 if "PURE" in row["notes"] else 4
    if "eager" in row["notes"]:
        settings["fused_operators"] = False
    if "sequence parallel" in row["notes"]:
        settings["sequence_parallel"] = True
    layers, pipeline = number("layers", 1), number("pp", 1)
    # Two slots of the pipeline are taken by the embedding and the head where only so it divides.
    even = layers % pipeline == 0
    fewer = int(not even and (layers + 2) % pipeline == 0)
    job = StepJob(
        layers=layers,
        hidden=number("hidden", 0),
        heads=number("heads", 0),
        kv_heads=number("kv_heads", 0),
        ffn=number("ffn", 0),
        vocab=number("vocab", GPT2_VOCAB),
        sequence=number("seq", 0),
        micro_batch=number("micro_batch", 0),
        micro_batches=number("global_batch", 0) // (number("dp", 1) * number("micro_batch", 1)),
        tensor=number("tp", 1),
        pipeline=pipeline,
        data=number("dp", 1),
        context=number("cp", 1),
        ring=number("cp", 1) > 1,
        chunks=number("vpp", 1),
        end_layers_fewer=fewer,
        recompute=RECOMPUTE[row["recompute"]],  # type: ignore[arg-type]
        sharding=number("zero", 0),  # type: ignore[arg-type]
        **settings,
    )
    memory = float(row["memory_gib"]) if row["memory_gib"] else None
    layout = None
    if _simulated(row):
        schedule = ZERO_BUBBLE.get(_zero_bubble(row), "")
        layout = layout_of_job(job, schedule=schedule, decompose=row["notes"] == "async TP")
    return MeasuredStep(
        cluster=cluster,
        job=job,
        seconds=float(row["step_time_s"]),
        memory_gib=memory,
        table=row["table"],
        row=int(row["number"]),
        layout=layout,
    )
