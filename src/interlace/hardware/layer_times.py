"""Times of one layer, of the embedding and of the head, on one rank and for one micro-batch.

Bytes of what only moves them follow from what the operators of such a layer read and write: norms,
residuals with bias and dropout, the activation, rotations. A backward reads and writes half as much
again; its matmuls are two for one. What experts compute is in `expert_times`; what they exchange is
not counted here.
"""

from dataclasses import dataclass

from interlace.hardware.cluster import Cluster
from interlace.hardware.collective_times import axis_place, collective_time
from interlace.hardware.device_rates import DeviceRates
from interlace.hardware.expert_times import expert_parts
from interlace.hardware.operator_times import (
    fused_attention_s,
    launched_s,
    matmul_s,
    moved_s,
    unfused_attention_s,
)
from interlace.hardware.step_job import StepJob
from interlace.ir.graph import Kind

NORM_PASSES = 11
"""Tensors of tokens x hidden read or written outside of split matmuls: two norms (4), two residual
sums with bias and dropout (7)."""
NORM_PASSES_GATED = 10
"""The same without biases and dropout."""
NORM_PASSES_EAGER = 42
"""With operators one by one: a norm is cast, squared, averaged, scaled, cast, weighted (18)."""
NORM_EAGER = 18
"""Of that, one norm."""
LAYER_NORM_EAGER = 4
"""A LayerNorm, which is one kernel in 16 bits, with its residual read and written."""
SPLIT_PASSES_EAGER = 18
"""Queries and keys cast, turned as complex numbers, cast back, besides what is split."""
EAGER_KERNELS = 3
"""Kernels for one of a fused program, outside of matmuls."""
SPLIT_PASSES = 6
"""Of tokens x hidden / tensor ranks: queries, keys and values split, turned, joined."""
BACKWARD_PASSES = 1.5
"""Bytes of a backward over those of the forward."""
FORWARD_KERNELS = 16
"""On the device, in a program whose small operators are fused as Megatron's are."""
BACKWARD_KERNELS = 28
EXPERT_KERNELS = (35, 40)
"""More of them in a layer with experts, forward and backward, and three for each expert of a rank
in a backward: counted from the operators of `interlace.models`."""
RING_BYTES = (24, 32)
"""For each element of queries and each hop of a ring, forward and backward: results in float32,
masked, merged or added (`parallel.ring`)."""
HOST_CALLS_PER_KERNEL = 2.5
"""Operators that Python starts for each kernel: views, transposes and copies among them."""
LOGIT_BYTES_FORWARD = 20
"""For each logit: out of 16 bits, then largest, difference, exponential and sum in float32."""
LOGIT_BYTES_BACKWARD = 12


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass of one micro-batch."""

    compute_s: float
    tensor_s: float
    """Exchange between tensor ranks, which nothing hides."""

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.compute_s + self.tensor_s

    def __add__(self, other: "PassTime") -> "PassTime":
        return PassTime(self.compute_s + other.compute_s, self.tensor_s + other.tensor_s)

    def times(self, count: float) -> "PassTime":
        """So many of them."""
        return PassTime(self.compute_s * count, self.tensor_s * count)


def _linear_shapes(job: StepJob) -> tuple[tuple[int, int], ...]:
    """Columns and depth of the matmuls of a layer on one rank."""
    split = job.tensor
    wide = job.ffn * (2 if job.gated else 1)
    attention = (
        ((job.query_width + 2 * job.kv_width) // split, job.hidden),
        (job.hidden, job.query_width // split),
    )
    if job.experts is not None:
        return attention
    return (*attention, (wide // split, job.hidden), (job.hidden, job.ffn // split))


def _moved_bytes(job: StepJob) -> float:
    split = job.tensor if job.sequence_parallel else 1
    ffn = job.ffn if job.experts is None else job.experts.shared
    activation = (3 if job.gated else 2) * ffn / job.hidden
    norms = NORM_PASSES_GATED if job.gated else NORM_PASSES
    turned = SPLIT_PASSES
    if not job.fused_operators:
        norms, turned = NORM_PASSES_EAGER, SPLIT_PASSES_EAGER
        activation += 2 * ffn / job.hidden
        norms -= 2 * (NORM_EAGER - LAYER_NORM_EAGER) * job.layer_norms
        turned += NORM_EAGER * job.head_norms * (1 + job.kv_width / job.query_width)
    turned *= job.query_width / job.hidden
    passes = norms / split + (turned + activation) / job.tensor
    return 2.0 * job.tokens * job.hidden * passes


def attention_s(device: DeviceRates, job: StepJob, *, backward: bool) -> float:
    """Seconds of attention on a rank. Of ranks that share sequences by Ulysses each has some heads;
    around a ring each has its queries, and for each block of keys as much to do as for its own."""
    ring = job.ring and job.context > 1
    shape = {
        "batch": job.micro_batch,
        "heads": max(1, job.heads // job.tensor // (1 if ring else job.context)),
        "sequence": job.sequence // (job.context if ring else 1),
        "head_size": job.head_size,
        "backward": backward,
    }
    if job.attention == "unfused":
        return unfused_attention_s(device, **shape)
    one = fused_attention_s(device, kernel=job.attention, **shape)
    if not ring:
        return one
    if job.fused_operators:
        return job.context * one
    merged = float(RING_BYTES[backward]) * job.tokens * job.query_width / job.tensor
    return job.context * one + (job.context - 1) * moved_s(device, merged, 8)


def tensor_exchange_s(cluster: Cluster, job: StepJob) -> float:
    """Of one sum over tensor ranks; with sequence parallelism a gather and a scattered sum."""
    if job.tensor == 1:
        return 0.0
    place = axis_place(cluster, job.tensor, 1, job.ranks)
    size = 2.0 * job.tokens * job.hidden
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) if job.sequence_parallel else (Kind.ALL_REDUCE,)
    return sum(collective_time(cluster, kind, size, place).seconds for kind in kinds)


def layer_passes(cluster: Cluster, device: DeviceRates, job: StepJob) -> tuple[PassTime, PassTime]:
    """Forward and backward of one layer; the backward has what it computes again."""
    linear = [matmul_s(device, job.tokens, *shape) for shape in _linear_shapes(job)]
    slopes = [
        matmul_s(device, job.tokens, depth, columns) + matmul_s(device, columns, depth, job.tokens)
        for columns, depth in _linear_shapes(job)
    ]
    moved = _moved_bytes(job)
    more = 1 if job.fused_operators else EAGER_KERNELS
    attention = attention_s(device, job, backward=False)
    forward_s = sum(linear) + attention + moved_s(device, moved, more * (FORWARD_KERNELS - 5))
    backward_s = sum(slopes) + attention_s(device, job, backward=True)
    backward_s += moved_s(device, moved * BACKWARD_PASSES, more * (BACKWARD_KERNELS - 10))
    exchange_s = 2 * tensor_exchange_s(cluster, job)
    if job.micro_batches > 1 and job.sharding < 3:  # added to the sum of the micro-batches
        summed = job.summed_bytes * (job.shared_parameters + job.expert_parameters) / job.tensor
        backward_s += moved_s(device, summed, 4)
    kernels, kernels_back = FORWARD_KERNELS, BACKWARD_KERNELS
    if (experts := job.experts) is not None:
        parts = expert_parts(
            device, experts, tokens=job.tokens, hidden=job.hidden, tensor=job.tensor
        )
        forward_s += sum(parts[0].values())
        backward_s += sum(parts[1].values())
        kernels += EXPERT_KERNELS[0]
        kernels_back += EXPERT_KERNELS[1] + 3 * experts.held
    forward_s = launched_s(device, forward_s, kernels * HOST_CALLS_PER_KERNEL)
    backward_s = launched_s(device, backward_s, kernels_back * HOST_CALLS_PER_KERNEL)
    forward, backward = PassTime(forward_s, exchange_s), PassTime(backward_s, exchange_s)
    if job.recompute == "full":
        backward += forward
    if job.recompute == "alternate":
        backward += forward.times(0.5)
    if job.recompute == "attention":
        backward += PassTime(attention, 0.0)
    return forward, backward


def head_passes(cluster: Cluster, device: DeviceRates, job: StepJob) -> tuple[PassTime, PassTime]:
    """Forward and backward of the head and the loss; the embedding's gather is left out."""
    columns = -(-job.vocab // job.tensor)
    logits = float(job.tokens) * columns
    forward_s = matmul_s(device, job.tokens, columns, job.hidden)
    forward_s += moved_s(device, LOGIT_BYTES_FORWARD * logits, 5)
    backward_s = matmul_s(device, job.tokens, job.hidden, columns)
    backward_s += matmul_s(device, columns, job.hidden, job.tokens)
    backward_s += moved_s(device, LOGIT_BYTES_BACKWARD * logits, 3)
    exchange_s = tensor_exchange_s(cluster, job) / 2
    return PassTime(forward_s, exchange_s), PassTime(backward_s, exchange_s)
