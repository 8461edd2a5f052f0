"""Proves that our models are the ones of `transformers`: the same logits and gradients from the
same files, and the same files back."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import (
    CASES,
    MOE_CASES,
    POSITIONS,
    VOCABULARY,
    batch,
    saved,
    theirs,
)
from torch import Tensor, nn

from interlace.config import ModelConfig, RunConfig
from interlace.errors import InputError
from interlace.models import model_file
from interlace.models.hugging_face import export, load_config, load_weights
from interlace.models.hugging_face_config import overridden_shape, published_shape
from interlace.models.hugging_face_names import FAMILIES, pieces
from interlace.train.built_model import NextTokenLoss


def ours(folder: Path, sequence_length: int = POSITIONS) -> nn.Module:
    """Our model with the weights in `folder`."""
    config = load_config(folder)
    model = model_file(config.architecture).build(config, config.vocab_size, sequence_length)
    load_weights(model, folder)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def their_gradient(model: Any, name: str, own: Tensor, gradients: dict[str, Tensor]) -> Tensor:
    """What `transformers` has for our parameter, cut and turned as our tables say."""
    family = next(f for f in FAMILIES if f.model_type == model.config.model_type)
    piece = pieces(family, [name])[name]
    whole = gradients[piece.tensor]
    whole = whole.t() if piece.transposed else whole
    return whole[piece.part * own.shape[0] : (piece.part + 1) * own.shape[0]]


@pytest.mark.parametrize("case", [case for case in CASES if case not in MOE_CASES])
def test_parity_with_transformers(case: str, tmp_path: Path) -> None:
    """Logits, loss and every gradient equal those of `transformers` in float64; what is left is
    that it makes Llama's rotary tables from float32 frequencies."""
    reference = saved(case, tmp_path / "model").double()
    model = ours(tmp_path / "model").double()
    tokens, targets = batch()

    logits_BSV = reference(tokens).logits
    torch.testing.assert_close(model(tokens).transpose(0, 1), logits_BSV, rtol=0, atol=2e-5)

    expected = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), targets.flatten())
    expected.backward()
    loss = NextTokenLoss(model)(tokens, targets)
    loss.backward()
    assert abs(loss.item() - expected.item()) < 1e-6
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    bound = 1e-12 if "gpt2" in case else 1e-5
    for name, parameter in state(model).items():
        gradient = their_gradient(reference, name, parameter, gradients)
        # The gradient of a key's bias is 0 but for rounding: a softmax ignores what all share.
        scale = max(gradient.abs().max().item(), 1e-3 * largest)
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_equal(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """theirs -> files -> ours -> files -> theirs changes no bit, in one file or several; the
    exported configuration means the same model."""
    from transformers import AutoModelForCausalLM

    theirs(case).to(dtype).save_pretrained(tmp_path / "first", max_shard_size="20KB")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    assert (tmp_path / "first" / "model.safetensors.index.json").exists()
    model, config = ours(tmp_path / "first"), load_config(tmp_path / "first")
    for name, limit in (("one", 10**9), ("several", 30_000)):
        folder = tmp_path / name
        export(
            state(model), config, folder, sequence_length=POSITIONS, dtype=dtype, shard_bytes=limit
        )
        files = list(folder.glob("*.safetensors"))
        assert (len(files) == 1) == (name == "one")
        assert load_config(folder) == config
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        found, expected = again.state_dict(), reference.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        tokens, _ = batch()
        assert torch.equal(again.eval()(tokens).logits, reference(tokens).logits)
        twice = state(ours(folder))
        assert all(torch.equal(twice[key], value) for key, value in state(model).items())


def test_shorter_sequences_take_the_first_positions(tmp_path: Path) -> None:
    """A GPT-2 of 32 positions loads into a model of 24; one of 33 is refused with the limit."""
    reference = saved("gpt2", tmp_path)
    tokens, _ = batch()
    found = ours(tmp_path, 24)(tokens).transpose(0, 1)
    torch.testing.assert_close(found, reference(tokens).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="32 positions, fewer than the 33") as error:
        ours(tmp_path, 33)
    assert "data.sequence_length" in error.value.hint


def test_bare_names_and_masks(tmp_path: Path) -> None:
    """Files of the bare model (`wte.weight`), with attention masks stored as GPT-2's are and a
    head that repeats the embedding, load; a head that differs is refused."""
    from safetensors.torch import load_file, save_file

    reference = saved("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    save_file(bare, file)
    assert torch.equal(state(ours(tmp_path))["embedding.weight"], reference.transformer.wte.weight)
    bare["lm_head.weight"][0, 0] += 1
    save_file(bare, file)
    with pytest.raises(InputError, match="weights differ"):
        ours(tmp_path)


def change(file: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a file."""
    from safetensors.torch import load_file, save_file

    kept = {**load_file(file), **tensors}
    save_file({name: t for name, t in kept.items() if t is not None}, file)


NORM = "model.norm.weight"
WRONG_TENSORS = {
    "missing": ({NORM: None}, "lacks model.norm.weight"),
    "left over": ({"model.extra": torch.ones(2)}, "no place for, model.extra"),
    "shape": ({NORM: torch.ones(65)}, r"model.norm.weight has shape \[65\].*needs \[64\]"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_tensors_change_nothing(wrong: str, tmp_path: Path) -> None:
    """Every tensor is checked before the first weight is written, and the error names it."""
    saved("plain", tmp_path)
    tensors, message = WRONG_TENSORS[wrong]
    change(tmp_path / "model.safetensors", tensors)
    config = load_config(tmp_path)
    model = model_file("llama").build(config, config.vocab_size, POSITIONS)
    before = {name: value.clone() for name, value in state(model).items()}
    with pytest.raises(InputError, match=message):
        load_weights(model, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in state(model).items())


def test_broken_files(tmp_path: Path) -> None:
    """Files that are cut off, damaged, absent, misplaced or pickled are errors that say which."""
    saved("plain", tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    good = shards[1].read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match):
            ours(tmp_path)

    for content in (good[:-5], good[:4], b"", struct.pack("<Q", 1 << 60) + good[8:], b"x" * 100):
        shards[1].write_bytes(content)
        refused(shards[1].name)
    shards[1].unlink()
    refused(shards[1].name)
    shards[1].write_bytes(shards[0].read_bytes())
    refused("lacks model.*, which model.safetensors.index.json says")
    listed = json.loads(index.read_text())
    for content in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'):
        index.write_text(content)
        refused("index")
    listed["weight_map"][NORM] = "../model.safetensors"
    index.write_text(json.dumps(listed))
    refused("outside its folder")
    index.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("neither model.safetensors nor")


WRONG_CONFIGS = {
    "model_type": ("mistral", "none of llama, gpt2"),
    "hidden_act": ("gelu", "hidden_act = 'gelu'"),
    "attention_bias": (True, "attention_bias"),
    "num_hidden_layers": ("3", "num_hidden_layers = '3'"),
    "hidden_size": (None, "hidden_size"),
    "head_dim": (16, "head_dim = 16"),
    "rms_norm_eps": (0, "rms_norm_eps"),
    "tie_word_embeddings": (1, "tie_word_embeddings"),
    "rope_parameters": ({"rope_type": "yarn"}, "'yarn'.*default, linear and llama3"),
    "rope_scaling": ({"rope_type": "linear"}, "factor = None"),
}


@pytest.mark.parametrize("key", WRONG_CONFIGS)
def test_wrong_configs(key: str, tmp_path: Path) -> None:
    """A configuration that our models cannot follow is refused, with the key and the value."""
    saved("plain", tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    if key == "rope_scaling":  # as transformers 4 writes it
        raw.pop("rope_parameters", None)
    value, message = WRONG_CONFIGS[key]
    file.write_text(json.dumps({**raw, key: value}))
    with pytest.raises(InputError, match=message):
        load_config(tmp_path)


def test_config_keeps_what_training_chooses(tmp_path: Path) -> None:
    """Shape comes from the file, dropout and source from the run; no file is an error."""
    saved("llama3", tmp_path)
    base = ModelConfig(dropout=0.1, config=str(tmp_path), layers=9)
    config = load_config(tmp_path, base)
    assert (config.dropout, config.config) == (0.1, str(tmp_path))
    assert (config.layers, config.kv_heads, config.vocab_size) == (3, 2, VOCABULARY)
    assert (config.rope_scaling, config.rope_theta, config.rope_factor) == ("llama3", 1000.0, 8.0)
    with pytest.raises(InputError, match=r"cannot read .*config.json"):
        load_config(tmp_path / "none")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="model_type = None"):
        load_config(tmp_path)


def test_export_refuses(tmp_path: Path) -> None:
    """A folder that exists, weights of another model, and a GPT with grouped queries."""
    saved("gpt2", tmp_path)
    config = load_config(tmp_path)
    weights = state(ours(tmp_path))
    for changed, folder, message in (
        (config, tmp_path, "exists"),
        (replace(config, layers=2), tmp_path / "new", "not of this model: blocks.2"),
        (replace(config, ffn_width=32), tmp_path / "new", "blocks.0.ffn.*has shape"),
        (replace(config, kv_heads=2), tmp_path / "new", "no grouped queries"),
    ):
        with pytest.raises(InputError, match=message):
            export(weights, changed, folder, sequence_length=POSITIONS)
    assert not (tmp_path / "new").exists()


def test_what_a_checkpoint_overrides_is_said(tmp_path: Path) -> None:
    """A shape that a preset or a flag set gives way to that of `model.config`, never in silence."""
    saved("plain", tmp_path)
    preset = RunConfig(model=ModelConfig(width=128, layers=3, heads=8, config=str(tmp_path)))
    said = overridden_shape(preset, published_shape(preset))
    assert said == f"config.json of model.config = {str(tmp_path)!r} says model.width = 64, not 128"
    plain = RunConfig(model=ModelConfig(config=str(tmp_path)))
    assert overridden_shape(plain, published_shape(plain)) == ""
    assert overridden_shape(RunConfig(), published_shape(RunConfig())) == ""
