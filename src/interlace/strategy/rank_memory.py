"""Peak memory of a rank of the trainer, by what holds it, from shapes.

What is there all the time is counted as the trainer lays it out: weights in 16 bits, float32
masters, float32 sums of gradients, Adam's two moments, each whole or shared out. What a layer keeps
for its backward was counted by `interlace plan` on traced graphs (in bytes per token and unit of
width; heads of keys and values, and the feed-forward, in widths; t tensor ranks):

    Llama    4 + (20 + 4 kv + 8 ffn) / t       GPT    6 + (6 + 4 kv + 4 ffn) / t

of which the first number is what tensor ranks keep gathered. `recompute = "attention"` keeps 2 / t
less, `layer` 4 / t in all (2 without tensor ranks). A backward that was cut in two keeps for its
gradients of weights (8 / t more with `recompute = "layer"`, which has computed a layer again)

    Llama    8 + (22 + 6 kv + 6 ffn) / t       GPT    10 + (4 + 6 kv + 4 ffn) / t

Logits take 12 bytes. What the allocator
wastes, the CUDA context and NCCL's buffers (1 to 5 GB together) are not counted.
"""

from dataclasses import dataclass

from interlace.hardware.step_job import StepJob
from interlace.strategy.job_layout import JobLayout

_GATHERED = {True: 4.0, False: 6.0}
"""By whether the model is a Llama."""
_OTHER = {True: 20.0, False: 6.0}
_PER_KV = 4.0
_PER_FFN = {True: 8.0, False: 4.0}
_ATTENTION_OUTPUT = 2.0
_LATE_GATHERED = {True: 8.0, False: 10.0}
_LATE_OTHER = {True: 22.0, False: 4.0}
_LATE_PER_KV = 6.0
_LATE_PER_FFN = {True: 6.0, False: 4.0}
_LATE_AGAIN = 8.0
_WORKING = 16.0
"""Values of a layer that are gone when it ends."""
LOGIT_BYTES = 12.0
TWO_STRANDS = 1.03
"""Values of two strands over those of one: `plan.extra_memory` allows no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at its peak."""

    weights: float
    gathered: float
    """Weights of two layers that ZeRO-3 gathered."""
    masters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    """Values inside of one layer, and logits."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name, for tables."""
        return {name: getattr(self, name) for name in self.__slots__}


def kept_bytes(job: StepJob, layout: JobLayout, *, whole: bool = False) -> float:
    """Of one layer and micro-batch until its backward; `whole`: as if nothing was computed
    again."""
    t, tokens = job.tensor, float(job.tokens) * job.hidden
    if layout.recompute == "layer" and not whole:
        return tokens * (2.0 if t == 1 else 4.0 / t)
    split = (
        _OTHER[job.gated] + _PER_KV * _kv_widths(job) + _PER_FFN[job.gated] * job.ffn / job.hidden
    )
    if layout.recompute == "attention" and not whole:
        split -= _ATTENTION_OUTPUT
    return tokens * (_GATHERED[job.gated] + split / t)


def late_bytes(job: StepJob, layout: JobLayout) -> float:
    """Of one layer and micro-batch from its gradients of inputs to those of its weights."""
    t, tokens = job.tensor, float(job.tokens) * job.hidden
    split = _LATE_OTHER[job.gated] + _LATE_PER_KV * _kv_widths(job)
    split += _LATE_PER_FFN[job.gated] * job.ffn / job.hidden
    if layout.recompute == "layer":
        split += _LATE_AGAIN
    return tokens * (_LATE_GATHERED[job.gated] + split / t)


def rank_parameters(
    job: StepJob, layout: JobLayout, layers: int, *, first: bool, last: bool
) -> float:
    """Parameters of a rank with so many layers, the embedding if it has the first chunk, the head
    if it has the last."""
    tables = int(first or last) if layout.tied_head else first + last
    ends = float(job.vocab * job.hidden) * tables
    return (layers * job.layer_parameters + ends) / job.tensor


def rank_memory(
    job: StepJob, layout: JobLayout, parameters: float, kept: float, *, last: bool
) -> MemoryParts:
    """Memory of a rank with so many parameters, whose forwards keep `kept` bytes at most."""
    shards = layout.data_shard
    owned = parameters / shards
    computing = 2 * owned if layout.gathers_each else 2 * parameters
    # With ZeRO-1 on one stage, the 16-bit weights have shards that are gathered once a step.
    own_copy = 2 * owned if shards > 1 and layout.zero == 1 and layout.pipeline == 1 else 0.0
    summed = parameters if layout.reduce == "step" else 0.0
    parts = owned if shards > 1 and layout.pipeline == 1 else 0.0
    working = _WORKING * job.tokens * job.hidden / job.tensor
    if layout.recompute == "layer":
        working += kept_bytes(job, layout, whole=True)
    logits = LOGIT_BYTES * job.tokens * job.vocab / job.tensor if last else 0.0
    return MemoryParts(
        weights=computing + own_copy,
        gathered=2 * 2 * job.layer_parameters / job.tensor if layout.gathers_each else 0.0,
        masters=4 * owned,
        gradients=4 * (summed + parts),
        optimizer=8 * owned,
        activations=kept * (TWO_STRANDS if layout.schedule == "two_strand" else 1.0),
        working=max(working, logits),
    )


def _kv_widths(job: StepJob) -> float:
    """Keys, or values, of all tensor ranks in widths; each rank has one head at least."""
    return max(job.kv_width, job.tensor * job.head_size) / job.hidden
