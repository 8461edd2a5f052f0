"""Proves that the shipped models are what their names say, and that they are run files."""

from dataclasses import replace
from pathlib import Path

import pytest

import interlace.presets
from interlace.cli.run_file import load_run_config
from interlace.config import ModelConfig, RunConfig
from interlace.rules import check

FILES = sorted((Path(interlace.presets.__path__[0]) / "models").glob("*.toml"))


def parameter_count(config: ModelConfig) -> int:
    """Of the whole model, from models of one and of two layers without memory."""
    import torch

    from interlace.models import model_file

    def count(layers: int) -> int:
        with torch.device("meta"):
            build = model_file(config.architecture).build
            model = build(replace(config, layers=layers), config.vocab_size, 128)
        return sum(parameter.numel() for parameter in model.parameters())

    return count(1) + (config.layers - 1) * (count(2) - count(1))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_model_presets(file: Path) -> None:
    """A preset loads as a run file, passes the rules on 8 tensor-parallel ranks, sets the model and
    nothing else, and has the number of parameters in its name."""
    config = load_run_config(str(file), {"parallel.tensor": "8"})
    check(config)
    assert replace(config, model=ModelConfig(), parallel=RunConfig().parallel) == RunConfig()
    billions = float(file.stem.rpartition("-")[2].removesuffix("b"))
    found = parameter_count(config.model) / 1e9
    assert abs(found / billions - 1) < 0.06, found


def test_every_promised_model_is_there() -> None:
    """The sizes that the documentation lists."""
    names = " ".join(file.stem for file in FILES)
    for size in ("7b", "8b", "13b", "25b", "39b", "66b", "70b", "405b"):
        assert f"-{size}" in names
    assert sum(file.stem.startswith("gpt") for file in FILES) == 6
