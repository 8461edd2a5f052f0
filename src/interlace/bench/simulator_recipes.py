"""Rows of `simulator` from NVIDIA's recipes for DGX Cloud, all of them simulated.

NeMo on 8 to 2,304 H100 and 128 to 512 GB200 (github.com/NVIDIA/dgxc-benchmarking, tables in 16 bits
of releases 25.01 to 25.05.02), with the layouts of its tables and these settings of its files:

    ub_tp_comm_overlap              tensor ranks exchange parts under their matmuls
    ub_tp_comm_overlap_cfg          by kernels that hold few multiprocessors (`num_sm`)
    overlap_grad_sync, ..param_sync gradients are summed under the last backward, and weights
                                    gathered under the first forward
    gradient_accumulation_fusion    a matmul adds to the sum of gradients,
    grad_sync_dtype                 which is kept and exchanged in 16 bits
    overlap_p2p_comm                stages compute while they send
    moe_expert_capacity_factor      1, so that no expert has more rows than another
    NVTE_FUSED_ATTN                 attention is cuDNN's if 1, FlashAttention 2 if 0

Read were those of GPT 175B, Nemotron and Grok-1 and the start script of Llama; the others are taken
to be alike. How TransformerEngine and Megatron do it is in `tensor_operators` and `ExpertJob`. The
trainer does it in another way, so its steps are not these.
"""

from dataclasses import replace

from interlace.bench.simulator_jobs import layout_of_job
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.hardware.expert_job import ExpertJob
from interlace.hardware.step_job import FUSED_SUM_BYTES, StepJob
from interlace.strategy.job_layout import JobLayout

TABLE = "recipes.csv"
"""In `presets/measured`; its `source` is the release."""
SMS_HELD = 7
"""Mean of `num_sm` of the ten exchanges of a layer of GPT 175B: 4, 8, 2 and 4 of those in one piece
beside another matmul, 24 and 20 of the scattered sums of a forward, and 1 of the four rings, for
which it has none."""
_CLUSTERS = {"H100": "h100", "GB200": "gb200"}
_GATED = ("Llama", "Grok")


def recipe_name(row: dict[str, str]) -> str:
    """The source of a row, as the bench calls it."""
    program = "NeMo experts" if row["experts"] else "NeMo"
    return f"{program}, {row['gpu']}, simulated"


def recipe_job(row: dict[str, str]) -> StepJob:
    """The job of a row."""
    number = {key: int(value) for key, value in row.items() if value.isdigit()}
    layers, parts = number["layers"], number["pp"] * number["vpp"]
    experts = None
    if row["experts"]:
        experts = ExpertJob(
            count=number["experts"],
            chosen=number["chosen"],
            ffn=number["ffn"],
            ranks=number["ep"],
            capacity=1.0,
            sent_once=True,
        )
    return StepJob(
        layers=layers,
        hidden=number["hidden"],
        heads=number["heads"],
        kv_heads=number["kv_heads"],
        ffn=number["ffn"],
        vocab=number["vocab"],
        sequence=number["seq"],
        micro_batch=number["micro_batch"],
        micro_batches=number["global_batch"] // (number["dp"] * number["micro_batch"]),
        gated=row["model"].startswith(_GATED),
        experts=experts,
        tensor=number["tp"],
        pipeline=number["pp"],
        data=number["dp"],
        context=number["cp"],
        ring=number["cp"] > 1,
        chunks=number["vpp"],
        # Embedding and head take the place of a layer where only so it divides.
        end_layers_fewer=int(layers % parts != 0),
        recompute=row["recompute"],  # type: ignore[arg-type]
        attention=row["attention"],  # type: ignore[arg-type]
        sharding=1,
        gradient_bytes=2,
        summed_bytes=FUSED_SUM_BYTES,
        overlap_gradients=True,
    )


def recipe_layout(job: StepJob) -> JobLayout:
    """How it is simulated."""
    schedule = f"interleaved(chunks={job.chunks})" if job.chunks > 1 else ""
    return layout_of_job(job, schedule=schedule, decompose=job.tensor > 1)


def recipe_cluster(gpu: str) -> Cluster:
    """The hosts of a row."""
    cluster = load_cluster(_CLUSTERS[gpu])
    return replace(cluster, intra_host=replace(cluster.intra_host, sms_held=SMS_HELD))
