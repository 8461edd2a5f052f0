"""RunConfig: everything that a training run is asked to do, as frozen dataclasses.

The docstring under each field is its help text on the command line and in the reference.
`interlace.rules` says which values can never work.
"""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from interlace.errors import InputError
from interlace.model_config import ModelConfig, Own

StrandsChoice = Literal["2", "1", "eager"]
SearchName = Literal["merge", "list", "segment_pairs"] | Own
Mode = Literal[
    "eager",
    "1",
    "2",
    "merge",
    "list",
    "segment_pairs",
    "inductor",
    "plain-1",
    "plain-2",
    "decomposed-1",
    "decomposed-2",
]
Dtype = Literal["float32", "bfloat16"]
DecomposeVariant = Literal["off", "auto", "ring", "direct", "bidirectional", "slicing"]
Passes = Literal["auto", "all", "ends"]
Recompute = Literal["none", "attention", "layer", "budget"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How ranks share the model. The product of all degrees is the number of ranks."""

    data_replicate: int = 1
    """Copies of the model (and of its shards) that each see other data; gradients are summed."""
    data_shard: int = 1
    """Ranks that share one copy of masters, optimizer state and gradients, and see other data;
    -1 takes all ranks that are left."""
    context: int = 1
    """Ranks that share each sequence."""
    tensor: int = 1
    """Ranks that share each layer (tensor + sequence parallel)."""
    expert: int = 1
    """Ranks that hold the experts of a mixture-of-experts layer between them: of those that see
    other tokens (`data_replicate`, `data_shard`, `context`), so many in a row. No factor of the
    number of ranks."""
    expert_sends: Literal["each", "merged"] = "each"
    """What travels to experts: a row for `each` expert of a token, or, `merged`, one for each rank
    that has experts of it, where results are weighted and added up before they travel back."""
    pipeline: int = 1
    """Stages into which the layers are dealt, each on ranks of its own (`[pipeline]`)."""
    context_method: Literal["ulysses", "ring"] = "ulysses"
    """`ulysses` exchanges sequence for heads around attention; `ring` sends keys and values around,
    with the sequence dealt out so that causal work is balanced."""
    zero: Literal[1, 3] = 3
    """What `data_shard` shards: 1 masters, gradients and optimizer state, with the weights gathered
    once a step; 3 the weights too, gathered for each forward and each backward."""
    reduce: Literal["step", "micro_batch"] = "step"
    """When gradients are summed over data-parallel ranks: once a step, which keeps whole gradients,
    or after each micro-batch, which keeps a shard (only with zero = 3)."""
    bucket_mib: float = 64.0
    """Largest data-parallel collective; a bucket never holds parameters of two layers."""

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage of the pipeline: all of them, where there is no pipeline."""
        shard = max(1, self.data_shard)
        return self.data_replicate * shard * self.context * self.tensor

    @property
    def ranks(self) -> int:
        """Ranks that the layout needs; a `data_shard` of -1 counts as 1."""
        return self.stage_ranks * self.pipeline


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """In which order the stages of `parallel.pipeline` run micro-batches, and where they begin."""

    schedule: str = "one_f_one_b"
    """A schedule of several ranks, as `interlace schedule` lists and compares them, or one of your
    own as `module:function`; options stand behind it, as in `interleaved(chunks=4)`."""
    split_at: tuple[str, ...] = ()
    """The sub-modules with which chunks begin, but the first, such as `layers.2`; empty leaves that
    to the file of a searched schedule, or else gives chunks equal shares of the arithmetic."""
    stages: tuple[str, ...] = ()
    """The layout of each stage where they differ, as `["tensor=2", "data_replicate=2"]` or
    `[{tensor = 2}, {data_replicate = 2}]`; the rest is that of `parallel`. Empty lays all out as
    `parallel` says."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from."""

    path: str = "stdlib"
    """`stdlib` (Python's own standard library), or a file, a directory or a glob: text, `.jsonl`,
    or token ids in `.npy` or `.bin`."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer.json (extra `tokenizers`)."""
    field: str = "text"
    """Field of each line of a `.jsonl` file that holds the text."""
    sequence_length: int = 256
    """Tokens per sample."""
    held_out: float = 0.02
    """Fraction of the text kept for evaluation, never trained on."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors are not decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 100
    """Optimizer steps."""
    micro_batches: int = 8
    """Micro-batches per step; their gradients are accumulated."""
    micro_batch_size: int = 2
    """Sequences per micro-batch."""
    seed: int = 1
    """Seed of initial weights and of the order of the data."""
    dtype: Dtype = "float32"
    """Compute type; master weights and gradient sums are float32 always."""
    deterministic: bool = True
    """Refuse operators that may give different bits from run to run."""
    evaluate_every: int = 50
    """Steps between evaluations on held-out text; 0 evaluates at the end only."""
    evaluate_batches: int = 8
    """Micro-batches per evaluation."""
    threads: int = 1
    """CPU threads per rank."""
    recompute: Recompute = "none"
    """What backward computes again instead of keeping: nothing, the inside of `attention`, each
    `layer` from its input, or what fits `recompute_mib` best (PyTorch's min-cut partitioner)."""
    recompute_mib: float = 0.0
    """With `budget`: memory for the values that one micro-batch keeps for its backward."""
    reduce_dtype: Dtype = "float32"
    """Type in which data-parallel gradients are summed."""
    cuda_graph: bool = False
    """On a GPU: capture the kernels of a step in a CUDA graph, so that the device does not wait for
    the host. Steps with dropout or experts, and those of a pipeline, cannot be captured."""
    renew_plan_at: float = 0.0
    """Measure and plan again, between two steps, when the load of the busiest expert over the mean
    has moved by more than this share since the plan was made, 0.3 say; 0 for never."""


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """Overlap inside one micro-batch: collectives cut into sends under partial matmuls."""

    decompose: DecomposeVariant = "off"
    """`auto` decides for each collective by measured or computed costs, and may leave it whole;
    `ring`, `direct` and `bidirectional` are CommFuse's forms, used wherever they fit; `slicing`
    cuts the rows into `pieces` collectives, as Megatron and MindSpeed do. Exchanges of experts are
    cut by groups of experts with each of them."""
    pieces: int = 0
    """Slices per rank (with `slicing`: slices in all; of experts groups); 0 lets costs decide."""
    passes: Passes = "auto"
    """Which passes of a step run decomposed: `all`, or its `ends`, the first forward and the last
    backward, which with two strands have no other strand beside them. `auto`: with two strands and
    `decompose = "auto"` by predicted times, else all."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the order of operators is found."""

    search: SearchName = "merge"
    """Search that makes the plan: `merge` merges the strands by dynamic programming and polishes
    the result, `list` is plain list scheduling, `segment_pairs` pairs segments between barriers; or
    a function of your own (docs/extending.md)."""
    memory_mib: float = 0.0
    """Largest peak of values made by the graphs of one phase, per rank; 0 for no bound."""
    extra_memory: float = 0.03
    """Two strands take no more memory than one, plus this share of all that one needs (weights,
    gradients, optimizer state, values); a larger share may give a shorter step."""
    extra_memory_mib: float = 64.0
    """Beyond one strand, so much is always allowed: a small model needs no thrift."""
    file: str = ""
    """Read the plan from this file instead of searching."""
    trial_steps: int = 3
    """Steps of two strands and of one strand in turn at the start of training; if two strands are
    slower, all ranks go on with one. 0 trusts the plan."""
    profile_repeats: int = 5
    """Measurements per operator at start-up."""
    cluster: str = ""
    """Compute the times of operators for this cluster, a name or a file, and measure nothing at
    start-up: it is sooner over, and the plan is as good as the file."""
    cache: bool = True
    """Keep measured times on disk, by graph and machine, and layouts that were searched."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Run the same first steps under each way of running, and compare."""

    steps: int = 0
    """Steps per way; 0 compares nothing. The weights are put back afterwards."""
    modes: tuple[Mode, ...] = ("eager", "1", "2")
    """Ways to compare: as in `strands`, or two strands planned by a search of that name, or by
    `inductor`, PyTorch's own overlap scheduler; `plain-1` and `plain-2` are one and two strands
    without `overlap.decompose`, `decomposed-1` and `decomposed-2` with it in all passes."""
    memory: bool = False
    """Also measure the peak memory of one step of each way."""
    check: bool = False
    """Before training hold one step of `strands` against eager PyTorch: losses, every gradient by
    name, times; what is wrong ends the run. `train --check` sets it."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """A slower link than the real one, emulated in user space. Results are labelled so."""

    rate: str = ""
    """Bandwidth such as `250mbit` or `1gbit`; empty uses the real link as it is."""
    latency_us: float = 50.0
    """Time until the first byte arrives."""

    @property
    def bits_per_s(self) -> int | None:
        """`rate` as a number; None for the real link. Raises InputError for what is no rate."""
        return parse_rate(self.rate, "link.rate") if self.rate else None


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is written where."""

    directory: str = "outputs/run"
    """Folder of this run; it must not hold another run's metrics. One run at a time may use it."""
    overwrite: bool = False
    """Replace an earlier run in the same folder."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra `tensorboard`)."""
    record_every: int = 10
    """Record one step in so many, operator by operator; 0 records none. Recording adds about 5 us
    per operator to that step; the last recorded step is drawn in the report."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of training is saved, and where it is taken from."""

    every: int = 0
    """Steps between checkpoints; 0 saves none."""
    directory: str = ""
    """Where they are kept; empty is `checkpoints` in the output directory."""
    keep: int = 3
    """Newest checkpoints that are kept; 0 keeps all."""
    background: bool = True
    """Write while training goes on."""
    resume: str = ""
    """`latest` goes on from the newest good checkpoint in the directory, or starts afresh without
    one; otherwise the folder of one checkpoint."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Facts about the machine that cannot be read from it."""

    peak_tflops: float = 0.0
    """Peak of one rank for MFU; 0 takes the known GPU's value, or shows no MFU."""
    memory_gb_per_s: float = 0.0
    """Memory bandwidth of one rank, for plans made without measuring; 0 measures this machine."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a rank that says nothing is taken for dead, from the start of its process to its end."""

    enabled: bool = True
    """Whether ranks watch each other."""
    heartbeat_s: float = 0.5
    """Time between heartbeats."""
    dead_after_s: float = 2.5
    """Silence after which a rank is taken for dead; on this machine only if it does nothing."""
    busy_s: float = 60.0
    """The same for a rank on this machine that uses its processor meanwhile."""
    start_s: float = 120.0
    """Time from the first rank to the last for all to join, and as much to build the group."""
    end_s: float = 30.0
    """Time to take down the group when the work is done, and as much to end the process."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run; a TOML file has one table per field."""

    strands: StrandsChoice = "2"
    """`2` interleaves two micro-batches, `1` runs the same graphs one after the other, `eager`
    runs plain PyTorch autograd."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, as in the TOML file."""
        return asdict(self)

    @property
    def checkpoints(self) -> Path:
        """Where the run keeps its checkpoints."""
        return Path(self.checkpoint.directory or Path(self.output.directory) / "checkpoints")

    @property
    def modes(self) -> frozenset[Mode]:
        """Every way of running a step that this run needs."""
        trial: tuple[Mode, ...] = ("1",) if self.tries_fallback else ()
        compared = self.compare.modes if self.compare.steps else ()
        checked: tuple[Mode, ...] = ("eager",) if self.compare.check else ()
        return frozenset({self.strands, *compared, *checked, *trial})

    @property
    def tries_fallback(self) -> bool:
        """Whether the plan has to prove itself: two strands, and steps enough to tell. A pipeline
        runs the schedule that it was given."""
        steps = self.plan.trial_steps
        return (
            self.parallel.pipeline == 1
            and self.strands == "2"
            and steps > 0
            and self.train.steps >= 4 * (steps + 1)
        )


def parse_rate(text: str, where: str) -> int:
    """Bits per second of `250mbit`, `1gbit`, `2.5gbit`, `64kbit`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise InputError(
            f"{where} = {text!r} is not a link rate",
            hint="write it as in 250mbit, 1gbit or 2.5gbit",
        )
    return int(float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]])
