"""Peak memory of a rank in a training step, by what holds it.

Weights in 16 bits, gradients in 16 or 32, Adam's two moments and master weights in float32.
Activations are counted tensor by tensor of what a layer keeps for its backward (Korthikanti et al.,
arXiv 2205.05198, table 2): with t tensor ranks, per token and hidden unit

    norms' inputs 4, inputs of both matmul pairs 4, two dropout masks 2     / t if split by sequence
    queries 2, keys and values 4 x kv / hidden, output of attention 2       / t
    feed-forward 4 x ffn / hidden, gated 6 x                                / t
    scores of unfused attention 5 x heads x sequence / hidden               / t

What the allocator reserves beyond what is allocated, the CUDA context and NCCL's buffers (1 to 5 GB
together) are not counted.
"""

from dataclasses import dataclass

from interlace.hardware.step_job import StepJob


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes at the peak of the rank that needs the most."""

    stage: int
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    logits_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
        )


def layer_activation_bytes(job: StepJob, *, kept_whole: bool = False) -> float:
    """Of one layer and micro-batch until its backward; `kept_whole`: as without recomputation."""
    along = job.tensor if job.sequence_parallel else 1
    if job.recompute == "full" and not kept_whole:
        return 2.0 * job.tokens * job.hidden / along
    norms = (8 if job.gated else 10) / along
    split = 4 + 4 * job.kv_width / job.hidden
    split += (6 if job.gated else 4) * job.ffn / job.hidden
    if job.attention == "unfused" and (job.recompute != "attention" or kept_whole):
        split += 5 * job.heads * job.sequence / job.hidden
    kept = job.tokens * job.hidden * (norms + split / job.tensor)
    return kept / 2 if job.recompute == "alternate" and not kept_whole else kept


def micro_batches_held(job: StepJob, stage: int) -> float:
    """Micro-batches of one chunk's share of layers whose activations a stage holds at once."""
    held = min(job.micro_batches, job.pipeline - stage)
    if job.chunks > 1:
        warm = 2 * (job.pipeline - stage - 1) + (job.chunks - 1) * job.pipeline + 1
        return min(job.micro_batches * job.chunks, warm) / job.chunks
    return float(held)


def stage_memory(job: StepJob, stage: int) -> RankMemory:
    """Memory of a rank of one pipeline stage."""
    parameters = job.stage_parameters(stage)
    weights, gradients, optimizer = 2 * parameters, job.gradient_bytes * parameters, 12 * parameters
    if job.sharding >= 1:
        optimizer /= job.data
    if job.sharding >= 2:
        gradients /= job.data
    if job.sharding == 3:
        gathered = 2 * 2 * job.layer_parameters / job.tensor
        weights = weights / job.data + gathered * (job.data > 1)
    activations = layer_activation_bytes(job) * job.layers_of_stages()[stage]
    activations *= micro_batches_held(job, stage)
    if job.recompute == "full":
        activations += layer_activation_bytes(job, kept_whole=True)
    last = stage == job.pipeline - 1
    # In 16 bits and in float32; one by one also their logarithms and their gradient in float32.
    logits = (6.0 if job.fused_operators else 14.0) * job.tokens * job.vocab / job.tensor * last
    return RankMemory(
        stage=stage,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        logits_bytes=logits,
    )


def peak_memory(job: StepJob) -> RankMemory:
    """Of the stage that needs the most."""
    stages = {0, min(1, job.pipeline - 1), job.pipeline - 1}
    return max((stage_memory(job, stage) for stage in stages), key=lambda each: each.total_bytes)
