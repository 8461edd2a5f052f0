"""A training job of a GPT, a Llama or one with experts as numbers, and what they count up to.

Torch-free.

Formulas of parameters and multiplications as in Narayanan et al. (SC 2021) and Korthikanti et al.
(arXiv 2205.05198), for grouped heads and gated feed-forwards as well; of experts those count that a
token meets. Experts and ranks that share sequences are known to `layer_times` and the strategies
that build on it, not to `step_model` and `step_memory`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from interlace.errors import InputError
from interlace.hardware.device_rates import AttentionKind
from interlace.hardware.expert_job import ExpertJob

FUSED_SUM_BYTES = 2.0
"""`StepJob.summed_bytes` of a matmul that adds to a sum in 16 bits: what was there is read, and
what is written is written instead of a gradient of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """One step: the model, its layout and what the program does. Counts are of the whole job."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    micro_batch: int
    """Sequences of one micro-batch of one replica."""
    micro_batches: int
    """Micro-batches of one replica in a step."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    gated: bool = False
    """Three feed-forward matrices (SwiGLU) and no biases or dropout, as in Llama."""
    head_width: int = 0
    """Width of one head; 0: `hidden / heads`."""
    layer_norms: bool = False
    """LayerNorms in a gated model, which has RMSNorms otherwise."""
    head_norms: bool = False
    """RMSNorms of each head of queries and keys."""
    experts: ExpertJob | None = None
    """In place of the feed-forward of each layer but the first `dense_layers`."""
    dense_layers: int = 0
    """Of a model with experts, the first layers that have a feed-forward of `ffn` instead."""
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    """Ranks that share each sequence."""
    ring: bool = False
    """They send keys and values around; otherwise they trade sequence for heads (Ulysses)."""
    chunks: int = 1
    """Chunks of layers on each pipeline rank (interleaved 1F1B)."""
    end_layers_fewer: int = 0
    """So many layers fewer in the first and in the last stage than in the others."""
    recompute: Literal["none", "attention", "alternate", "full"] = "none"
    """`attention`: its core; `alternate`: every other matmul or layer; `full`: every layer."""
    attention: AttentionKind = "newest"
    """Which attention the program has; see `device_rates`."""
    fused_operators: bool = True
    """Norms, rotations, activations and the loss are one kernel each; otherwise PyTorch's operators
    one after the other, in float32 where Llama's are."""
    sequence_parallel: bool = True
    """Tensor ranks split norms and residuals along the sequence."""
    sharding: Literal[0, 1, 2, 3] = 0
    """What replicas share out: 1 optimizer state, 2 gradients too, 3 weights too (ZeRO)."""
    gradient_bytes: int = 4
    """Of a gradient kept for the sum of micro-batches, and on the wire."""
    summed_bytes: float = 6.0
    """Read and written for each parameter to add a micro-batch's gradient to the sum: read, read
    and write in 16 bits; or read and write in float32 inside the matmul, which then writes no 16
    bits."""
    overlap_gradients: bool = False
    """The sum over replicas runs under the last backward; always so with `sharding = 3`."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence", "micro_batch"):
            self._at_least_one(name)
        for name in ("micro_batches", "tensor", "pipeline", "data", "context", "chunks"):
            self._at_least_one(name)
        if self.hidden % self.heads and not self.head_width:
            raise InputError(
                f"hidden = {self.hidden} does not split into {self.heads} heads",
                hint="hidden is a multiple of heads",
            )
        if self.layers + 2 * self.end_layers_fewer < self.pipeline * self.chunks:
            raise InputError(
                f"{self.layers} layers do not fill {self.pipeline} stages of {self.chunks} chunks",
                hint="give each chunk a layer",
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise InputError("chunks without a pipeline", hint="set chunks = 1 or pipeline > 1")

    def _at_least_one(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise InputError(f"{name} = {getattr(self, name)}", hint=f"set {name} to 1 or more")

    @property
    def ranks(self) -> int:
        """Devices of the job."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def tokens(self) -> int:
        """Of one micro-batch, on a rank and those that share its layers."""
        return self.micro_batch * self.sequence // self.context

    @property
    def step_tokens(self) -> int:
        """Of one step."""
        return self.micro_batch * self.sequence * self.micro_batches * self.data

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_width or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of queries."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Width of keys, or of values."""
        return (self.kv_heads or self.heads) * self.head_size

    @property
    def layer_parameters(self) -> int:
        """Of one layer, all ranks that share it."""
        return self.shared_parameters + self.expert_parameters * self._expert_ranks

    @property
    def shared_parameters(self) -> int:
        """Of one layer without its experts, all tensor ranks."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width) + 4 * self.hidden
        if self.experts is not None:
            return attention + self.experts.whole_parameters(self.hidden)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def expert_parameters(self) -> int:
        """Of the experts of one layer that a rank and its tensor ranks hold."""
        if self.experts is None:
            return 0
        return self.experts.parameters(self.hidden) // self.experts.ranks

    @property
    def active_parameters(self) -> int:
        """Of one layer, those that are multiplied with a token."""
        norms = 4 * self.hidden
        if self.experts is None:
            return self.layer_parameters - norms
        attention = self.shared_parameters - self.experts.whole_parameters(self.hidden) - norms
        return attention + self.experts.active_parameters(self.hidden)

    @property
    def dense(self) -> "StepJob":
        """The same with a feed-forward in every layer."""
        return replace(self, experts=None, dense_layers=0)

    @property
    def parameters(self) -> int:
        """Of the model, a tied embedding counted once; models that are gated have two of them."""
        embeddings = self.vocab * self.hidden * (2 if self.gated else 1)
        routed, dense = self.layers - self.dense_layers, self.dense_layers
        layers = routed * self.layer_parameters
        return layers + (dense * self.dense.layer_parameters if dense else 0) + embeddings

    @property
    def multiplied_parameters(self) -> int:
        """Of all layers, those that are multiplied with a token."""
        routed, dense = self.layers - self.dense_layers, self.dense_layers
        layers = routed * self.active_parameters
        return layers + (dense * self.dense.active_parameters if dense else 0)

    @property
    def model_flops(self) -> float:
        """Of one step without what is computed again; attention as a full square."""
        per_token = 6.0 * (self.multiplied_parameters + self.vocab * self.hidden)
        per_token += 12.0 * self.layers * self.query_width * self.sequence
        return per_token * self.step_tokens

    @property
    def _expert_ranks(self) -> int:
        return self.experts.ranks if self.experts is not None else 1

    def layers_of_stages(self) -> tuple[float, ...]:
        """Layers of each pipeline rank; a mean where they do not divide."""
        if self.pipeline == 1:
            return (float(self.layers),)
        inner = (self.layers + 2 * self.end_layers_fewer) / self.pipeline
        ends = inner - self.end_layers_fewer
        return (ends, *[inner] * (self.pipeline - 2), ends)

    def stage_parameters(self, stage: int) -> float:
        """Parameters of one rank of a stage, with the embedding in the first and the last."""
        ends = (stage == 0) + (stage == self.pipeline - 1)
        if self.pipeline == 1 and not self.gated:
            ends = 1
        embedding = self.vocab * self.hidden * ends
        layers = self.layers_of_stages()[stage]
        return (layers * self.layer_parameters + embedding) / self.tensor
