"""Rows of `simulator` that the step model does not describe, by the simulation of layouts that
`interlace simulate` and searches use: pipelines that cut backwards in two, ranks that share
sequences around a ring, collectives that are decomposed, experts.

The program is the source's, with its kernels and its memory, not the trainer's. Ranks of zero
bubble begin the next step without waiting for the others (arXiv 2401.10241, section 4), so a step
of theirs is the longest of a rank's own.
"""

from dataclasses import dataclass, replace

from interlace.config import DataConfig, Recompute, RunConfig
from interlace.hardware.cluster import Cluster
from interlace.hardware.step_job import StepJob
from interlace.hardware.step_memory import layer_activation_bytes, stage_memory
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.sim.pipeline_step import ACTION, PipelineStep
from interlace.strategy.chunk_cuts import split_names
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.job_links import JobLinks
from interlace.strategy.layer_operators import LayerOperators
from interlace.strategy.pass_times import PassTimes
from interlace.strategy.simulated_job import JobParts, simulate_job
from interlace.strategy.step_ends import OPTIMIZER

ZERO_BUBBLE = {"ZB-1p": "zb_h1", "ZB-2p": "zb_h2"}
"""Orders that the paper searched for each row within the memory of one or two times 1F1B's, by our
rules with as much."""
_AGAIN: dict[str, Recompute] = {"full": "layer", "attention": "attention"}
"""What layouts call it; every other matmul that is computed again counts in a layer's time."""
_ONE_BUCKET = float("inf")
"""Bytes of the largest collective of gradients, which these programs sum in one."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What comes out for a row."""

    seconds: float
    memory_gib: float
    """Of the fullest rank, with what the source's program keeps of a layer: from a forward to the
    gradients of its weights."""


def layout_of_job(job: StepJob, *, schedule: str = "", decompose: bool = False) -> JobLayout:
    """How a job is simulated; of a pipeline by 1F1B, if no schedule is named."""
    plain = "one_f_one_b" if job.pipeline > 1 else "one_strand"
    return JobLayout(
        data_shard=job.data if job.sharding else 1,
        data_replicate=1 if job.sharding else job.data,
        context=job.context,
        context_method="ring",
        tensor=job.tensor,
        expert=job.experts.ranks if job.experts else 1,
        pipeline=job.pipeline,
        zero=3 if job.sharding == 3 else 1,
        schedule=schedule or plain,
        micro_batch=job.micro_batch,
        micro_batches=job.micro_batches,
        recompute=_AGAIN.get(job.recompute, "none"),
        decompose="direct" if decompose else "off",
    )


def simulated_step(
    cluster: Cluster, job: StepJob, layout: JobLayout, *, user_buffers: bool = False
) -> SimulatedStep:
    """With `user_buffers` tensor ranks overlap as TransformerEngine's do, and gather again in the
    backward what they keep a part of, as Megatron's do. Raises InputError if the cluster has fewer
    devices than the job has ranks."""
    links = JobLinks(cluster, layout)
    assert links.places
    once = replace(job, recompute="none") if job.recompute in _AGAIN else job  # the layout has it
    operators = LayerOperators(
        once, links, _ONE_BUCKET, gathers_again=user_buffers, user_buffers=user_buffers
    )
    times = PassTimes(operators)
    found = simulate_job(
        _config(job), cluster, layout, JobParts(once, links, times, sums_late=True)
    )
    bypasses = layout.schedule in ZERO_BUBBLE.values()
    seconds = _longest_rank_s(found.step) if bypasses else found.seconds
    return SimulatedStep(seconds, _memory_gib(job, found.step.peak_chunks))


def _longest_rank_s(step: PipelineStep) -> float:
    """From a rank's first action to its last one, and its optimizer."""
    found = []
    for timeline in step.timelines:
        own = [span for span in timeline.spans if span.kind == ACTION]
        update = sum(span.duration_ns for span in timeline.spans if span.kind == OPTIMIZER)
        found.append(own[-1].end_ns - own[0].start_ns + update)
    return max(found) / 1e9


def _memory_gib(job: StepJob, held: tuple[int, ...]) -> float:
    shared = replace(job, micro_batches=1, data=job.data * job.context)
    most = 0.0
    for stage, layers in enumerate(job.layers_of_stages()):
        one = stage_memory(shared, stage)
        more = (held[stage] - 1) * layer_activation_bytes(job) * layers
        most = max(most, one.total_bytes + more)
    return most / 2**30


def _config(job: StepJob) -> RunConfig:
    """A run of the same shapes, whose chunks begin where the job's stages do."""
    experts = ExpertsConfig()
    if job.experts is not None:
        experts = ExpertsConfig(
            count=job.experts.count,
            chosen=job.experts.chosen,
            capacity_factor=job.experts.capacity,
        )
    dense = "llama" if job.gated else "gpt"
    model = ModelConfig(
        architecture="moe" if experts.count else dense,
        experts=experts,
        layers=job.layers,
        width=job.hidden,
        heads=job.heads,
        kv_heads=job.kv_heads or job.heads,
        ffn_width=job.ffn,
        vocab_size=job.vocab,
    )
    config = RunConfig(model=model, data=DataConfig(sequence_length=job.sequence))
    if job.pipeline == 1:
        return config
    sizes = [round(layers) for layers in job.layers_of_stages()]
    if job.chunks > 1:
        fewer, number = job.end_layers_fewer, job.pipeline * job.chunks
        each = (job.layers + 2 * fewer) // number
        sizes = [each - fewer, *[each] * (number - 2), each - fewer]
    cuts = [sum(sizes[:chunk]) for chunk in range(len(sizes))]
    return replace(
        config,
        parallel=replace(config.parallel, pipeline=job.pipeline),
        pipeline=replace(config.pipeline, split_at=split_names(cuts)),
    )
