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
