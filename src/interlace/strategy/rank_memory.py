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

A layer with experts is that of a Llama without its feed-forward, and has for each of a token's
experts 4 + 8 ffn / t, and cut in two 4 + 6 ffn / t. Those are rows, of the rank with the fullest
expert. Queries, if they are not as wide as the model, count 4 of the
20, and norms of heads 8 for queries and for keys. LayerNorms keep 12 less (8 / t with tensor
ranks). Ulysses keeps results twice, 2 / t more, and repeated heads of keys.

Logits take 12 bytes. What the allocator
wastes, the CUDA context and NCCL's buffers (1 to 5 GB together) are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from interlace.hardware.step_job import StepJob
from interlace.strategy.context_operators import key_copies
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.schedule_facts import interleaves

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
_PER_QUERY = 4.0
"""Of those 20 and 6, what is as wide as queries: they, and what attention makes of them."""
_PER_HEAD_NORM = 8.0
_LAYER_NORMS = (12.0, 8.0, 10.0)
"""What two LayerNorms keep less than two RMSNorms: without tensor ranks, with them, and cut."""
_PER_ROW = 4.0
_PER_ROW_FFN = (8.0, 6.0)
_ROUTER = (16.0, 6.0)
"""Bytes for each token and expert."""
_LATE_EXPERTS = -2.0
_LATE_CONTEXT = -4.0
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


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Parameters of one rank."""

    dense: float
    """Which all ranks that see other tokens share."""
    experts: float = 0.0
    """Which those share that hold the same experts."""

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.experts


def kept_bytes(job: StepJob, layout: JobLayout, *, whole: bool = False) -> float:
    """Of one layer and micro-batch until its backward; `whole`: as if nothing was computed
    again."""
    t, tokens = job.tensor, float(job.tokens) * job.hidden
    if layout.recompute == "layer" and not whole:
        return tokens * (2.0 if t == 1 else 4.0 / t)
    split = _OTHER[job.gated] + _PER_KV * _kv_widths(job)
    split += _PER_QUERY * (job.query_width / job.hidden - 1)
    if layout.context > 1 and layout.context_method == "ulysses":
        split += _ATTENTION_OUTPUT * job.query_width / job.hidden
    if job.head_norms:
        split += _PER_HEAD_NORM * (job.query_width / job.hidden + _kv_widths(job))
    ring = layout.context > 1 and layout.context_method == "ring"
    if layout.recompute == "attention" and not whole and not ring:
        split -= _ATTENTION_OUTPUT * job.query_width / job.hidden
    if job.layer_norms:
        split -= _LAYER_NORMS[t > 1]
    if job.experts is None:
        split += _PER_FFN[job.gated] * job.ffn / job.hidden
    else:
        split += _PER_FFN[True] * job.experts.shared / job.hidden
    return tokens * (_GATHERED[job.gated] + split / t) + _row_bytes(job, late=False)


def layers_bytes(
    of: Callable[[StepJob, JobLayout], float],
    job: StepJob,
    layout: JobLayout,
    layers: int,
    dense: int,
) -> float:
    """Of so many layers what `of` (`kept_bytes`, `late_bytes`) says of one; `dense` of them have no
    experts."""
    found = of(job, layout) * (layers - dense)
    return found + (of(job.dense, layout) * dense if dense else 0.0)


def late_bytes(job: StepJob, layout: JobLayout) -> float:
    """Of one layer and micro-batch from its gradients of inputs to those of its weights."""
    t, tokens = job.tensor, float(job.tokens) * job.hidden
    gathered = _LATE_GATHERED[job.gated]
    split = _LATE_OTHER[job.gated] + _LATE_PER_KV * _kv_widths(job)
    split += _PER_QUERY * (job.query_width / job.hidden - 1)
    if job.head_norms:
        split += _PER_HEAD_NORM * (job.query_width / job.hidden + _kv_widths(job))
    if job.layer_norms:
        split -= _LAYER_NORMS[0 if t == 1 else 2]
    if layout.context > 1:
        split += _LATE_CONTEXT
    if job.experts is None:
        split += _LATE_PER_FFN[job.gated] * job.ffn / job.hidden
        split += _LATE_AGAIN * (layout.recompute == "layer")
    else:
        gathered += _LATE_EXPERTS
        if job.experts.shared:
            split += _LATE_PER_FFN[True] * job.experts.shared / job.hidden - _LATE_EXPERTS
    return tokens * (gathered + split / t) + _row_bytes(job, late=True)


def _row_bytes(job: StepJob, *, late: bool) -> float:
    """What a layer keeps of rows of experts, and of their choice."""
    if (experts := job.experts) is None:
        return 0.0
    inner = _PER_ROW_FFN[late] * experts.ffn / job.tensor
    rows = float(job.tokens) * experts.chosen * experts.fullest
    return rows * (_PER_ROW * job.hidden + inner) + _ROUTER[late] * job.tokens * experts.count


def rank_parameters(
    job: StepJob, layout: JobLayout, layers: int, *, first: bool, last: bool, dense: int = 0
) -> HeldParameters:
    """Parameters of a rank with so many layers, `dense` of them without experts, the embedding if
    it has the first chunk, the head if it has the last."""
    tables = int(first or last) if layout.tied_head else first + last
    ends = float(job.vocab * job.hidden) * tables
    shared = (layers - dense) * job.shared_parameters
    shared += dense * job.dense.shared_parameters if dense else 0
    return HeldParameters(
        (shared + ends) / job.tensor,
        (layers - dense) * job.expert_parameters / job.tensor,
    )


def rank_memory(
    job: StepJob, layout: JobLayout, parameters: HeldParameters, kept: float, *, last: bool
) -> MemoryParts:
    """Memory of a rank with so many parameters, whose forwards keep `kept` bytes at most."""
    computing = owned = own_copy = summed = parts = 0.0
    gathered = 2 * 2 * job.shared_parameters / job.tensor if layout.gathers_each else 0.0
    if layout.gathers_each and layout.expert_shards > 1:
        gathered += 2 * 2 * job.expert_parameters / job.tensor
    for own, shards in (
        (parameters.dense, layout.shards),
        (parameters.experts, layout.expert_shards),
    ):
        share = own / shards
        owned += share
        computing += 2 * share if layout.gathers_each else 2 * own
        if shards > 1 and layout.pipeline == 1:
            # With ZeRO-1 on one stage, the 16-bit weights have shards that are gathered once a
            # step.
            own_copy += 2 * share if layout.zero == 1 else 0.0
            parts += share
        summed += own if layout.reduce == "step" or shards == 1 else 0.0
    working = _WORKING * job.tokens * job.hidden / job.tensor
    if layout.recompute == "layer":
        kinds = (job, job.dense) if job.dense_layers else (job,)
        working += max(kept_bytes(each, layout, whole=True) for each in kinds)
    logits = LOGIT_BYTES * job.tokens * job.vocab / job.tensor if last else 0.0
    return MemoryParts(
        weights=computing + own_copy,
        gathered=gathered,
        masters=4 * owned,
        gradients=4 * (summed + parts),
        optimizer=8 * owned,
        activations=kept * _both_strands(layout),
        working=max(working, logits),
    )


def _both_strands(layout: JobLayout) -> float:
    """Stages of a pipeline count what each strand keeps."""
    return TWO_STRANDS if layout.pipeline == 1 and interleaves(layout) else 1.0


def _kv_widths(job: StepJob) -> float:
    """Keys, or values, of all tensor ranks in widths; each rank has one head at least, and as many
    as Ulysses makes of them."""
    return key_copies(job) * max(job.kv_width, job.tensor * job.head_size) / job.hidden
