"""RunConfig: everything that a training run is asked to do, as frozen dataclasses.

The docstring under each field is its help text on the command line and in the reference.
`check` holds the rules that need no torch and no data; it raises InputError with the field, the
value and what to set.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from interlace.errors import InputError

Strands = Literal["2", "1", "eager"]
Search = Literal["exact", "list", "paper"]
Mode = Literal["eager", "1", "2", "exact", "list", "paper", "inductor"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model."""

    architecture: Literal["llama"] = "llama"
    """Which model of `interlace.models` to build."""
    layers: int = 4
    """Number of transformer blocks."""
    width: int = 512
    """Size of the residual stream."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 8
    """Key and value heads (grouped-query attention when fewer than `heads`)."""
    ffn_width: int = 1408
    """Inner size of the feed-forward layer."""
    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size."""
    tied_head: bool = False
    """Whether the output head shares the embedding's weight."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How ranks share the model."""

    tensor: int = 1
    """Ranks that share each layer (tensor + sequence parallel); must be the world size."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from."""

    path: str = "stdlib"
    """`stdlib` (Python's own standard library), or a file, a directory or a glob."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer.json (extra `tokenizers`)."""
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


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the order of operators is found."""

    search: Search = "exact"
    """Search that makes the plan: `exact` merges the strands by dynamic programming and polishes
    the result, `list` is plain list scheduling, `paper` pairs segments between barriers."""
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
    cache: bool = True
    """Keep measured times on disk, by graph and machine."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Run the same first steps under each way of running, and compare."""

    steps: int = 0
    """Steps per way; 0 compares nothing. The weights are put back afterwards."""
    modes: tuple[Mode, ...] = ("eager", "1", "2")
    """Ways to compare: as in `strands`, or two strands planned by a search of that name, or by
    `inductor`, PyTorch's own overlap scheduler."""
    memory: bool = False
    """Also measure the peak memory of one step of each way."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """A slower link than the real one, emulated in user space. Results are labelled so."""

    rate: str = ""
    """Bandwidth such as `250mbit` or `1gbit`; empty uses the real link as it is."""
    latency_us: float = 50.0
    """Time until the first byte arrives."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is written where."""

    directory: str = "outputs/run"
    """Folder of this run; it must not hold another run's metrics."""
    overwrite: bool = False
    """Replace an earlier run in the same folder."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra `tensorboard`)."""
    record_every: int = 10
    """Record one step in so many, operator by operator; 0 records none. Recording adds about 5 us
    per operator to that step; the last recorded step is drawn in the report."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Facts about the machine that cannot be read from it."""

    peak_tflops: float = 0.0
    """Peak of one rank for MFU; 0 takes the known GPU's value, or shows no MFU."""
    memory_gb_per_s: float = 0.0
    """Memory bandwidth of one rank, for plans made without measuring; 0 measures this machine."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a silent rank is taken for dead."""

    enabled: bool = True
    """Whether ranks watch each other."""
    heartbeat_s: float = 0.5
    """Time between heartbeats."""
    dead_after_s: float = 3.0
    """Silence after which a rank is taken for dead."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run; a TOML file has one table per field."""

    strands: Strands = "2"
    """`2` interleaves two micro-batches, `1` runs the same graphs one after the other, `eager`
    runs plain PyTorch autograd."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, as in the TOML file."""
        return asdict(self)


