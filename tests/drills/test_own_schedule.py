"""Drill: a schedule from one file of the user's own, by name, with the bits of one strand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError

QUICK = PlanConfig(cluster="h100")
MICRO_BATCHES = 5


def one_step(schedule: str) -> tuple[dict[str, Tensor], interlace.Step]:
    """Losses and gradients of a small model with dropout, from the same seed each time."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
    batches = [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(MICRO_BATCHES)]

    def loss_fn(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(module(x), y)

    step = interlace.compile_step(model, loss_fn, batches[0], schedule=schedule, config=QUICK)
    seen = {"loss": step(batches)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        seen[name] = parameter.grad.clone()
    return seen, step


def test_a_step_runs_it() -> None:
    """The actions are those of the file; loss and gradients have the bits of one strand."""
    mine, step = one_step("own_schedule:two_ahead")
    plain, _ = one_step("one_strand")
    assert step.plan.schedule == "own_schedule:two_ahead"
    assert [str(action) for action in step.actions(MICRO_BATCHES)] == [
        "forward 1", "forward 2", "forward 3 | backward 1", "forward 4 | backward 2",
        "forward 5 | backward 3", "backward 4", "backward 5",
    ]  # fmt: skip
    assert mine.keys() == plain.keys()
    assert len(mine) == 5
    assert all(torch.equal(mine[name], plain[name]) for name in mine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_schedul:two_ahead", "schedule 'own_schedul:two_ahead' cannot be imported"),
        ("own_schedule:two_behind", "'own_schedule' has no 'two_behind'"),
        ("own_schedule", "unknown schedule 'own_schedule'"),
        ("own_schedule:", "schedule 'own_schedule:' is not module:name"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    """By name, with what to give instead."""
    with pytest.raises(InputError, match=message) as caught:
        one_step(name)
    assert caught.value.hint
