"""`config.json` of mixtures of experts: Mixtral, Qwen3-MoE and Phi-3.5-MoE.

Noise on inputs (`input_jitter_noise`, `router_jitter_noise` of Mixtral) is for training alone, and
our models have none; the weight of the auxiliary loss is a choice of the run. Neither is read.
"""

from dataclasses import replace
from typing import Any

from interlace.model_config import ModelConfig, expert_width_of, head_size_of
from interlace.models.hugging_face_reader import Reader, rope_fields

EXPERT_SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_act": "silu"},
    "qwen3_moe": {"hidden_act": "silu", "decoder_sparse_step": 1, "use_sliding_window": False},
    "phimoe": {"hidden_act": "silu"},
}
"""Settings that our models have in one value only, by model type; absent means that value."""
_THETA = {"mixtral": 1e6, "qwen3_moe": 1e4, "phimoe": 1e6}
"""Base of the rotary frequencies where config.json names none, as `transformers` 5 has it."""
_NORM_EPS = {"mixtral": 1e-5, "qwen3_moe": 1e-6, "phimoe": 1e-5}
"""The same of what norms add."""


def moe_fields(get: Reader, base: ModelConfig) -> ModelConfig:
    """`base` with the shape that a config.json says."""
    kind = get.raw["model_type"]
    qwen, phi = kind == "qwen3_moe", kind == "phimoe"
    if not qwen:
        _check_window(get)
    width, heads = get.whole("hidden_size"), get.whole("num_attention_heads")
    head_size = get.whole("head_dim", width // heads)
    count = "num_experts" if "num_experts" in get.raw else "num_local_experts"
    inner = get.whole("intermediate_size")
    experts = replace(
        base.experts,
        count=get.whole(count),
        chosen=get.whole("num_experts_per_tok"),
        ffn_width=get.whole("moe_intermediate_size") if qwen else inner,
        shared_width=0,
        dense_layers=_dense_layers(get) if qwen else 0,
        router="sparse_mixer" if phi else "softmax",
        renormalise=get.truth("norm_topk_prob", default=False) if qwen else True,
        jitter=get.number(get.raw, "router_jitter_noise", 0.01) if phi else base.experts.jitter,
        groups=1,
        groups_kept=1,
        scale=1.0,
    )
    return replace(
        base,
        architecture="moe",
        layers=get.whole("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=get.whole("num_key_value_heads"),
        head_size=0 if head_size * heads == width else head_size,
        ffn_width=inner,
        vocab_size=get.whole("vocab_size"),
        tied_head=get.truth("tie_word_embeddings", default=False),
        attention_bias=kind != "mixtral" and get.truth("attention_bias", default=False),
        query_key_norm=qwen,
        norm="layer" if phi else "rms",
        head_bias=phi and get.truth("lm_head_bias", default=False),
        norm_eps=get.number(get.raw, "rms_norm_eps", _NORM_EPS[kind]),
        experts=experts,
        **rope_fields(get, _THETA[kind], ("long",) if phi else ("linear", "llama3")),
    )


def _check_window(get: Reader) -> None:
    """Our attention has no window: one must be as long as the longest sequence."""
    window, longest = get.raw.get("sliding_window"), get.raw.get("max_position_embeddings")
    if window is not None and (type(longest) is not int or window < longest):
        raise get.refuse("sliding_window", window, f"attention of all {longest} positions is ours")


def _dense_layers(get: Reader) -> int:
    """Layers without experts, which must be the first ones."""
    dense = get.raw.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise get.refuse("mlp_only_layers", dense, "our layers without experts are the first ones")
    return len(dense)


def moe_misfit(config: ModelConfig, kind: str) -> str:
    """The first setting that a model of that type cannot have, or an empty text."""
    experts, qwen, phi = config.experts, kind == "qwen3_moe", kind == "phimoe"
    wanted: dict[str, tuple[object, tuple[object, ...]]] = {
        "norm": (config.norm, ("layer",) if phi else ("rms",)),
        "query_key_norm": (config.query_key_norm, (qwen,)),
        "experts.router": (experts.router, ("sparse_mixer",) if phi else ("softmax",)),
        "experts.renormalise": (experts.renormalise or phi, (True, False) if qwen else (True,)),
        "experts.dense_layers": (experts.dense_layers, (experts.dense_layers,) if qwen else (0,)),
        "experts.shared_width": (experts.shared_width, (0,)),
        "experts.groups": (experts.groups, (1,)),
        "experts.scale": (experts.scale, (1.0,)),
        "experts.balance": (experts.balance, ("none", "auxiliary_loss")),
        "attention_bias": (config.attention_bias, (False,) if kind == "mixtral" else (True, False)),
        "head_bias": (config.head_bias, (True, False) if phi else (False,)),
        "rope_scaling": (
            config.rope_scaling,
            ("none", "long") if phi else ("none", "linear", "llama3"),
        ),
    }
    for name, (value, allowed) in wanted.items():
        if value not in allowed:
            return f"model.{name} = {value!r}"
    if phi and head_size_of(config) * config.heads != config.width:
        return f"model.head_size = {config.head_size}"
    return ""


def moe_json(config: ModelConfig, kind: str) -> dict[str, Any]:
    """What the config.json of a model of that type has beside `common_json`."""
    experts, width = config.experts, expert_width_of(config)
    found: dict[str, Any] = {
        "num_experts_per_tok": experts.chosen,
        "router_aux_loss_coef": experts.auxiliary_weight,
        "sliding_window": None,
    }
    if kind == "qwen3_moe":
        return found | {
            "num_experts": experts.count,
            "intermediate_size": config.ffn_width,
            "moe_intermediate_size": width,
            "norm_topk_prob": experts.renormalise,
            "mlp_only_layers": list(range(experts.dense_layers)),
            "decoder_sparse_step": 1,
            "attention_bias": config.attention_bias,
        }
    found |= {"num_local_experts": experts.count, "intermediate_size": width}
    if kind == "phimoe":
        found |= {
            "router_jitter_noise": experts.jitter,
            "input_jitter_noise": 0.0,
            "attention_bias": config.attention_bias,
            "lm_head_bias": config.head_bias,
        }
    return found
