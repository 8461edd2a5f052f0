"""Rules for a RunConfig that need no torch and no data: `check`, which all commands call.

Bounds of single fields and what does not go together are here; what the degrees of `[parallel]` and
`[pipeline]` cannot be is in `degrees`, the shapes that a model cannot have in `model_rules`.
Each raises InputError with the field, the value and what to set.
"""

from typing import Any

from interlace.config import HardwareConfig, LinkConfig, RunConfig, parse_rate
from interlace.degrees import check_degrees
from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, load_cluster
from interlace.model_rules import check_shapes

_POSITIVE = (
    "model.layers",
    "model.width",
    "model.heads",
    "model.kv_heads",
    "model.ffn_width",
    "parallel.data_replicate",
    "parallel.context",
    "parallel.tensor",
    "parallel.expert",
    "parallel.pipeline",
    "parallel.bucket_mib",
    "data.sequence_length",
    "optimizer.learning_rate",
    "train.steps",
    "train.micro_batches",
    "train.micro_batch_size",
    "train.evaluate_batches",
    "train.threads",
    "plan.profile_repeats",
    "watchdog.heartbeat_s",
    "watchdog.busy_s",
    "watchdog.start_s",
    "watchdog.end_s",
    "model.rope_theta",
    "model.rope_factor",
    "model.rope_original_length",
    "model.rope_short_scale",
    "model.rope_long_scale",
    "model.norm_eps",
    "optimizer.epsilon",
)
"""Fields that must be above 0."""
_NOT_NEGATIVE = (
    "model.vocab_size",
    "model.head_size",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "train.evaluate_every",
    "compare.steps",
    "overlap.pieces",
    "plan.trial_steps",
    "plan.memory_mib",
    "plan.extra_memory",
    "plan.extra_memory_mib",
    "link.latency_us",
    "output.record_every",
    "hardware.peak_tflops",
    "hardware.memory_gb_per_s",
    "train.seed",
    "train.recompute_mib",
    "train.renew_plan_at",
    "checkpoint.every",
    "checkpoint.keep",
)
"""Fields that must be 0 or above."""
_FIGURES = ("hardware.peak_tflops", "hardware.memory_gb_per_s", "link.rate", "link.latency_us")
"""Fields that say what a cluster says too."""


def check(config: RunConfig) -> None:
    """Raise InputError for values that can never work, whatever the machine."""
    _check_values(config)
    ways = config.compare.modes
    if config.compare.steps and len(set(ways)) < max(1, len(ways)):
        raise InputError(
            f"compare.modes = {list(ways)} must name ways of running, each once",
            hint='set compare.modes to several of them, as in ["eager", "1", "2"]',
        )
    if config.overlap.pieces and config.overlap.decompose == "off":
        raise InputError(
            f"overlap.pieces = {config.overlap.pieces}, but collectives stay whole",
            hint='set overlap.decompose to "auto" or a form, or overlap.pieces to 0',
        )
    _check_gradient_check(config)
    _check_capture(config)
    _check_machine(config)
    if config.watchdog.dead_after_s < 2 * config.watchdog.heartbeat_s:
        raise InputError(
            f"watchdog.dead_after_s = {config.watchdog.dead_after_s} is less than two heartbeats "
            f"of {config.watchdog.heartbeat_s} s",
            hint="set watchdog.dead_after_s to at least twice watchdog.heartbeat_s",
        )
    if not 0 <= config.model.dropout < 1:
        raise InputError(
            f"model.dropout = {config.model.dropout!r} must be at least 0 and below 1",
            hint="0 drops nothing",
        )
    stages = check_degrees(config)
    if config.train.recompute == "budget" and not config.train.recompute_mib:
        raise InputError(
            "train.recompute = 'budget' needs a budget",
            hint="set train.recompute_mib to what one micro-batch may keep for its backward",
        )
    for parallel in (*stages, config.parallel):
        check_shapes(config.model, parallel, config.data)
    of_one = {"eager", "1", "plain-1", "decomposed-1"}
    if config.parallel.pipeline == 1 and config.modes - of_one and config.train.micro_batches < 2:
        raise InputError(
            f"two strands need at least two micro-batches per step, and "
            f"train.micro_batches = {config.train.micro_batches}",
            hint="set train.micro_batches to 2 or more (8 hides most), or strands to 1 and "
            "compare.modes to eager,1",
        )


