"""Typed values of a config.json, and the parts of it that several models share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.errors import InputError
from interlace.model_config import ModelConfig, head_size_of

OTHER_MODEL = 'set model.source = "hugging_face" to train the model of `transformers` itself'
"""Hint where a checkpoint is of a kind, or has a setting, that our own models lack."""

_ROPE_KINDS = {"linear": "linear", "llama3": "llama3", "long": "longrope"}
"""`rope_type` by our word."""


class Reader:
    """Typed values of a parsed config.json."""

    def __init__(self, raw: dict[str, Any], file: Path, not_ours: Mapping[str, Any]) -> None:
        """`not_ours` has settings that our model has in one value only; absent means that value.
        Raises InputError for another value."""
        self.raw = raw
        self.file = file
        for key, only in not_ours.items():
            if raw.get(key, only) != only:
                raise self.refuse(key, raw[key], f"our model has {only!r} only")

    def refuse(self, key: str, value: object, why: str) -> InputError:
        """The error to raise for a value."""
        return InputError(f"{self.file}: {key} = {value!r}: {why}", hint=OTHER_MODEL)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number; null counts as absent."""
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.refuse(key, value, "a positive whole number is needed")
        return value

    def number(self, table: dict[str, Any], key: str, default: float | None = None) -> float:
        """A positive number of `table`."""
        value = table.get(key, default)
        if type(value) not in (int, float) or value <= 0:
            raise self.refuse(key, value, "a positive number is needed")
        return float(value)

    def numbers(self, table: dict[str, Any], key: str) -> tuple[float, ...]:
        """Positive numbers of `table`."""
        values = table.get(key)
        if not isinstance(values, list) or not all(
            type(v) in (int, float) and v > 0 for v in values
        ):
            raise self.refuse(key, values, "a list of positive numbers is needed")
        return tuple(map(float, values))

    def truth(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, value, "true or false is needed")
        return value


def rope_fields(
    get: Reader, theta: float = 10000.0, kinds: tuple[str, ...] = ("linear", "llama3")
) -> dict[str, Any]:
    """Fields of a ModelConfig. `transformers` 5 keeps all of it in `rope_parameters`, 4 keeps theta
    outside. `theta` is what absence means, `kinds` are the stretched ones that the model may have.
    """
    table = get.raw.get("rope_parameters") or get.raw.get("rope_scaling") or {}
    base: dict[str, Any] = {"rope_theta": get.number({**get.raw, **table}, "rope_theta", theta)}
    theirs = table.get("rope_type", table.get("type", "default"))
    if theirs == "default":
        return base | {"rope_scaling": "none"}
    kind = next((kind for kind in kinds if _ROPE_KINDS[kind] == theirs), None)
    if kind is None:
        known = ["default", *(_ROPE_KINDS[kind] for kind in kinds)]
        raise get.refuse("rope_type", theirs, f"known are {', '.join(known[:-1])} and {known[-1]}")
    base["rope_scaling"] = kind
    if kind == "long":
        return base | _long_rope(get, table)
    base["rope_factor"] = get.number(table, "factor")
    if kind == "llama3":
        base["rope_low_frequency"] = get.number(table, "low_freq_factor")
        base["rope_high_frequency"] = get.number(table, "high_freq_factor")
        length = get.number(table, "original_max_position_embeddings")
        base["rope_original_length"] = int(length)
    return base


def _long_rope(get: Reader, table: dict[str, Any]) -> dict[str, Any]:
    length = get.number({**get.raw, **table}, "original_max_position_embeddings")
    return {
        "rope_original_length": int(length),
        "rope_short_factors": get.numbers(table, "short_factor"),
        "rope_long_factors": get.numbers(table, "long_factor"),
        "rope_short_scale": get.number(table, "short_mscale"),
        "rope_long_scale": get.number(table, "long_mscale"),
    }


def common_json(config: ModelConfig, sequence_length: int) -> dict[str, Any]:
    """What Llama and the models of experts of its kind have in their config.json alike."""
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": head_size_of(config),
        "max_position_embeddings": max(sequence_length, _stretched_length(config)),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
    }


def _stretched_length(config: ModelConfig) -> int:
    """The length that `llama3` scaling is made for."""
    scaled = config.rope_scaling == "llama3"
    return int(config.rope_original_length * config.rope_factor) if scaled else 0


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling == "none":
        return None
    found: dict[str, Any] = {"rope_type": _ROPE_KINDS[config.rope_scaling]}
    if config.rope_scaling == "long":
        return found | {
            "original_max_position_embeddings": config.rope_original_length,
            "short_factor": list(config.rope_short_factors),
            "long_factor": list(config.rope_long_factors),
            "short_mscale": config.rope_short_scale,
            "long_mscale": config.rope_long_scale,
        }
    found["factor"] = config.rope_factor
    if config.rope_scaling == "llama3":
        found["low_freq_factor"] = config.rope_low_frequency
        found["high_freq_factor"] = config.rope_high_frequency
        found["original_max_position_embeddings"] = config.rope_original_length
    return found
