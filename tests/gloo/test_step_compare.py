"""`step.compare`: a compiled step against plain autograd on the same module."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.runtime.eager_check import GradientDifference, StepComparison
from interlace.runtime.gradients import ParameterGradients

pytestmark = pytest.mark.gloo
QUICK = PlanConfig(cluster="h100", search="list")
BOUND = 1e-12
"""Of relative differences in float64, where sums over ranks add in another order."""
BATCHES = 3


class Perceptron(nn.Module):
    """Two layers behind a norm, with a weight that nothing uses and one that is not trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.ones(8))
        self.dropout = dropout
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, 8) to the same."""
        hidden = nn.functional.gelu(self.wide(self.norm(x)))
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        return self.narrow(hidden) * self.frozen + self.shift


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean square."""
    return nn.functional.mse_loss(model(x), y)


def batches_of(seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Inputs and targets."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2, 4, 8)
    return [
        tuple(torch.randn(shape, dtype=torch.float64, generator=draw) for _ in range(2))
        for _ in range(BATCHES)
    ]


def test_equal_bits_are_seen() -> None:
    """Of one micro-batch on one rank, whose gradients are added to nothing."""
    model, batches = Perceptron(), batches_of()
    step = interlace.compile_step(model, loss_of, batches[0], strands=1, config=QUICK)
    found = step.compare(batches[:1], repeats=0)
    assert found.same_bits, found.summary()
    assert found.worst == 0
    assert "6 of 6 equal to the last bit" in found.summary()


def test_nothing_is_changed() -> None:
    """Gradients, buffers and the number of the next step are afterwards what they were, and later
    steps add to gradients as before. Matmuls add to sums themselves, which rounds less often than
    autograd's sums."""
    model, batches = Perceptron(), batches_of()
    step = interlace.compile_step(model, loss_of, batches[0], config=QUICK)
    step(batches)
    given = {n: p.grad for n, p in model.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in given.items()}
    found = step.compare(batches, repeats=2)
    assert found.worst < BOUND, found.summary()
    names = [n for n, g in given.items() if g is not None]
    assert sorted(each.name for each in found.gradients) == sorted(names)
    assert "unused" not in names
    assert len(found.losses) == BATCHES
    assert all(eager == compiled for eager, compiled in found.losses)
    assert len(found.eager_ns) == len(found.step_ns) == 2
    assert "times as fast" in found.summary()
    assert step.number == 2
    for name, parameter in model.named_parameters():
        assert parameter.grad is given[name]
        if parameter.grad is not None:
            assert parameter.grad.equal(values[name])
    step(batches)  # adds, as under autograd
    for name in names:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        torch.testing.assert_close(gradient, 2 * values[name], rtol=BOUND, atol=0)


def test_a_wrong_gradient_is_named() -> None:
    """One that is a thousandth too large, and one that is not there."""
    model, batches = Perceptron(), batches_of()
    step = interlace.compile_step(model, loss_of, batches[0], config=QUICK)
    finish = ParameterGradients.finish

    def wrong(self: ParameterGradients) -> None:
        finish(self)
        assert model.wide.weight.grad is not None
        model.wide.weight.grad.mul_(1.001)
        model.norm.bias.grad = None

    with patch.object(ParameterGradients, "finish", wrong):
        found = step.compare(batches, repeats=0)
    assert not found.same_bits
    assert found.missing == ("norm.bias",)
    assert found.worst == float("inf")
    assert found.gradients[0].name == "wide.weight"
    assert found.gradients[0].relative == pytest.approx(1e-3)
    said = found.summary()
    assert "wide.weight" in said
    assert "by one way only: norm.bias" in said
    assert "median" not in said


def test_a_step_says_what_it_is() -> None:
    """Schedule, operators, and what is predicted of each phase; one strand has no plan."""
    batch = batches_of()[0]
    config = PlanConfig(cluster="h100")  # the default search
    two = interlace.compile_step(Perceptron(), loss_of, batch, config=config)
    operators = sum(len(graph.operators) for graph in two.strands.op_graphs.values())
    assert repr(two).startswith(
        f"Step(schedule two_strand, {operators} operators, no collectives, planned by merge: "
    )
    assert all(f" {phase} " in repr(two) for phase in ("forward", "forward+backward", "backward"))
    one = interlace.compile_step(Perceptron(), loss_of, batch, strands=1, config=QUICK)
    assert repr(one) == (
        f"Step(schedule one_strand, {operators} operators, no collectives, in traced order)"
    )


def test_a_nan_is_the_worst() -> None:
    """A difference that is no number comes first, and is never equal."""
    one = GradientDifference(name="a", largest=1.0, difference=float("nan"))
    found = StepComparison(
        losses=((1.0, 1.0),), gradients=(one,), missing=(), eager_ns=(), step_ns=()
    )
    assert not found.same_bits
    assert "nan" in found.summary()


def two_axes() -> list[Any]:
    """A child: tensor parallelism, then replicas that see different data."""
    with gloo_group():
        found = []
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        model = parallelize_module(Perceptron(), mesh, plan)
        batches = batches_of()
        step = interlace.compile_step(model, loss_of, batches[0], mesh=mesh, config=QUICK)
        found.append(step.compare(batches, repeats=1))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        model, batches = Perceptron(), batches_of(seed=dist.get_rank())
        step = interlace.compile_step(model, loss_of, batches[0], mesh=mesh, config=QUICK)
        found.append(step.compare(batches, repeats=1))
        return [
            (each.worst, [list(pair) for pair in each.losses], len(each.gradients))
            for each in found
        ]


def test_ranks_compare_their_parts() -> None:
    """Gradients of DTensors and means over replicas are those of eager PyTorch, up to rounding."""
    results = [result.value for result in run_ranks("test_step_compare:two_axes", 2, timeout_s=90)]
    for worst, losses, count in (each for found in results for each in found):
        assert worst < BOUND
        assert all(eager == pytest.approx(ours, rel=BOUND) for eager, ours in losses)
        assert count == 6
    replicas = [found[1][1] for found in results]
    assert replicas[0] != replicas[1]  # each rank compares its own micro-batches


def test_what_cannot_be_compared_is_refused() -> None:
    """Masks of dropout are not PyTorch's."""
    model, batches = Perceptron(dropout=0.5), batches_of()
    step = interlace.compile_step(model, loss_of, batches[0], config=QUICK)
    with pytest.raises(InputError, match="draws random numbers") as caught:
        step.compare(batches)
    assert "with dropout 0 and without noise" in caught.value.hint
    assert all(p.grad is None for p in model.parameters())
