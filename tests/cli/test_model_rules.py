"""Proves that a model that can never work is refused before anything starts, by its key and with
what to set, and that the nested table of experts is read from files and flags."""

from pathlib import Path

import pytest

from interlace.cli.run_file import load_run_config, save_run_config
from interlace.errors import InputError
from interlace.rules import check

MOE = {"model.architecture": "moe", "model.experts.count": "8"}
WRONG = {
    "no experts": ({"model.experts.count": "0"}, "needs experts, and model.experts.count = 0"),
    "experts in a llama": ({"model.architecture": "llama"}, "'llama' has no experts"),
    "too many chosen": ({"model.experts.chosen": "9"}, "chosen = 9 of model.experts.count = 8"),
    "none chosen": ({"model.experts.chosen": "0"}, "chosen = 0 of"),
    "all layers dense": ({"model.experts.dense_layers": "4"}, "none of model.layers = 4"),
    "groups": ({"model.experts.groups": "3"}, "count = 8 cannot be divided into .*groups = 3"),
    "kept": ({"model.experts.groups_kept": "2"}, "groups_kept = 2 is more than .*groups = 1"),
    "few in groups": (
        {"model.experts.groups": "4", "model.experts.chosen": "3"},
        "1 groups of 2 hold 2 experts, fewer than model.experts.chosen = 3",
    ),
    "judged by two": (
        {
            "model.experts.groups": "8",
            "model.experts.groups_kept": "4",
            "model.experts.router": "sigmoid",
        },
        "8 experts in 8 groups have 1 each",
    ),
    "mixer of three": (
        {"model.experts.router": "sparse_mixer", "model.experts.chosen": "3"},
        "chooses 2 experts, and model.experts.chosen = 3",
    ),
    "mixer with bias": (
        {"model.experts.router": "sparse_mixer", "model.experts.balance": "bias"},
        "cannot go with model.experts.balance = 'bias'",
    ),
    "capacity": ({"model.experts.capacity_factor": "0.3"}, "0.3 x model.experts.chosen = 2"),
    "negative": ({"model.experts.capacity_factor": "-1"}, "must not be negative"),
    "scale": ({"model.experts.scale": "0"}, "scale = 0.0 must be positive"),
    "split": (
        {"model.experts.ffn_width": "9", "parallel.tensor": "2", "model.vocab_size": "256"},
        "model.experts.ffn_width = 9 cannot be divided among parallel.tensor = 2",
    ),
    "long without factors": ({"model.rope_scaling": "long"}, "has 0 numbers, and the 32 pairs"),
    "factors without long": (
        {"model.rope_short_factors": "1.0,2.0"},
        "has 2 numbers, and model.rope_scaling = 'none' reads none",
    ),
    "norm in a llama": (
        {"model.architecture": "llama", "model.experts.count": "0", "model.norm": "layer"},
        "model.norm = 'layer' means nothing to model.architecture = 'llama'",
    ),
    "head norms in a gpt": (
        {
            "model.architecture": "gpt",
            "model.experts.count": "0",
            "model.query_key_norm": "true",
        },
        "query_key_norm = True means nothing",
    ),
    "of transformers": (
        {"model.source": "hugging_face", "model.config": "somewhere"},
        "has the experts that its config.json says",
    ),
}


def load(tmp_path: Path, text: str, changed: dict[str, str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    check(load_run_config(str(file), changed))


@pytest.mark.parametrize("case", WRONG)
def test_senseless_models_are_refused(case: str, tmp_path: Path) -> None:
    """With the key, the numbers and a hint."""
    changed, message = WRONG[case]
    load(tmp_path, "", MOE)
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path, "", {**MOE, **changed})
    assert error.value.hint


def test_the_table_of_experts(tmp_path: Path) -> None:
    """It is read from a file and from flags, saved whole, and a wrong key in it is named."""
    file, again = tmp_path / "run.toml", tmp_path / "again.toml"
    file.write_text(
        '[model]\narchitecture = "moe"\nrope_scaling = "long"\nhead_size = 4\n'
        "rope_short_factors = [1.0, 2]\n[model.experts]\ncount = 8\nchosen = 3\n"
    )
    flags = {"model.experts.chosen": "4", "model.rope_long_factors": "1.5,3"}
    config = load_run_config(str(file), flags)
    check(config)
    assert (config.model.experts.count, config.model.experts.chosen) == (8, 4)
    assert config.model.rope_short_factors == (1.0, 2.0)
    assert config.model.rope_long_factors == (1.5, 3.0)
    save_run_config(config, again)
    assert load_run_config(str(again)) == config
    with pytest.raises(InputError, match=r"unknown key model.experts.chose") as error:
        load_run_config(str(file), {"model.experts.chose": "4"})
    assert "model.experts.chosen" in error.value.hint
    with pytest.raises(InputError, match=r"unknown key model.capacity_factor") as error:
        load_run_config(str(file), {"model.capacity_factor": "1"})
    assert "model.experts.capacity_factor" in error.value.hint
    with pytest.raises(InputError, match=r"rope_long_factors = 'x' must be"):
        load_run_config(str(file), {"model.rope_long_factors": "x"})
