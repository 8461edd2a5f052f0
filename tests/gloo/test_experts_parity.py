"""Proves that our mixtures of experts are those of `transformers`: the same logits, auxiliary loss
and gradients in float64 from the same files, and the same choices of experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import MOE_CASES, POSITIONS, VOCABULARY, batch, saved, theirs
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.models.hugging_face import load_config, load_weights
from interlace.models.hugging_face_names import FAMILIES, pieces
from interlace.models.moe import MixtureOfExperts, RoutedLogits, build
from interlace.train.built_model import NextTokenLoss

BOUND = 1e-10
"""Largest difference, of logits as it is, of gradients over the largest gradient."""
WEIGHT = 0.02
"""Of the auxiliary loss, large enough to be seen in gradients."""


class Float64(TorchFunctionMode):
    """Where code asks for float32, as that of `transformers` does for norms, rotary tables and
    routers, it gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named)


def in_float64(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` makes, with weights and tables of float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def their_model(folder: Path) -> Any:
    """In evaluation mode: PhiMoE draws its experts at random in training, and ours does not."""
    from transformers import AutoModelForCausalLM

    return in_float64(
        lambda: AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        ).eval()
    )


def our_model(folder: Path, **training: Any) -> MixtureOfExperts:
    base = ModelConfig(experts=ExpertsConfig(**training))
    config = load_config(folder, base)
    model = in_float64(lambda: build(config, config.vocab_size, POSITIONS))
    load_weights(model, folder)
    assert isinstance(model, MixtureOfExperts)
    return model


def their_gradients(model: Any, names: list[str]) -> dict[str, Tensor]:
    """By our names, cut as our tables say."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    family = next(f for f in FAMILIES if f.model_type == model.config.model_type)
    found = {}
    for name, piece in pieces(family, names, fused=True).items():
        found[name] = gradients[piece.tensor].chunk(piece.parts, piece.dim)[piece.part]
    return found


@pytest.mark.parametrize("balance", ["none", "auxiliary_loss"])
@pytest.mark.parametrize("case", MOE_CASES)
def test_parity_with_transformers(case: str, balance: str, tmp_path: Path) -> None:
    """Logits, auxiliary loss and every gradient are theirs within 1e-10."""
    saved(case, tmp_path)
    reference = their_model(tmp_path)
    model = our_model(tmp_path, balance=balance, auxiliary_weight=WEIGHT)
    tokens, targets = batch()
    with Float64():
        out = reference(tokens, output_router_logits=True)
    found = model(tokens)
    assert isinstance(found, RoutedLogits)
    assert (found.logits.transpose(0, 1) - out.logits).abs().max() < BOUND
    expected = nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    if balance == "auxiliary_loss":
        assert found.auxiliary_loss is not None
        assert abs(found.auxiliary_loss - out.aux_loss) < BOUND
        expected = expected + WEIGHT * out.aux_loss
    else:
        assert found.auxiliary_loss is None
    expected.backward()
    loss, plain, load, peak, over = NextTokenLoss(model, WEIGHT)(tokens, targets)
    loss.backward()
    assert abs(loss.item() - expected.item()) < BOUND

    ours = {name: p.grad for name, p in model.named_parameters()}
    wanted = their_gradients(reference, list(ours))
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in ours.items():
        assert gradient is not None
        assert (gradient - wanted[name]).abs().max() < BOUND * largest, name
        assert gradient.abs().max() > 1e-9 * largest or "key.bias" in name, name
    layers = sum(hasattr(layer.mlp, "experts") for layer in reference.model.layers)
    assert int(load.sum()) == layers * tokens.numel() * reference.config.num_experts_per_tok
    assert torch.equal(load, found.load)
    assert int(load.max()) / layers <= int(peak) <= tokens.numel()
    assert int(over) == 0
    in_training = nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    assert abs(plain.item() - in_training.item()) < BOUND


def test_long_positions_choose_by_length(tmp_path: Path) -> None:
    """Sequences beyond the original length take the long factors at every position: what
    `transformers` 5.23, which has the short ones in its model of Phi-3.5 always, makes of a
    configuration where both are the long ones."""
    import json

    saved("phimoe", tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"]["original_max_position_embeddings"] = 16
    file.write_text(json.dumps(raw))
    model = our_model(tmp_path)
    raw["rope_parameters"]["short_factor"] = raw["rope_parameters"]["long_factor"]
    file.write_text(json.dumps(raw))
    tokens, _ = batch()
    with Float64():
        wanted = their_model(tmp_path)(tokens).logits
    assert (model(tokens).logits.transpose(0, 1) - wanted).abs().max() < BOUND
    assert (our_model(tmp_path)(tokens).logits.transpose(0, 1) - wanted).abs().max() < BOUND


DEEPSEEK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups": (
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"groups": 4, "groups_kept": 2, "scale": 2.5},
    ),
    "no groups, as it is": (
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {"renormalise": False},
    ),
}
"""Settings of `transformers`' router of DeepSeek-V3, and ours for the same."""


def deepseek(case: str) -> tuple[Any, nn.Module]:
    """Their layer of experts with a shared one, and ours with the same weights, in float64."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    from interlace.models.moe import ExpertFeedForward

    theirs_, ours_ = DEEPSEEK[case]
    config = DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=24, n_routed_experts=16, n_shared_experts=2,
        num_experts_per_tok=3, **theirs_,
    )  # fmt: skip
    config._experts_implementation = "eager"
    reference = in_float64(lambda: DeepseekV3MoE(config)).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in reference.parameters():
            nn.init.normal_(parameter, std=0.3)
        reference.gate.e_score_correction_bias.normal_(std=0.3)
    experts = ExpertsConfig(
        count=16, chosen=3, ffn_width=24, shared_width=48, router="sigmoid", balance="bias", **ours_
    )
    model = ModelConfig(architecture="moe", width=32, experts=experts)
    layer = in_float64(lambda: ExpertFeedForward(model))
    gate, up = reference.experts.gate_up_proj.detach().chunk(2, 1)
    shared = {name: p.detach() for name, p in reference.shared_experts.named_parameters()}
    layer.load_state_dict(
        {
            "router.weight": reference.gate.weight.detach(),
            "router.bias": reference.gate.e_score_correction_bias,
            "experts.gate": gate,
            "experts.up": up,
            "experts.down": reference.experts.down_proj.detach(),
            **{f"shared.{name.replace('_proj', '')}": value for name, value in shared.items()},
        }
    )
    return reference, layer


@pytest.mark.parametrize("case", DEEPSEEK)
def test_parity_with_deepseek(case: str) -> None:
    """Sigmoid scores, groups, the bias on the choice, the scale and a shared expert: outputs and
    gradients of a layer are those of `transformers`' DeepSeek-V3 within 1e-10."""
    reference, layer = deepseek(case)
    draw = torch.Generator().manual_seed(6)
    x_SBD = torch.randn(20, 2, 32, generator=draw, dtype=torch.float64)
    inputs = [x_SBD.clone().requires_grad_() for _ in range(2)]
    with Float64():
        wanted = reference(inputs[0])
    found = layer(inputs[1])
    assert (found.x - wanted).abs().max() < BOUND
    pull = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    (wanted * pull).sum().backward()
    (found.x * pull).sum().backward()
    gradients = [each.grad for each in (*inputs, reference.gate.weight, layer.router.weight)]
    assert all(gradient is not None for gradient in gradients)
    assert (gradients[0] - gradients[1]).abs().max() < BOUND * gradients[0].abs().max()
    assert (gradients[2] - gradients[3]).abs().max() < BOUND * gradients[2].abs().max()
    down = layer.experts.down.grad, reference.experts.down_proj.grad
    assert (down[0] - down[1]).abs().max() < BOUND * down[1].abs().max()
    with Float64():
        _, _, ids = reference.gate(x_SBD)
    ours = layer.router(x_SBD.flatten(0, 1)).ids
    assert torch.equal(ours.sort(1).values, ids.sort(1).values)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "phimoe"])
def test_ties_and_idle_experts(case: str, tmp_path: Path) -> None:
    """A router of zeros leaves all experts equal, and sends every token to the same ones: those of
    `transformers`. Gradients of the others, which meet no token, are 0, and nothing is NaN."""
    model = theirs(case)
    routers = [
        layer.mlp.router if case == "phimoe" else layer.mlp.gate for layer in model.model.layers
    ]
    with torch.no_grad():
        for router in routers:
            router.weight.zero_()
    model.save_pretrained(tmp_path)
    tokens, targets = batch()
    reference, ours = their_model(tmp_path), our_model(tmp_path)
    with Float64():
        logits = reference(tokens).logits
    found = ours(tokens)
    assert (found.logits.transpose(0, 1) - logits).abs().max() < BOUND
    idle = found.load == 0
    assert int(idle.sum()) == len(idle) - reference.config.num_experts_per_tok
    loss, *_ = NextTokenLoss(ours)(tokens, targets)
    loss.backward()
    for block in ours.blocks:
        for parameter in block.ffn.experts.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert not parameter.grad[idle].any()
            assert parameter.grad[~idle].any()


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "phimoe"])
def test_both_forms_of_files_are_read(case: str, tmp_path: Path) -> None:
    """One tensor for each expert, or one for all experts of a layer: the same weights."""
    saved(case, tmp_path / "each")
    saved(case, tmp_path / "fused", save_original_format=False)
    one, other = our_model(tmp_path / "each"), our_model(tmp_path / "fused")
    found = dict(other.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in one.named_parameters())


def test_export_of_a_model_of_ours(tmp_path: Path) -> None:
    """Fresh models of each family are exported to the class that fits them and compute the same
    there; what no class has is refused by its key."""
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    from interlace.errors import InputError
    from interlace.models.hugging_face import export

    experts = ExpertsConfig(count=4, ffn_width=24, capacity_factor=2.0)
    mixtral = ModelConfig(
        architecture="moe", layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, vocab_size=96,
        experts=experts,
    )  # fmt: skip
    mixer = replace(experts, router="sparse_mixer", jitter=0.3)
    dense = replace(experts, dense_layers=1, renormalise=False)
    shapes = {
        "mixtral": mixtral,
        "qwen3_moe": replace(mixtral, query_key_norm=True, head_size=16, experts=dense),
        "phimoe": replace(mixtral, norm="layer", attention_bias=True, experts=mixer),
    }
    tokens, _ = batch()
    for kind, config in shapes.items():
        model = build(config, VOCABULARY, POSITIONS)
        export(dict(model.named_parameters()), config, tmp_path / kind, sequence_length=POSITIONS)
        theirs_ = AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        assert theirs_.config.model_type == kind
        found = model(tokens).logits.transpose(0, 1)
        torch.testing.assert_close(found, theirs_(tokens).logits, rtol=0, atol=1e-5)
    for wrong, key in (
        (replace(experts, shared_width=8), "model.experts.shared_width = 8"),
        (replace(experts, router="sigmoid"), "model.experts.router = 'sigmoid'"),
        (replace(experts, balance="bias"), "model.experts.balance = 'bias'"),
    ):
        config = replace(mixtral, experts=wrong)
        with pytest.raises(InputError, match=f"mixtral has no {key}"):
            export({}, config, tmp_path / "new", sequence_length=POSITIONS)