def parse_rate(text: str, where: str) -> int:
    """Bits per second of `250mbit`, `1gbit`, `2.5gbit`, `64kbit`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise InputError(
            f"{where} = {text!r} is not a link rate",
            hint="write it as in 250mbit, 1gbit or 2.5gbit",
        )
    return int(float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]])


_POSITIVE = (
    "model.layers",
    "model.width",
    "model.heads",
    "model.kv_heads",
    "model.ffn_width",
    "parallel.tensor",
    "data.sequence_length",
    "optimizer.learning_rate",
    "train.steps",
    "train.micro_batches",
    "train.micro_batch_size",
    "train.evaluate_batches",
    "train.threads",
    "plan.profile_repeats",
    "watchdog.heartbeat_s",
    "model.rope_theta",
    "model.norm_eps",
    "optimizer.epsilon",
)
_NOT_NEGATIVE = (
    "model.vocab_size",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "train.evaluate_every",
    "compare.steps",
    "plan.trial_steps",
    "plan.memory_mib",
    "plan.extra_memory",
    "plan.extra_memory_mib",
    "link.latency_us",
    "output.record_every",
    "hardware.peak_tflops",
    "hardware.memory_gb_per_s",
    "train.seed",
)


def _value(config: RunConfig, name: str) -> Any:
    table, key = name.split(".")
    return getattr(getattr(config, table), key)


def check(config: RunConfig) -> None:
    """Raise InputError for values that can never work, whatever the machine."""
    for name in _POSITIVE:
        if not 0 < _value(config, name) < float("inf"):
            raise InputError(
                f"{name} = {_value(config, name)!r} must be positive", hint=f"set {name} above 0"
            )
    for name in _NOT_NEGATIVE:
        if not 0 <= _value(config, name) < float("inf"):
            raise InputError(
                f"{name} = {_value(config, name)!r} must not be negative",
                hint=f"set {name} to 0 or more",
            )
    for name in ("data.held_out", "optimizer.beta1", "optimizer.beta2"):
        if not 0 < _value(config, name) < 1:
            raise InputError(
                f"{name} = {_value(config, name)!r} must lie between 0 and 1",
                hint=f"set {name} above 0 and below 1",
            )
    if not 0 <= config.optimizer.final_fraction <= 1:
        raise InputError(
            f"optimizer.final_fraction = {config.optimizer.final_fraction!r} must lie in 0..1",
            hint="0.1 ends at a tenth of the peak",
        )
    ways = config.compare.modes
    if config.compare.steps and len(set(ways)) < max(1, len(ways)):
        raise InputError(
            f"compare.modes = {list(ways)} must name ways of running, each once",
            hint='set compare.modes to several of them, as in ["eager", "1", "2"]',
        )
    if config.link.rate:
        parse_rate(config.link.rate, "link.rate")
    if config.watchdog.dead_after_s < 2 * config.watchdog.heartbeat_s:
        raise InputError(
            f"watchdog.dead_after_s = {config.watchdog.dead_after_s} is less than two heartbeats "
            f"of {config.watchdog.heartbeat_s} s",
            hint="set watchdog.dead_after_s to at least twice watchdog.heartbeat_s",
        )
    _check_shapes(config)


def modes_of(config: RunConfig) -> frozenset[Mode]:
    """Every way of running a step that this run needs."""
    trial: tuple[Mode, ...] = ("1",) if tries_fallback(config) else ()
    compared = config.compare.modes if config.compare.steps else ()
    return frozenset({config.strands, *compared, *trial})


def tries_fallback(config: RunConfig) -> bool:
    """Whether the plan has to prove itself: two strands, and steps enough to tell."""
    steps = config.plan.trial_steps
    return config.strands == "2" and steps > 0 and config.train.steps >= 4 * (steps + 1)


def _check_shapes(config: RunConfig) -> None:
    model, tensor = config.model, config.parallel.tensor
    if model.width % model.heads:
        raise InputError(
            f"model.width = {model.width} is not a multiple of model.heads = {model.heads}",
            hint="set model.width to heads x head size",
        )
    if (model.width // model.heads) % 2:
        raise InputError(
            f"the head size {model.width // model.heads} is odd; rotary positions need pairs",
            hint="set model.width to an even multiple of model.heads",
        )
    if model.heads % model.kv_heads:
        raise InputError(
            f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}",
            hint="set model.kv_heads to a divisor of model.heads",
        )
    shares = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.ffn_width": model.ffn_width,
        "data.sequence_length": config.data.sequence_length,
        "model.vocab_size": model.vocab_size,
    }
    for name, size in shares.items():
        if size % tensor:
            raise InputError(
                f"{name} = {size} cannot be divided among parallel.tensor = {tensor} ranks",
                hint=f"set {name} to a multiple of {tensor}, or parallel.tensor to a divisor",
            )
    if modes_of(config) - {"eager", "1"} and config.train.micro_batches < 2:
        raise InputError(
            f"two strands need at least two micro-batches per step, and "
            f"train.micro_batches = {config.train.micro_batches}",
            hint="set train.micro_batches to 2 or more (8 hides most), or strands to 1 and "
            "compare.modes to eager,1",
        )


def check_world(config: RunConfig, world_size: int) -> None:
    """Raise InputError unless the ranks that exist are the ranks that the layout needs."""
    if config.parallel.tensor != world_size:
        raise InputError(
            f"parallel.tensor = {config.parallel.tensor} needs {config.parallel.tensor} ranks, "
            f"and the world size is {world_size}",
            hint=f"start {config.parallel.tensor} ranks (--nproc {config.parallel.tensor}), "
            f"or set parallel.tensor to {world_size}",
        )
