"""Proves that the shipped models are what their names say, and that they are run files."""

from dataclasses import replace
from pathlib import Path

import pytest

import interlace.presets
from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.model_config import ModelConfig, expert_width_of
from interlace.rules import check

BILLIONS = {
    "phi-3.5-moe": (41.9, 6.6),
    "phi-31b-moe": (31.0, 5.0),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.1, 22.2),
    "deepseek-16b-moe": (16.4, 2.8),
}
"""Parameters of the models with experts, as published: all, and those that a token meets."""
FILES = sorted((Path(interlace.presets.__path__[0]) / "models").glob("*.toml"))


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """Of the whole model, and without the experts that a token does not meet; from shallow models
    without memory."""
    import torch

    from interlace.models import model_file

    def count(layers: int) -> int:
        with torch.device("meta"):
            build = model_file(config.architecture).build
            model = build(replace(config, layers=layers), config.vocab_size, 128)
        return sum(parameter.numel() for parameter in model.parameters())

    first = config.experts.dense_layers + 1
    total = count(first) + (config.layers - first) * (count(first + 1) - count(first))
    experts = config.experts
    each = 3 * config.width * expert_width_of(config)
    others = (config.layers - experts.dense_layers) * (experts.count - experts.chosen) * each
    return total, total - others if experts.count else total


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_model_presets(file: Path) -> None:
    """A preset loads as a run file, passes the rules on 8 tensor-parallel ranks, sets the model and
    nothing else, and has the number of parameters in its name."""
    config = load_run_config(str(file), {"parallel.tensor": "8"})
    check(config)
    assert replace(config, model=ModelConfig(), parallel=RunConfig().parallel) == RunConfig()
    found, met = (each / 1e9 for each in parameter_counts(config.model))
    if file.stem not in BILLIONS:
        billions = float(file.stem.rpartition("-")[2].removesuffix("b"))
        assert abs(found / billions - 1) < 0.06, found
        assert met == found
        return
    assert (found, met) == pytest.approx(BILLIONS[file.stem], rel=0.025)


def test_every_promised_model_is_there() -> None:
    """The sizes that the documentation lists."""
    names = " ".join(file.stem for file in FILES)
    assert set(BILLIONS) < {file.stem for file in FILES}
    for size in ("7b", "8b", "13b", "25b", "39b", "66b", "70b", "405b"):
        assert f"-{size}" in names
    assert sum(file.stem.startswith("gpt") for file in FILES) == 6
