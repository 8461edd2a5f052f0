"""`config.json` of a Hugging Face checkpoint, and the ModelConfig that it means."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlace.config import ModelConfig
from interlace.errors import InputError
from interlace.models.hugging_face_names import FAMILIES, Family, family_for

_OTHER_MODEL = 'set model.source = "hugging_face" to train the model of `transformers` itself'
"""Hint where a checkpoint is of a kind, or has a setting, that our own models lack."""
_NOT_OURS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
}
"""Settings that our models have in one value only, by model type; absent means that value."""


def load_config(folder: str | Path, base: ModelConfig | None = None) -> ModelConfig:
    """`base` with the shape of the checkpoint in `folder`, `vocab_size` included.

    Reads `config.json` of Llama and GPT-2 models, as `transformers` 4 and 5 write it. What training
    chooses (dropout) stays as in `base`. Raises InputError for any other model, and for settings
    that our models lack.
    """
    _, raw, file = _read(folder)
    base = base or ModelConfig()
    get = _Reader(raw, file)
    return _gpt2(get, base) if raw["model_type"] == "gpt2" else _llama(get, base)


def family_of(folder: str | Path) -> Family:
    """How the checkpoint in `folder` is stored. Raises InputError as `load_config` does."""
    return _read(folder)[0]


def _read(folder: str | Path) -> tuple[Family, dict[str, Any], Path]:
    file = Path(folder) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror}",
            hint="give a folder with config.json and .safetensors files",
        ) from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    for family in FAMILIES:
        if family.model_type == kind:
            return family, raw, file
    known = ", ".join(family.model_type for family in FAMILIES)
    raise InputError(f"{file}: model_type = {kind!r} is none of {known}", hint=_OTHER_MODEL)


class _Reader:
    """Typed values of a parsed config.json."""

    def __init__(self, raw: dict[str, Any], file: Path) -> None:
        self.raw = raw
        self.file = file
        for key, only in _NOT_OURS[raw["model_type"]].items():
            if raw.get(key, only) != only:
                raise self.refuse(key, raw[key], f"our model has {only!r} only")

    def refuse(self, key: str, value: object, why: str) -> InputError:
        return InputError(f"{self.file}: {key} = {value!r}: {why}", hint=_OTHER_MODEL)

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

    def truth(self, key: str, *, default: bool) -> bool:
        value = self.raw.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, value, "true or false is needed")
        return value


def _llama(get: _Reader, base: ModelConfig) -> ModelConfig:
    width, heads = get.whole("hidden_size"), get.whole("num_attention_heads")
    if get.whole("head_dim", width // heads) * heads != width:
        raise get.refuse("head_dim", get.raw.get("head_dim"), "heads x head size must be the width")
    return replace(
        base,
        architecture="llama",
        layers=get.whole("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=get.whole("num_key_value_heads", heads),
        ffn_width=get.whole("intermediate_size"),
        vocab_size=get.whole("vocab_size"),
        tied_head=get.truth("tie_word_embeddings", default=False),
        norm_eps=get.number(get.raw, "rms_norm_eps", 1e-6),
        **_rope(get),
    )


def _rope(get: _Reader) -> dict[str, Any]:
    """`transformers` 5 keeps all of it in `rope_parameters`, 4 keeps theta outside."""
    table = get.raw.get("rope_parameters") or get.raw.get("rope_scaling") or {}
    theta = get.number({**get.raw, **table}, "rope_theta", 10000.0)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": "none"}
    if kind not in ("linear", "llama3"):
        raise get.refuse("rope_type", kind, "known are default, linear and llama3")
    found = {"rope_theta": theta, "rope_scaling": kind, "rope_factor": get.number(table, "factor")}
    if kind == "llama3":
        found["rope_low_frequency"] = get.number(table, "low_freq_factor")
        found["rope_high_frequency"] = get.number(table, "high_freq_factor")
        length = get.number(table, "original_max_position_embeddings")
        found["rope_original_length"] = int(length)
    return found


def _gpt2(get: _Reader, base: ModelConfig) -> ModelConfig:
    width, heads = get.whole("n_embd"), get.whole("n_head")
    return replace(
        base,
        architecture="gpt",
        layers=get.whole("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn_width=get.whole("n_inner", 4 * width),
        vocab_size=get.whole("vocab_size"),
        tied_head=get.truth("tie_word_embeddings", default=True),
        norm_eps=get.number(get.raw, "layer_norm_epsilon", 1e-5),
    )


def config_json(config: ModelConfig, sequence_length: int, dtype: str) -> dict[str, Any]:
    """What `transformers` needs to build the same model; `config.vocab_size` must be set."""
    family = family_for(config.architecture)
    common = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family.model_type == "gpt2":
        return common | {
            "n_layer": config.layers,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_inner": config.ffn_width,
            "n_positions": sequence_length,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            "resid_pdrop": config.dropout,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    return common | {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.width // config.heads,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": max(sequence_length, _stretched_length(config)),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
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
    found = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        found["low_freq_factor"] = config.rope_low_frequency
        found["high_freq_factor"] = config.rope_high_frequency
        found["original_max_position_embeddings"] = config.rope_original_length
    return found
