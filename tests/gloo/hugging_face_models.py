"""Small random models of `transformers` and their folders, for tests of import and export."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, POSITIONS = 96, 32
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
}
LLAMA_CASES: dict[str, dict[str, Any]] = {
    "plain": {"num_key_value_heads": 8},
    "grouped queries": {},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 28,
        },
    },
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": POSITIONS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2_CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, untied": {"tie_word_embeddings": False, "n_inner": 96},
}
MOE = {**LLAMA, "intermediate_size": 48, "num_experts_per_tok": 2}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2],
    "long_factor": [1.1, 2.0, 4.0, 8.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": POSITIONS,
}
PHI = {
    "num_local_experts": 16,
    "router_jitter_noise": 0.3,  # with 0.01, gates of a tiny model are 1
    "attention_bias": True,
    "lm_head_bias": True,
    "rope_parameters": LONG,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
QWEN = {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24}
MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "mixtral, tied, linear": (
        "Mixtral",
        {
            "num_local_experts": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True, "num_experts_per_tok": 4}),
    "qwen3_moe, dense layers": (
        "Qwen3Moe",
        {**QWEN, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "phimoe": ("Phimoe", PHI),
    "phimoe, plain": (
        "Phimoe",
        {"num_local_experts": 4, "rope_parameters": PLAIN, "router_jitter_noise": 0.5},
    ),
}
"""Class and settings of models with experts."""
CASES = [*LLAMA_CASES, *GPT2_CASES, *MOE_CASES]


def theirs(case: str) -> Any:
    """The model as `transformers` builds it; every parameter is random, norms and biases too."""
    import transformers as hf

    torch.manual_seed(3)
    if case in LLAMA_CASES:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, **LLAMA_CASES[case]}))
    elif case in MOE_CASES:
        kind, settings = MOE_CASES[case]
        config = getattr(hf, f"{kind}Config")(**{**MOE, **settings})
        model = getattr(hf, f"{kind}ForCausalLM")(config)
    else:
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**{**GPT2, **GPT2_CASES[case]}))
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return model.eval()


def saved(case: str, folder: Path, **options: Any) -> Any:
    """Save the model into `folder`; returns it."""
    model = theirs(case)
    model.save_pretrained(folder, **options)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets, [2, 24]."""
    text = torch.randint(0, VOCABULARY, (2, 25), generator=torch.Generator().manual_seed(5))
    return text[:, :-1], text[:, 1:]
