"""A run file as a job that can be simulated from shapes: which layout it has, and what is refused.

Llama, GPT and mixtures of experts are known, with all axes of `[parallel]`. Stages of different
layout, merged sends of experts, collectives that are decomposed in the first and the last pass
alone, models of `transformers` and plain autograd are refused by name.
"""

from dataclasses import dataclass, replace
from typing import Literal

from interlace.config import DecomposeVariant, Recompute, RunConfig
from interlace.degrees import resolve_layout
from interlace.errors import InputError
from interlace.hardware.expert_job import ExpertJob
from interlace.hardware.step_job import StepJob
from interlace.model_config import expert_width_of, head_size_of
from interlace.rules import check
from interlace.schedules.finder import find, of_strands

BYTE_TOKENS = 256
"""Tokens of the tokenizer `bytes`."""
_RECOMPUTED = {"none": "none", "attention": "attention", "layer": "full"}
"""What a step model calls each way of `train.recompute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """How a job is split over ranks, and in which order it runs."""

    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    """Ranks that share each sequence."""
    context_method: Literal["ulysses", "ring"] = "ulysses"
    tensor: int = 1
    expert: int = 1
    """Ranks in a row, of those that see other tokens, that hold the experts between them."""
    pipeline: int = 1
    zero: Literal[1, 3] = 3
    reduce: Literal["step", "micro_batch"] = "step"
    schedule: str = "two_strand"
    """Of several stages a pipeline's; of one stage `one_strand` or `two_strand`."""
    micro_batch: int = 1
    """Sequences of a micro-batch on a rank."""
    micro_batches: int = 2
    recompute: Recompute = "none"
    tied_head: bool = False
    """Whether the head is the embedding, of which one rank then has one."""
    expert_load: float = 1.0
    """Rows of the fullest expert over the mean of all; 1 is balanced."""
    decompose: DecomposeVariant = "off"
    """How collectives of tensor ranks are cut under the matmuls next to them, and those of rows
    under their experts."""
    pieces: int = 0
    """As `overlap.pieces`; 0: the fastest."""

    @property
    def replicas(self) -> int:
        """Ranks, or groups of ranks that share sequences, that see other sequences."""
        return self.data_replicate * self.data_shard

    @property
    def ranks(self) -> int:
        """All of the job."""
        return self.replicas * self.context * self.tensor * self.pipeline

    @property
    def group(self) -> int:
        """Ranks of the axis `dp_shard` of weights, which has those that share sequences."""
        return self.data_shard * self.context

    @property
    def shards(self) -> int:
        """Into how many parts weights are cut. Ranks that only share sequences hold whole ones."""
        return self.group if self.data_shard > 1 else 1

    @property
    def expert_group(self) -> int:
        """Ranks of the axis `dp_shard` of experts."""
        return self.group // min(self.group, self.expert)

    @property
    def expert_replicas(self) -> int:
        """Ranks of the axis `dp_replicate` of experts."""
        return self.data_replicate * min(self.group, self.expert) // self.expert

    @property
    def expert_shards(self) -> int:
        """Into how many parts the experts of a rank are cut."""
        return max(1, self.shards // self.expert)

    @property
    def gathers_each(self) -> bool:
        """Whether weights are gathered in each pass."""
        return self.zero == 3 and self.data_shard > 1

    @property
    def text(self) -> str:
        """In one line, as tables have it."""
        parts = [
            f"{name} {size}"
            for name, size in (
                ("replicate", self.data_replicate),
                ("shard", self.data_shard),
                (self.context_method, self.context),
                ("tensor", self.tensor),
                ("expert", self.expert),
                ("pipeline", self.pipeline),
            )
            if size > 1
        ]
        if self.data_shard > 1:
            parts.append(f"zero {self.zero}")
        return ", ".join(parts) or "one rank"


def layout_of(config: RunConfig, ranks: int = 0, expert_load: float = 1.0) -> JobLayout:
    """The layout of a run on so many ranks; 0 for those that it asks for.

    Raises InputError for what cannot be simulated, or does not fit the ranks."""
    check(config)
    refuse_unknown(config)
    refuse_load(config, expert_load)
    parallel = config.parallel
    if ranks or parallel.data_shard != -1:
        config = resolve_layout(config, ranks or parallel.ranks)
        parallel = config.parallel
    else:
        raise InputError(
            "parallel.data_shard = -1 takes all ranks that are left, and their number is not given",
            hint="name a cluster of so many devices, as in --cluster h100x64",
        )
    staged = parallel.pipeline > 1
    schedule = find(config.pipeline.schedule) if staged else of_strands(int(config.strands))
    return JobLayout(
        data_replicate=parallel.data_replicate,
        data_shard=parallel.data_shard,
        context=parallel.context,
        context_method=parallel.context_method if parallel.context > 1 else "ulysses",
        tensor=parallel.tensor,
        expert=parallel.expert,
        pipeline=parallel.pipeline,
        zero=parallel.zero,
        reduce=parallel.reduce,
        schedule=schedule.name,
        micro_batch=config.train.micro_batch_size,
        micro_batches=config.train.micro_batches,
        recompute=config.train.recompute,
        tied_head=config.model.tied_head,
        expert_load=expert_load,
        decompose=config.overlap.decompose,
        pieces=config.overlap.pieces,
    )


def with_layout(config: RunConfig, layout: JobLayout, split_at: tuple[str, ...] = ()) -> RunConfig:
    """The run laid out so; of a pipeline whose chunks begin with these sub-modules."""
    staged = layout.pipeline > 1
    parallel = replace(
        config.parallel,
        data_replicate=layout.data_replicate,
        data_shard=layout.data_shard,
        context=layout.context,
        context_method=layout.context_method,
        tensor=layout.tensor,
        expert=layout.expert,
        pipeline=layout.pipeline,
        zero=layout.zero,
        reduce=layout.reduce,
    )
    train = replace(
        config.train,
        micro_batches=layout.micro_batches,
        micro_batch_size=layout.micro_batch,
        recompute=layout.recompute,
    )
    pipeline = (
        replace(config.pipeline, schedule=layout.schedule, split_at=split_at)
        if staged
        else type(config.pipeline)()
    )
    is_one = not staged and layout.schedule == of_strands(1).name
    strands: Literal["1", "2"] = "1" if is_one else "2"
    return replace(config, strands=strands, parallel=parallel, pipeline=pipeline, train=train)


def refuse_unknown(config: RunConfig) -> None:
    """Raise InputError for what times of shapes do not describe."""
    model, parallel = config.model, config.parallel
    gives_layers = model.source == "interlace" and model.architecture in ("llama", "gpt", "moe")
    hint = "plan it from its traced graphs: interlace plan, without --global-batch"
    for name, value, known in (
        ("model.source", model.source, model.source == "interlace"),
        ("model.architecture", model.architecture, gives_layers),
        ("parallel.expert", parallel.expert, parallel.expert == 1 or model.experts.count > 0),
        ("parallel.expert_sends", parallel.expert_sends, parallel.expert_sends == "each"),
        ("overlap.passes", config.overlap.passes, config.overlap.passes != "ends"),
        ("pipeline.stages", list(config.pipeline.stages), not config.pipeline.stages),
        ("plan.file", config.plan.file, not config.plan.file),
        ("strands", config.strands, config.strands != "eager"),
        ("train.recompute", config.train.recompute, config.train.recompute in _RECOMPUTED),
        ("train.dtype", config.train.dtype, config.train.dtype == "bfloat16"),
        ("train.reduce_dtype", config.train.reduce_dtype, config.train.reduce_dtype == "float32"),
    ):
        if not known:
            raise InputError(
                f"{name} = {value!r} is not known to the simulation from shapes",
                hint='set train.dtype to "bfloat16"' if name == "train.dtype" else hint,
            )


def refuse_load(config: RunConfig, expert_load: float) -> None:
    """Raise InputError for a load of experts that a model without them, or with fewer, cannot
    have."""
    experts = config.model.experts
    if experts.count:
        ExpertJob(count=experts.count, chosen=experts.chosen, ffn=1, load=expert_load)
    elif expert_load != 1:
        raise InputError(
            f"--expert-load {expert_load:g}, and the model has no experts",
            hint="leave --expert-load out",
        )


def vocabulary_rows(config: RunConfig, tensor: int) -> int:
    """Rows of the embedding. Raises InputError where only the tokenizer knows them."""
    rows = config.model.vocab_size
    if not rows:
        if config.data.tokenizer != "bytes":
            raise InputError(
                f"model.vocab_size = 0 takes that of data.tokenizer = {config.data.tokenizer!r}",
                hint="set model.vocab_size",
            )
        rows = -(-BYTE_TOKENS // tensor) * tensor
    return rows


def step_job(config: RunConfig, layout: JobLayout) -> StepJob:
    """The job in the words of `hardware.step_model`: operators run one by one, with PyTorch's own
    fused attention (FlashAttention 2), and gradients are summed in float32."""
    model = config.model
    experts = None
    if model.experts.count:
        experts = ExpertJob(
            count=model.experts.count,
            chosen=model.experts.chosen,
            ffn=expert_width_of(model),
            shared=model.experts.shared_width,
            ranks=layout.expert,
            load=layout.expert_load,
            capacity=model.experts.capacity_factor,
        )
    return StepJob(
        layers=model.layers,
        hidden=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn_width,
        vocab=vocabulary_rows(config, layout.tensor),
        sequence=config.data.sequence_length,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        gated=model.architecture in ("llama", "moe"),
        head_width=head_size_of(model),
        experts=experts,
        dense_layers=model.experts.dense_layers if experts else 0,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.replicas,
        context=layout.context,
        ring=layout.context_method == "ring",
        layer_norms=model.architecture == "moe" and model.norm == "layer",
        head_norms=model.query_key_norm,
        attention="flash2",
        fused_operators=False,
        overlap_gradients=layout.pipeline == 1,
    )