def _check_capture(config: RunConfig) -> None:
    """Refuse what a CUDA graph cannot hold, before anything is traced."""
    for name, value, wrong in (
        ("strands", config.strands, config.strands == "eager"),
        ("parallel.pipeline", config.parallel.pipeline, config.parallel.pipeline > 1),
        ("model.experts.count", config.model.experts.count, config.model.experts.count > 0),
        ("model.dropout", config.model.dropout, config.model.dropout > 0),
    ):
        if config.train.cuda_graph and wrong:
            raise InputError(
                f"train.cuda_graph captures planned steps whose kernels do not depend on what the "
                f"host reads, and {name} = {value!r}",
                hint=f"set train.cuda_graph to false, or change {name}",
            )


def check_renewal(config: RunConfig) -> None:
    """Raise InputError where `train.renew_plan_at` has nothing to look at, or nothing to do; of a
    published model once its shape is known."""
    plan, experts, share = config.plan, config.model.experts, config.train.renew_plan_at
    for name, value, wrong in (
        ("model.experts.count", experts.count, not experts.count),
        ("strands", config.strands, config.strands != "2"),
        ("parallel.pipeline", config.parallel.pipeline, config.parallel.pipeline > 1),
        ("plan.file", plan.file, plan.file),
        ("plan.cluster", plan.cluster, plan.cluster),
    ):
        if share and wrong:
            raise InputError(
                f"train.renew_plan_at = {share} measures two strands again when the load of "
                f"experts drifts, and {name} = {value!r}",
                hint=f"leave train.renew_plan_at out, or change {name}",
            )


def _check_gradient_check(config: RunConfig) -> None:
    """What a compiled step cannot be compared with eager PyTorch for."""
    if not config.compare.check:
        return
    if config.strands == "eager":
        raise InputError(
            'compare.check compares a compiled step with eager PyTorch, and strands = "eager"',
            hint="set strands to 1 or 2, or leave --check out",
        )
    if config.model.dropout:
        raise InputError(
            f"compare.check and model.dropout = {config.model.dropout}: a compiled step draws "
            "other masks than eager PyTorch",
            hint="check once with model.dropout 0, then train without --check",
        )


def _check_values(config: RunConfig) -> None:
    """Fields that are bounded, whatever the others say."""
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


def _value(config: RunConfig, name: str) -> Any:
    table, key = name.split(".")
    return getattr(getattr(config, table), key)


def _check_machine(config: RunConfig) -> None:
    """A rate that is none, and a `plan.cluster` that is not there or does not go with the rest of
    the run: whatever the command, before a model is built."""
    if config.link.rate:
        parse_rate(config.link.rate, "link.rate")
    if config.plan.cluster:
        described_cluster(config, config.plan.cluster, f"plan.cluster = {config.plan.cluster!r}")


def described_cluster(config: RunConfig, name: str, given: str) -> Cluster:
    """The cluster of this name, which says all about the machine; `given` is where it is named, in
    words.

    Raises InputError if there is none, if the run has more ranks than it has devices, or if the run
    has figures of another machine as well.
    """
    defaults = {"hardware": HardwareConfig(), "link": LinkConfig()}
    set_to, unset = [], []
    for key in _FIGURES:
        table, field = key.split(".")
        value = getattr(getattr(config, table), field)
        default = getattr(defaults[table], field)
        if value != default:
            set_to.append(f"{key} = {value!r}")
            unset.append(f"--{key} {default!r}" if default == "" else f"--{key} {default:g}")
    if set_to:
        raise InputError(
            f"{given} says how fast devices and links are, and so does the run: "
            + ", ".join(set_to),
            hint="leave one of the two out; a run file's values are taken back by "
            + " ".join(unset),
        )
    cluster = load_cluster(name)
    cluster.require(config.parallel.ranks)
    return cluster
