"""`config.json` of a Hugging Face checkpoint, and the ModelConfig that it means."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.model_config import ModelConfig
from interlace.models.hugging_face_moe import EXPERT_SETTINGS, moe_fields, moe_json, moe_misfit
from interlace.models.hugging_face_names import FAMILIES, Family
from interlace.models.hugging_face_reader import (
    OTHER_MODEL,
    Reader,
    common_json,
    rope_fields,
)
from interlace.rules import check

_NOT_OURS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    **EXPERT_SETTINGS,
}
"""Settings that our models have in one value only, by model type; absent means that value."""


def load_config(folder: str | Path, base: ModelConfig | None = None) -> ModelConfig:
    """`base` with the shape of the checkpoint in `folder`, `vocab_size` included.

    Reads `config.json` of Llama, GPT-2, Mixtral, Qwen3-MoE and Phi-3.5-MoE, as `transformers` 4 and
    5 write it. What training chooses (dropout, how experts are balanced, their capacity)
    stays as in `base`. Raises InputError for any other model, and for settings that our models
    lack.
    """
    family, raw, file = _read(folder)
    base = base or ModelConfig()
    get = Reader(raw, file, _NOT_OURS.get(family.model_type, {}))
    if family.architecture == "moe":
        return moe_fields(get, base)
    return _gpt2(get, base) if family.architecture == "gpt" else _llama(get, base)


def published_shape(config: RunConfig) -> RunConfig:
    """`config` with the shape of the model that `model.config` names, if there is one. Raises
    InputError for a folder that holds none."""
    if config.model.source == "hugging_face" or not config.model.config:
        return config
    found = replace(config, model=load_config(config.model.config, config.model))
    check(found)
    return found


def overridden_shape(given: RunConfig, found: RunConfig) -> str:
    """What `published_shape` has put in place of values that the run file, a preset or a flag set,
    as one line; empty if nothing."""
    was, now = (_flat(config.model) for config in (given, found))
    changed = [
        f"model.{name} = {now[name]!r}, not {was[name]!r}"
        for name, default in _flat(ModelConfig()).items()
        if was[name] not in (default, now[name])
    ]
    if not changed:
        return ""
    return f"config.json of model.config = {given.model.config!r} says {', '.join(changed)}"


def _flat(model: ModelConfig) -> dict[str, object]:
    """Every value by its name below `model.`, as in `experts.count`."""
    values = asdict(model)
    experts = values.pop("experts")
    return values | {f"experts.{name}": value for name, value in experts.items()}


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
    raise InputError(f"{file}: model_type = {kind!r} is none of {known}", hint=OTHER_MODEL)


def _llama(get: Reader, base: ModelConfig) -> ModelConfig:
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
        **rope_fields(get),
    )


def _gpt2(get: Reader, base: ModelConfig) -> ModelConfig:
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


def family_for(config: ModelConfig) -> Family:
    """How a model of this shape is stored. Raises InputError for one that `transformers` lacks."""
    ours = [family for family in FAMILIES if family.architecture == config.architecture]
    if not ours:
        raise InputError(
            f"model.architecture = {config.architecture!r} has no form that transformers reads",
            hint="only these can be exported: "
            + ", ".join(dict.fromkeys(family.architecture for family in FAMILIES)),
        )
    misfits = []
    for family in ours:
        moe = family.architecture == "moe"
        misfit = moe_misfit(config, family.model_type) if moe else _dense_misfit(config)
        if not misfit:
            return family
        misfits.append(f"{family.model_type} has no {misfit}")
    raise InputError(
        f"no model of transformers has this shape: {'; '.join(misfits)}",
        hint="export a model of one of these shapes, or keep it as a checkpoint of interlace",
    )


def _dense_misfit(config: ModelConfig) -> str:
    """The first setting that neither Llama nor GPT-2 of `transformers` is read back with."""
    for name in ("head_size", "attention_bias", "query_key_norm"):
        if getattr(config, name):
            return f"model.{name} = {getattr(config, name)!r}"
    return "model.rope_scaling = 'long'" if config.rope_scaling == "long" else ""


def config_json(config: ModelConfig, sequence_length: int, dtype: str) -> dict[str, Any]:
    """What `transformers` needs to build the same model; `config.vocab_size` must be set."""
    family = family_for(config)
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
    common |= common_json(config, sequence_length)
    if family.architecture == "moe":
        return common | moe_json(config, family.model_type)
    return common | {
        "intermediate_size": config.ffn_width,
        "attention_bias": False,
        "mlp_bias": False,
    }
