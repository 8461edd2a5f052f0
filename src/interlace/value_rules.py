"""Which fields of a RunConfig are bounded, whatever the others say."""

from typing import Any

from interlace.config import RunConfig
from interlace.errors import InputError

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


def check_values(config: RunConfig) -> None:
    """Raise InputError for the first field that is out of its bounds."""
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
