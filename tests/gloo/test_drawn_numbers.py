"""What strangers' forwards do beside arithmetic: they draw random numbers, write to logs, and run
layers step by step."""

import logging
import warnings

import pytest
import torch
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
from interlace.step import Step

pytestmark = pytest.mark.gloo
QUICK = PlanConfig(cluster="h100", search="list")
BOUND = 1e-12
"""Of relative differences in float64."""
LOGGER = logging.getLogger("forward")
COUNT, WIDTH, KEEP = 3, 8, 0.75
DRAWN = torch.ops.interlace.drawn


class Deep(nn.Module):
    """Blocks with stochastic depth (as torchvision and timm draw it), behind noise whose strength
    is drawn too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) to the same."""
        strength = torch.randint(1, 5, (x.shape[0], 1)) / 10
        x = x + torch.randn_like(x) * strength
        for block in self.blocks:
            kept = x.new_empty((x.shape[0], 1)).bernoulli_(KEEP)
            x = x + block(x) * (kept / KEEP)
        return x * torch.rand(x.shape[0], 1, dtype=x.dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean square."""
    return nn.functional.mse_loss(model(x), y)


def batches_of() -> list[tuple[Tensor, ...]]:
    """Inputs and targets."""
    draw = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randn(6, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))
        for _ in range(COUNT)
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compiled(strands: int) -> tuple[nn.Module, Step]:
    """A model, and its step after torch's own seed 7."""
    model = Deep()
    torch.manual_seed(7)
    step = interlace.compile_step(model, loss_of, batches_of()[0], strands=strands, config=QUICK)
    return model, step


def draws_of(step: Step, seeds: Tensor) -> list[Tensor]:
    """What the forward of a micro-batch draws, in the order of the code."""
    nodes = step.strands.graphs["forward"].graph.find_nodes(
        op="call_function", target=DRAWN.default
    )
    return [DRAWN(seeds, *node.args[1:]) for node in nodes]


def test_draws_are_those_of_plain_code() -> None:
    """Losses and gradients are those of eager code that is given the same numbers, and do not
    depend on the number of strands. The next step draws others."""
    model, step = compiled(strands=2)
    drawn = [draws_of(step, step.seeds(number)) for number in range(COUNT)]
    loss = step(batches_of())
    ours = gradients(model)
    alike, one_by_one = compiled(strands=1)
    assert one_by_one(batches_of()).equal(loss)
    assert all(ours[name].equal(each) for name, each in gradients(alike).items())
    plain = Deep()
    total = torch.zeros((), dtype=torch.float64)
    for (x, y), (strength, noise, first, second, scale) in zip(batches_of(), drawn, strict=True):
        begun = x + noise * (strength / 10)
        half = begun + plain.blocks[0](begun) * (first / KEEP)
        whole = half + plain.blocks[1](half) * (second / KEEP)
        total = total + nn.functional.mse_loss(whole * scale, y) / COUNT
    total.backward()
    torch.testing.assert_close(loss, total.detach(), rtol=BOUND, atol=0)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(ours[name], gradient, rtol=BOUND, atol=BOUND)
    assert not step(batches_of()).equal(loss)


class Gated(nn.Module):
    """Drops each value of its first layer with a probability that another layer computes, and whole
    samples by `torch.bernoulli` of one number (as transformers draws them)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, kept: Tensor | None = None, alive: Tensor | None = None) -> Tensor:
        """(batch, WIDTH) to the same; `kept` and `alive` take the place of what is drawn."""
        chance = torch.sigmoid(self.gate(x))
        if kept is None:
            kept = torch.bernoulli(chance)
        if alive is None:
            alive = torch.bernoulli(torch.full((x.shape[0], 1), KEEP, dtype=torch.float32))
        return self.first(x) * (kept + chance - chance.detach()) * alive


def test_probabilities_of_each_element() -> None:
    """`torch.bernoulli` of a tensor is 1 where the uniform numbers of its draw are below it."""
    model = Gated()
    step = interlace.compile_step(model, loss_of, batches_of()[0], config=QUICK)
    uniform = [draws_of(step, step.seeds(number)) for number in range(COUNT)]
    assert uniform[0][0].dtype == torch.float64
    loss = step(batches_of())
    plain, total, share = Gated(), torch.zeros((), dtype=torch.float64), []
    for (x, y), (of_value, of_sample) in zip(batches_of(), uniform, strict=True):
        kept = (of_value < torch.sigmoid(plain.gate(x))).double()
        alive = (of_sample < KEEP).float()
        share.append(float(kept.mean()))
        total = total + nn.functional.mse_loss(plain(x, kept, alive), y) / COUNT
    assert 0 < min(share) <= max(share) < 1
    total.backward()
    torch.testing.assert_close(loss, total.detach(), rtol=BOUND, atol=0)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=BOUND, atol=BOUND)


class Categories(nn.Linear):
    """Scales its output by a number from a distribution that no seed is known for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.multinomial(torch.ones(x.shape[0], 3), 1)


def test_other_distributions_are_refused_with_what_would_do() -> None:
    """By the name of the operator, and not with advice on attention."""
    model = Categories(WIDTH, WIDTH).double()
    with pytest.raises(InputError, match=r"aten\.multinomial") as refused:
        interlace.compile_step(model, loss_of, batches_of()[0], config=QUICK)
    assert refused.value.hint is not None
    assert "torch.rand, randn, randint, bernoulli, uniform_ or exp" in refused.value.hint


def test_numbers_are_what_they_are_called() -> None:
    """Each kind has its values and its mean; equal seeds give equal numbers, others others."""
    device, seeds = torch.device("cpu"), torch.tensor([11])

    def drawn(kind: str, low: float, high: float, dtype: torch.dtype, seed: int = 3) -> Tensor:
        return DRAWN(seeds, seed, kind, low, high, [200, 100], dtype, device)

    kept = drawn("bernoulli", 0, 0.25, torch.float32)
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert float(kept.mean()) == pytest.approx(0.25, abs=0.02)
    uniform = drawn("uniform", 0, 1, torch.float64)
    assert 0 <= float(uniform.min()) < 0.01
    assert 0.99 < float(uniform.max()) < 1
    normal = drawn("normal", 0, 1, torch.float32)
    assert (float(normal.mean()), float(normal.std())) == pytest.approx((0, 1), abs=0.03)
    whole = drawn("integers", -2, 3, torch.int64)
    assert set(whole.unique().tolist()) == {-2, -1, 0, 1, 2}
    assert drawn("normal", 0, 1, torch.float32).equal(normal)
    other = drawn("normal", 0, 1, torch.float32, seed=4)
    assert abs(float((normal * other).mean())) < 0.03
    assert not DRAWN(seeds + 1, 3, "normal", 0.0, 1.0, [9], torch.float32, device).equal(
        DRAWN(seeds, 3, "normal", 0.0, 1.0, [9], torch.float32, device)
    )


def test_evaluation_of_what_draws_is_refused() -> None:
    """What the forward is without its random numbers is not known."""
    _, step = compiled(strands=2)
    with pytest.raises(InputError, match="draws random numbers beside dropout"):
        step.evaluate(batches_of())
    with pytest.raises(InputError, match="draws random numbers"):
        step.compare(batches_of())


class Split(nn.Module):
    """A layer cut over ranks, and a mask drawn from a size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) to the same."""
        return self.narrow(self.wide(x)) * torch.rand(x.shape[0], 1)


def split() -> str:
    """A child: why such a layer is refused."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        model = parallelize_module(Split(), mesh, plan)
        batch = (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
        try:
            interlace.compile_step(model, loss_of, batch, mesh=mesh, config=QUICK)
        except InputError as error:
            return f"{error.message} | {error.hint}"
    return ""


def test_draws_beside_parts_of_weights_are_refused() -> None:
    """Whether ranks need equal numbers cannot be said; a tensor of the batch can be given."""
    for result in run_ranks("test_drawn_numbers:split", 2, timeout_s=60):
        assert "ranks hold parts of weights" in result.value
        assert "one more tensor of each batch" in result.value


class Talking(nn.Linear):
    """Writes to logs and warns in forward, as libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) to the same."""
        LOGGER.warning("a batch of %s", x.shape[0])
        warnings.warn("deprecated", stacklevel=2)
        return super().forward(x)


class Recurrent(nn.Module):
    """An LSTM or a GRU between linears."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.cell = kind(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH), as one sequence, to the same."""
        return self.out(self.cell(x[None])[0][0])


@pytest.mark.parametrize("name", ["logs", "LSTM", "GRU"])
@pytest.mark.filterwarnings("ignore:deprecated")
def test_the_step_is_that_of_eager_pytorch(name: str) -> None:
    """A forward that logs and warns, and recurrent layers, in float32, which oneDNN's fused layer
    takes outside of graphs."""
    module = Talking(WIDTH, WIDTH) if name == "logs" else Recurrent(getattr(nn, name))
    batches = [(x.float(), y.float()) for x, y in batches_of()]
    step = interlace.compile_step(module, loss_of, batches[0], config=QUICK)
    found = step.compare(batches, repeats=0)
    assert found.worst < 1e-5, found.summary()
    assert all(eager == pytest.approx(ours, rel=1e-6) for eager, ours in found.losses)
