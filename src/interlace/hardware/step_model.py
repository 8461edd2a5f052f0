"""Seconds of a training step of a dense GPT or Llama on a cluster, computed from shapes alone.

    step = micro-batches x slowest stage + (all stages - slowest) / chunks
         + sum of gradients that nothing hides + optimizer

A stage's time is that of its layers (`layer_times`), of the head in the last, and of two messages
to its neighbours per micro-batch. Ranks are dealt as Megatron does: tensor ranks are neighbours,
then replicas, then stages. With sharded weights (`sharding = 3`) each layer is gathered under the
layer before it and its gradients are scattered under the one after; what takes longer counts, and
collectives hold multiprocessors meanwhile.

What is not in it: ranks that wait for a slower one, dispatch of Python beyond one launch per
kernel, memory that is short, files that are written.
"""

from dataclasses import dataclass

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster
from interlace.hardware.collective_times import axis_place, collective_time
from interlace.hardware.device_rates import DeviceRates
from interlace.hardware.layer_times import PassTime, head_passes, layer_passes
from interlace.hardware.step_job import StepJob
from interlace.hardware.step_memory import RankMemory, peak_memory
from interlace.ir.graph import Kind

OPTIMIZER_BYTES = 40
"""Adam per parameter: gradient, master and moments read (16), written (12), 16-bit weight (2), the
norm of the gradients and their setting to zero (10)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """What one step takes, and of what."""

    seconds: float
    mfu: float
    """Multiplications of the model over what the devices could do in that time."""
    compute_s: float
    """Of the slowest stage, all micro-batches."""
    tensor_s: float
    """Exchange of tensor ranks, of the slowest stage."""
    sends_s: float
    """Between stages, of the slowest stage."""
    bubble_s: float
    gradients_s: float
    """Exchange with replicas that nothing hides."""
    optimizer_s: float
    memory: RankMemory


def estimate_step(
    cluster: Cluster, job: StepJob, device: DeviceRates | None = None
) -> StepEstimate:
    """The step on a cluster, or on other rates of its device.

    Raises InputError if the cluster has fewer devices than the job has ranks, and for experts and
    ranks that share sequences.
    """
    cluster.require(job.ranks)
    if job.experts is not None or job.context > 1:
        raise InputError(
            f"a step with {'experts' if job.experts else f'context = {job.context}'} is not known "
            "to step_model",
            hint="simulate it: interlace.strategy.simulated_job",
        )
    device = device or cluster.device
    forward, backward = layer_passes(cluster, device, job)
    if job.sharding == 3 and job.data > 1:
        forward, backward, edge_s = _sharded(cluster, job, forward, backward)
    else:
        edge_s = 0.0
    head = sum(head_passes(cluster, device, job), PassTime(0.0, 0.0))
    stages = [(forward + backward).times(layers) for layers in job.layers_of_stages()]
    stages[-1] += head
    send_s = 2 * job.chunks * _send_s(cluster, job)
    slowest = max(stages, key=lambda stage: stage.seconds)
    cycle_s = slowest.seconds + send_s
    bubble_s = (sum(stage.seconds + send_s for stage in stages) - cycle_s) / job.chunks
    gradients_s = edge_s * job.micro_batches
    if job.sharding < 3:
        gradients_s += _gradients_s(cluster, job, backward.seconds * job.layers_of_stages()[0])
    share = job.data if job.sharding else 1
    optimizer_s = OPTIMIZER_BYTES * job.stage_parameters(0) / share / device.bytes_per_s
    seconds = job.micro_batches * cycle_s + bubble_s + gradients_s + optimizer_s
    return StepEstimate(
        seconds=seconds,
        mfu=job.model_flops / (seconds * job.ranks * cluster.peak_tflops * 1e12),
        compute_s=job.micro_batches * slowest.compute_s,
        tensor_s=job.micro_batches * slowest.tensor_s,
        sends_s=job.micro_batches * send_s,
        bubble_s=bubble_s,
        gradients_s=gradients_s,
        optimizer_s=optimizer_s,
        memory=peak_memory(job),
    )


def _send_s(cluster: Cluster, job: StepJob) -> float:
    """One message between stages: ranks of a tensor group each send their part, and gather it where
    it is wanted whole, as Megatron and DeepSpeed do."""
    if job.pipeline == 1:
        return 0.0
    place = axis_place(cluster, job.pipeline, job.tensor * job.data, job.ranks)
    whole = 2.0 * job.tokens * job.hidden
    seconds = collective_time(cluster, Kind.SEND, whole / job.tensor, place).seconds
    if job.tensor > 1 and not job.sequence_parallel:
        inside = axis_place(cluster, job.tensor, 1, job.ranks)
        seconds += collective_time(cluster, Kind.ALL_GATHER, whole, inside).seconds
    return seconds


def _gradients_s(cluster: Cluster, job: StepJob, last_backward_s: float) -> float:
    """What the exchange with replicas adds to the step, and that of a tied embedding."""
    size = job.gradient_bytes * job.stage_parameters(0)
    place = axis_place(cluster, job.data, job.tensor, job.ranks)
    seconds = collective_time(cluster, Kind.ALL_REDUCE, size, place).seconds
    if job.sharding:
        weights = 2 * job.stage_parameters(0)
        seconds = collective_time(cluster, Kind.REDUCE_SCATTER, size, place).seconds
        seconds += collective_time(cluster, Kind.ALL_GATHER, weights, place).seconds
    if job.overlap_gradients:
        layers = max(1.0, job.layers_of_stages()[0])
        seconds = max(seconds - last_backward_s, seconds / layers)
    if job.pipeline > 1 and not job.gated:
        ends = axis_place(cluster, 2, job.ranks // 2, job.ranks)
        embedding = job.gradient_bytes * job.vocab * job.hidden / job.tensor
        seconds += collective_time(cluster, Kind.ALL_REDUCE, embedding, ends).seconds
    return seconds


def _sharded(
    cluster: Cluster, job: StepJob, forward: PassTime, backward: PassTime
) -> tuple[PassTime, PassTime, float]:
    """Passes of a layer whose weights are gathered and whose gradients are scattered beside it, and
    what is exposed at the ends of a micro-batch: the embedding's gather and its gradient."""
    place = axis_place(cluster, job.data, job.tensor, job.ranks)
    weights = 2.0 * job.layer_parameters / job.tensor
    gather_s = collective_time(cluster, Kind.ALL_GATHER, weights, place).seconds
    gradients = job.gradient_bytes * job.layer_parameters / job.tensor
    scatter_s = collective_time(cluster, Kind.REDUCE_SCATTER, gradients, place).seconds
    link = cluster.inter_host if place.hosts > 1 else cluster.intra_host
    held = link.sms_held / cluster.sms
    ends = float(job.vocab * job.hidden) / job.tensor
    edge_s = collective_time(cluster, Kind.ALL_GATHER, 2 * ends, place).seconds
    edge_s += collective_time(
        cluster, Kind.REDUCE_SCATTER, job.gradient_bytes * ends, place
    ).seconds
    return (
        _beside(forward, gather_s, held),
        _beside(backward, gather_s + scatter_s, held),
        edge_s,
    )


def _beside(layer: PassTime, transfer_s: float, held: float) -> PassTime:
    """A pass beside a transfer that holds a share of the multiprocessors as long as it runs."""
    slowed_s = layer.compute_s + held * min(transfer_s, layer.compute_s / (1 - held))
    return PassTime(max(slowed_s, transfer_s - layer.tensor_s), layer.tensor_s)
