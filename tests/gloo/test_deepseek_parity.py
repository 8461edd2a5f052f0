"""Proves that our mixtures of experts are those of `transformers`' DeepSeek-V3 and V2: outputs and
the gradient of every parameter in float64, of a layer and of a whole model around it.

V3 has sigmoid scores, V2 a softmax; both limit a token to groups of experts and have a shared one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import POSITIONS, batch, saved
from test_experts_parity import BOUND, Float64, in_float64, their_model
from torch import Tensor, nn

from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.models.hugging_face import load_config
from interlace.models.hugging_face_names import FAMILIES, pieces
from interlace.models.moe import ExpertFeedForward, build
from interlace.train.built_model import NextTokenLoss

EXPERTS, CHOSEN, INNER, SHARED = 16, 3, 24, 2
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sigmoid, groups": (
        "DeepseekV3",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"router": "sigmoid", "balance": "bias", "groups": 4, "groups_kept": 2, "scale": 2.5},
    ),
    "sigmoid, no groups, as it is": (
        "DeepseekV3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {"router": "sigmoid", "balance": "bias", "renormalise": False},
    ),
    "softmax, groups": (
        "DeepseekV2",
        {
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {"router": "softmax", "renormalise": False, "groups": 4, "groups_kept": 2, "scale": 2.5},
    ),
}  # fmt: skip
"""Family, settings of its router in `transformers`, and ours for the same."""


def _their_config(case: str, width: int) -> Any:
    import transformers

    family, theirs, _ = CASES[case]
    config = getattr(transformers, f"{family}Config")(
        hidden_size=width, intermediate_size=40, moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS, n_shared_experts=SHARED, num_experts_per_tok=CHOSEN, **theirs,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return config


def _their_layer(case: str, config: Any) -> Any:
    """A layer of experts, with random weights and, where a router has them, biases."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    kind = DeepseekV3MoE if CASES[case][0] == "DeepseekV3" else DeepseekV2Moe
    layer = in_float64(lambda: kind(config)).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    if hasattr(layer.gate, "e_score_correction_bias"):
        layer.gate.e_score_correction_bias.normal_(std=0.3)
    return layer


def _our_experts(case: str) -> ExpertsConfig:
    return ExpertsConfig(
        count=EXPERTS, chosen=CHOSEN, ffn_width=INNER, shared_width=INNER * SHARED, **CASES[case][2]
    )


NAMES = {
    "gate.weight": "router.weight",
    "gate.e_score_correction_bias": "router.bias",
    "shared_experts": "shared",
    "_proj": "",
}
"""Parts of their names, and what stands for them in ours, one after the other."""


def _named_as_ours(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of one of their feed-forwards, or gradients, by our names: gates and projections up
    are the halves of one tensor of theirs."""
    found = {}
    for name, value in theirs.items():
        if name == "experts.gate_up_proj":
            found |= dict(zip(("experts.gate", "experts.up"), value.chunk(2, 1), strict=True))
        else:
            found[reduce(lambda text, part: text.replace(*part), NAMES.items(), name)] = value
    return found


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert len(found) == len(list(module.parameters()))
    return found


def _furthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of a gradient, over the largest element of its parameter's."""
    assert found.keys() == wanted.keys()
    off = {n: (found[n] - wanted[n]).abs().max() / wanted[n].abs().max() for n in wanted}
    return float(max(off.values()))


@pytest.mark.parametrize("case", CASES)
def test_a_layer(case: str) -> None:
    """Scores, groups, the bias on the choice, the scale and a shared expert: outputs, choices, and
    the gradients of inputs, routers, gates, projections and of the shared expert."""
    torch.manual_seed(4)
    reference = _their_layer(case, _their_config(case, width=32))
    model = ModelConfig(architecture="moe", width=32, experts=_our_experts(case))
    layer = in_float64(lambda: ExpertFeedForward(model))
    layer.load_state_dict(_named_as_ours(reference.state_dict()))
    draw = torch.Generator().manual_seed(6)
    x_SBD = torch.randn(20, 2, 32, generator=draw, dtype=torch.float64)
    inputs = [x_SBD.clone().requires_grad_() for _ in range(2)]
    with Float64():
        wanted = reference(inputs[0])
        _, _, ids = reference.gate(x_SBD)
    found = layer(inputs[1])
    assert (found.x - wanted).abs().max() < BOUND
    ours = layer.router(x_SBD.flatten(0, 1)).ids
    assert torch.equal(ours.sort(1).values, ids.sort(1).values)
    pull = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    (wanted * pull).sum().backward()
    (found.x * pull).sum().backward()
    assert _furthest(_gradients(layer), _named_as_ours(_gradients(reference))) < BOUND
    theirs_, ours_ = (each.grad for each in inputs)
    assert theirs_ is not None
    assert ours_ is not None
    assert (ours_ - theirs_).abs().max() < BOUND * theirs_.abs().max()


@pytest.mark.parametrize("case", ["sigmoid, groups", "softmax, groups"])
def test_a_whole_model(case: str, tmp_path: Path) -> None:
    """Their feed-forwards in their Mixtral, whose attention is ours too, behind a dense first
    layer: logits, loss and the gradient of every parameter of the model."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

    saved("mixtral", tmp_path)
    reference = their_model(tmp_path)
    torch.manual_seed(7)
    theirs = _their_config(case, width=64)
    layers = reference.model.layers
    layers[0].mlp = in_float64(lambda: DeepseekV3MLP(theirs))
    for layer in layers[1:]:
        layer.mlp = _their_layer(case, theirs)
    experts = replace(_our_experts(case), dense_layers=1)
    config = replace(load_config(tmp_path, ModelConfig()), ffn_width=40, experts=experts)
    model = in_float64(lambda: build(config, config.vocab_size, POSITIONS))
    family = next(f for f in FAMILIES if f.model_type == "mixtral")
    around = [name for name, _ in model.named_parameters() if ".ffn." not in name]

    def ours(of: Mapping[str, Tensor], of_ffn: Callable[..., dict[str, Tensor]]) -> Any:
        """Weights or gradients of the whole model, by our names."""
        found = {name: of[piece.tensor] for name, piece in pieces(family, around).items()}
        for number, layer in enumerate(layers):
            own = _named_as_ours(of_ffn(layer.mlp))
            found |= {f"blocks.{number}.ffn.{name}": each for name, each in own.items()}
        return found

    model.load_state_dict(ours(reference.state_dict(), nn.Module.state_dict))
    tokens, targets = batch()
    with Float64():
        logits = reference(tokens).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    loss, *_ = NextTokenLoss(model)(tokens, targets)
    loss.backward()
    assert (model(tokens).logits.transpose(0, 1) - logits).abs().max() < BOUND
    assert abs(loss.item() - expected.item()) < BOUND
    whole = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert _furthest(_gradients(model), ours(whole, _gradients)) < BOUND
