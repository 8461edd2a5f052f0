"""Proves that `interlace train` takes stages that are laid out each in its own way: losses and
norms of one rank within float32 rounding, checkpoints that go on in another layout.

Wide are six ranks with ZeRO-3, stages that take up what others saved, and a model of transformers,
which `test_stage_layouts_models.py` has in such stages too."""

from typing import Any

import pytest
import torch
from checkpoint_runs import Runs
from test_train_pipeline import published, save_small_llama

from wide import WIDE

STEPS, SAVED = 4, 2
COMMON: dict[str, Any] = {
    "parallel__tensor": 1,
    "model__layers": 4,
    "train__steps": STEPS,
    "checkpoint__every": SAVED,
}
ONE = COMMON | {"train__micro_batch_size": 2}
APART: dict[str, Any] = COMMON | {
    "parallel__pipeline": 2,
    "strands": "2",
    "train__micro_batch_size": 1,
    "pipeline__schedule": "zb_v",
}
NARROW: dict[str, Any] = APART | {"pipeline__stages": "tensor=2,data_replicate=2"}
LARGE: dict[str, Any] = APART | {
    "pipeline__stages": "data_shard=2 tensor=2,tensor=2",
    "train__recompute": "layer",
    "pipeline__split_at": "model.blocks.1,model.blocks.2,model.blocks.3",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One rank, whose micro-batch has as many sequences as the stages deal out; and stages."""
    runs = Runs(tmp_path_factory.mktemp("layouts"))
    runs.train("one", 1, **ONE)
    runs.train("narrow", 4, **NARROW)
    return runs


def numbers(runs: Runs, out: str) -> list[float]:
    """Losses and norms of all gradients."""
    return [event[key] for event in runs.events(out, "step") for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("out", ["narrow", pytest.param("large", marks=WIDE)])
def test_losses_and_norms_are_those_of_one_rank(runs: Runs, out: str) -> None:
    """tp 2, then two replicas; and ZeRO-3 x tp 2 with layers computed again, then tp 2."""
    if out == "large":
        runs.train(out, 6, **LARGE)
    assert numbers(runs, out) == pytest.approx(numbers(runs, "one"), rel=1e-5)
    assert len(runs.events("narrow", "evaluate")) == len(runs.events("one", "evaluate")) > 0


@pytest.mark.parametrize(
    ("out", "ranks", "settings"),
    [
        ("alone", 1, ONE),
        pytest.param(
            "other", 3, APART | {"pipeline__stages": "tensor=1,data_replicate=2"}, marks=WIDE
        ),
    ],
)
def test_checkpoints_go_on_in_another_layout(
    runs: Runs, out: str, ranks: int, settings: dict[str, Any]
) -> None:
    """What stages of one layout saved a single rank takes up, and so do stages of another."""
    source = runs.checkpoint("narrow", SAVED)
    runs.train(out, ranks, **settings | {"checkpoint__every": 0, "checkpoint__resume": source})
    assert runs.losses(out) == pytest.approx(runs.losses("one")[SAVED:], rel=1e-5)


@WIDE
def test_a_model_of_transformers(runs: Runs) -> None:
    """With its published plan for tensor parallelism, and an untied head."""
    folder = runs.folder / "published"
    save_small_llama(folder, tied=False)
    model = published(folder)
    runs.train("hf-one", 1, **ONE | model)
    runs.train("hf", 3, **APART | model | {"pipeline__stages": "tensor=2,tensor=1",
                                          "train__micro_batch_size": 2,
                                          "pipeline__schedule": "one_f_one_b"})  # fmt: skip
    assert runs.losses("hf") == pytest.approx(runs.losses("hf-one"), rel=1e-5)
    assert torch.isfinite(torch.tensor(runs.losses("hf"))).all()
