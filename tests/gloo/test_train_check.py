"""`interlace train --check`: one step against eager PyTorch, before training."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training import Workplace

from interlace.config import CompareConfig, ModelConfig, RunConfig
from interlace.errors import InputError, RunError
from interlace.rules import check
from interlace.train.gradient_check import check_gradients

QUICK = ("--check", "--plan.cluster", "h100", "--plan.trial_steps", "0", "--train.steps", "1",
         "--train.evaluate_batches", "1", "--output.record_every", "0")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ((), 1e-5),
        (("--parallel.tensor", "1", "--parallel.data_shard", "2", "--train.dtype", "bfloat16"),
         2e-2),
    ],
    ids=["tensor", "sharded"],
)  # fmt: skip
def test_a_run_is_checked_before_it_trains(
    tmp_path: Path, words: tuple[str, ...], bound: float
) -> None:
    """Losses, gradients by name and times are told and written; then the run goes on."""
    place = Workplace(tmp_path)
    said = place.train(*QUICK, *words, out="out")
    assert "checked against eager PyTorch, rank 0:\nlosses of 4 micro-batches: " in said
    assert "times as fast, the median of 3 steps in turn" in said
    (event,) = place.events("out", "check")
    assert event["losses_off"] < bound
    assert event["gradients_off"] < bound
    assert event["worst_gradient"]
    assert len(event["eager_ms"]) == len(event["step_ms"]) == 3
    assert len(place.losses("out")) == 1


def runner(weights: dict[str, nn.Parameter], loss: float, gradients: dict[str, float]) -> Any:
    """A way to run a step that always gives these."""

    class Runner:
        losses = (torch.tensor(loss),)

        def __call__(self, batches: object) -> None:
            for name, value in gradients.items():
                weights[name].grad = torch.full((3,), value)

    return Runner()


@pytest.mark.parametrize(
    ("loss", "gradients", "why"),
    [
        (1.0, {"a": 2.0, "b": 0.1}, ""),
        (1.0, {"a": 2.0, "b": 0.101}, ""),  # off by 1 % of itself, and 0.05 % of the largest
        (1.0, {"a": 2.0, "b": 0.2}, "the gradient of 'b' on rank 0 by 0.05 of the largest"),
        (1.0, {"a": 2.0}, "by one way only: b"),
        (1.0, {"a": math.nan, "b": 0.1}, "the gradient of 'a' on rank 0 by inf"),
        (1.1, {"a": 2.0, "b": 0.1}, "losses are off by 0.1"),
    ],
)
def test_a_wrong_step_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, loss: float, gradients: dict[str, float], why: str
) -> None:
    """The worst gradient is named, with its rank and the bound."""
    monkeypatch.setattr("interlace.train.gradient_check.gather_json", lambda value, group: [value])
    masters = {name: nn.Parameter(torch.zeros(3)) for name in "ab"}
    session: Any = SimpleNamespace(
        main=None,
        config=RunConfig(),
        weights=SimpleNamespace(masters=masters, parameters=list(masters.values())),
        runners={"eager": runner(masters, 1.0, {"a": 2.0, "b": 0.1})},
        runner=runner(masters, loss, gradients),
    )
    batches = [(torch.zeros(1), torch.zeros(1))]
    if not why:
        text, values = check_gradients(session, batches)
        assert "gradients: " in text
        assert values["gradients_off"] < values["bound"]
        return
    with pytest.raises(RunError, match=why):
        check_gradients(session, batches)


def test_what_cannot_be_checked_is_refused_before_anything_starts() -> None:
    asked = replace(RunConfig(), compare=CompareConfig(check=True))
    parallel = replace(asked.parallel, pipeline=2)
    for config, why in (
        (replace(asked, strands="eager"), 'strands = "eager"'),
        (replace(asked, model=ModelConfig(dropout=0.1)), r"model\.dropout = 0\.1"),
        (replace(asked, parallel=parallel), r"parallel\.pipeline = 2 and compare\.check = True"),
    ):
        with pytest.raises(InputError, match=why) as refused:
            check(config)
        assert refused.value.hint


def test_the_draws_of_a_model_of_others_are_refused() -> None:
    """Their dropout is seen in the traced graph only."""
    session: Any = SimpleNamespace(
        main=SimpleNamespace(strands=SimpleNamespace(takes_seeds=True)), config=RunConfig()
    )
    with pytest.raises(InputError, match="draws random numbers"):
        check_gradients(session, [])
