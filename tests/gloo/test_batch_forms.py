"""Batches as training loops have them: dicts, lists, and what they hold."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.runtime.batch_form import BatchForm

pytestmark = pytest.mark.gloo
QUICK = PlanConfig(cluster="h100", search="list")
COUNT, WIDTH = 3, 6


class Pair(NamedTuple):
    """Inputs and targets."""

    x: Tensor
    y: Tensor


def pairs() -> list[Pair]:
    """Micro-batches."""
    draw = torch.Generator().manual_seed(4)
    return [
        Pair(*(torch.randn(5, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2)))
        for _ in range(COUNT)
    ]


def model_of() -> nn.Module:
    """A linear layer."""
    torch.manual_seed(1)
    return nn.Linear(WIDTH, WIDTH).double()


def mse(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(x, y)


FORMS: dict[str, tuple[Any, Any]] = {
    "tuple": (tuple, lambda m, x, y: mse(m(x), y)),
    "list": (list, lambda m, x, y: mse(m(x), y)),
    "dict": (Pair._asdict, lambda m, b: mse(m(b["x"]), b["y"])),
    "other mapping": (lambda p: UserDict(p._asdict()), lambda m, b: mse(m(b["x"]), b["y"])),
    "named tuple": (lambda p: p, lambda m, b: mse(m(b.x), b.y)),
    "tensor": (torch.stack, lambda m, b: mse(m(b[0]), b[1])),
    "nested": (
        lambda p: ({"in": [p.x, 0.5], "flag": True}, None, (p.y,)),
        lambda m, a, nothing, c: mse(m(a["in"][0]) * a["in"][1], c[0]) if a["flag"] else nothing,
    ),
    "one tensor twice": (lambda p: {"x": p.x, "y": p.x}, lambda m, b: mse(m(b["x"]), b["y"])),
}
"""How a batch is made of a pair, and its loss."""


@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradients_are_those_of_eager_code(name: str) -> None:
    """By plain autograd on the same batches, through every entry of a step."""
    make, loss_of = FORMS[name]
    batches = [make(pair) for pair in pairs()]
    module, plain = model_of(), model_of()
    step = interlace.compile_step(module, loss_of, batches[0], config=QUICK)
    loss = step(batches)
    is_spread = name in ("tuple", "list", "nested")
    losses = [loss_of(plain, *batch) if is_spread else loss_of(plain, batch) for batch in batches]
    expected = torch.stack(losses).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(step.evaluate(batches), expected.detach(), rtol=1e-12, atol=0)
    assert step.compare(batches, repeats=0).worst < 1e-12
    assert step.record(batches).length_ns > 0


def test_keys_may_come_in_another_order() -> None:
    """They say which tensor is which."""
    make, loss_of = FORMS["dict"]
    batches = [make(pair) for pair in pairs()]
    step = interlace.compile_step(model_of(), loss_of, batches[0], config=QUICK)
    turned = [dict(reversed(list(batch.items()))) for batch in batches]
    assert step(turned).equal(step(batches))


EXAMPLE = {"x": torch.zeros(2), "more": [1.5, None]}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(2)}, "a dict (keys: x), and the step was compiled for keys: x, more"),
        ({**EXAMPLE, "y": 1}, "a dict (keys: x, more, y)"),
        ({**EXAMPLE, "x": 3}, "micro-batch 0['x'] is int, and the step was compiled for a tensor"),
        ({**EXAMPLE, "more": [1.5, 2]}, "micro-batch 0['more'][1] is 2"),
        ({**EXAMPLE, "more": [1.5]}, "a list (parts: 1), and the step was compiled for parts: 2"),
        (torch.zeros(2), "micro-batch 0 is Tensor, and the step was compiled for a dict"),
    ],
)
def test_another_form_is_refused(batch: object, words: str) -> None:
    """With the place where it differs."""
    with pytest.raises(InputError) as caught:
        BatchForm(EXAMPLE).flat(batch, "micro-batch 0")
    assert words in caught.value.message
    assert caught.value.hint


def test_other_values_are_refused() -> None:
    """An object that is no tensor, deep inside."""
    with pytest.raises(InputError) as caught:
        BatchForm({"x": [torch.zeros(2), object()]})
    assert "example_inputs['x'][1] is object" in caught.value.message
