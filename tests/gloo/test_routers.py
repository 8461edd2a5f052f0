"""Proves what routers promise for every draw of tokens: different experts, groups that are kept,
capacities, counts of what is dropped, and a bias that moves towards even loads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.model_config import ExpertsConfig
from interlace.models.routers import (
    Router,
    Routing,
    auxiliary_loss,
    capacity,
    dropped,
    updated_bias,
)

WIDTH = 8


def routed(config: ExpertsConfig, rows: int, seed: int, *, skew: float = 0.0) -> Routing:
    """What a random router makes of random tokens; `skew` favours the first expert."""
    draw = torch.Generator().manual_seed(seed)
    router = Router(config, WIDTH)
    with torch.no_grad():
        router.weight.normal_(generator=draw)
        router.weight[0] += skew
    with torch.no_grad():
        return router(torch.randn(rows, WIDTH, generator=draw) + skew)


@st.composite
def configs(draw: st.DrawFn) -> ExpertsConfig:
    """Experts that the rules of `[model.experts]` let pass."""
    router = draw(st.sampled_from(["softmax", "sigmoid", "sparse_mixer"]))
    mixer = router == "sparse_mixer"
    groups = 1 if mixer else draw(st.integers(1, 4))
    each = draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    chosen = 2 if mixer else draw(st.integers(1, min(4, kept * each)))
    return ExpertsConfig(
        count=groups * each,
        chosen=chosen,
        router=router,
        groups=groups,
        groups_kept=kept,
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        capacity_factor=draw(st.sampled_from([0.0, 0.5, 1.0, 1.25])),
        balance="none" if mixer else draw(st.sampled_from(["none", "bias", "auxiliary_loss"])),
    )


@settings(deadline=None, max_examples=60)
@given(configs(), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([0.0, 2.0]))
def test_capacity_and_counts(config: ExpertsConfig, rows: int, seed: int, skew: float) -> None:
    """No expert takes more than ceil(factor x rows x chosen / experts) rows, the first ones of its
    own; what is dropped is counted; tokens choose different experts of the groups that are kept."""
    found, limit = routed(config, rows, seed, skew=skew), capacity(config, rows)
    free = ExpertsConfig(**{**vars(config), "capacity_factor": 0.0})
    wanted = routed(free, rows, seed, skew=skew)
    if config.capacity_factor:
        assert limit == math.ceil(config.capacity_factor * rows * config.chosen / config.count)
    taken = torch.zeros(config.count, dtype=torch.int64)
    lost = 0
    for row in range(rows):
        chosen = wanted.ids[row].tolist()
        assert len(set(chosen)) == config.chosen
        size = config.count // config.groups
        assert len({expert // size for expert in chosen}) <= config.groups_kept
        for place, expert in enumerate(chosen):
            kept = int(taken[expert]) < limit
            taken[expert] += kept
            lost += not kept
            assert int(found.ids[row, place]) == (expert if kept else config.count)
            gate = float(wanted.gates[row, place]) if kept else 0.0
            assert float(found.gates[row, place]) == gate
    assert int(taken.max()) <= limit
    assert int(dropped(found.load, limit)) == lost
    assert torch.equal(found.load, wanted.ids.flatten().bincount(minlength=config.count))
    assert found.gates.dtype == torch.float32
    assert (found.probability is not None) == (config.balance == "auxiliary_loss")


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_gates_add_up(router: str) -> None:
    """Renormalised gates of a token add up to the scale."""
    config = ExpertsConfig(count=8, chosen=3, router=router, scale=2.5)  # type: ignore[arg-type]
    total = routed(config, 50, 1).gates.sum(1)
    torch.testing.assert_close(total, torch.full_like(total, 2.5))


def test_auxiliary_loss_of_even_loads() -> None:
    """It is the number of experts of a token where loads and probabilities are even, and larger
    where both favour the same experts."""
    even, uneven = torch.full((4,), 20), torch.tensor([50, 10, 10, 10])
    assert auxiliary_loss(even, torch.full((4,), 10.0), 40).item() == pytest.approx(2.0)
    assert auxiliary_loss(uneven, uneven / 2.0, 40).item() > 2.5


def test_the_bias_moves_towards_even_loads() -> None:
    """Experts below the mean of their layer are raised, those above lowered, others stay; in a few
    hundred steps a router that favours some experts sends each about as many tokens."""
    bias = updated_bias(torch.zeros(2, 3), torch.tensor([[1, 2, 3], [5, 0, 1]]), 0.5)
    assert bias.tolist() == [[0.5, 0.0, -0.5], [-0.5, 0.5, 0.5]]

    config = ExpertsConfig(count=8, chosen=2, router="sigmoid", balance="bias")
    draw = torch.Generator().manual_seed(3)
    router, imbalances = Router(config, WIDTH), []
    with torch.no_grad():
        router.weight.normal_(generator=draw).add_(torch.linspace(-1, 1, 8)[:, None])
    tokens = torch.randn(512, WIDTH, generator=draw) + 0.5
    for _ in range(300):
        load = router(tokens).load
        imbalances.append(float(load.max() / load.float().mean()))
        assert router.bias is not None
        router.bias.copy_(updated_bias(router.bias, load, 0.003))
    assert imbalances[0] > 2
    assert imbalances[-1] < 1.15


def test_gates_alone_carry_gradients() -> None:
    """The choice is made on values: ids have no gradient, the bias is no parameter, and a router
    without a renormalised gate learns by the gates of chosen experts."""
    config = ExpertsConfig(count=4, chosen=1, renormalise=False, balance="bias")
    router = Router(config, WIDTH)
    torch.nn.init.normal_(router.weight)
    found = router(torch.randn(6, WIDTH))
    assert not found.ids.requires_grad
    assert not found.load.requires_grad
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert list(router.state_dict()) == ["weight", "bias"]
    found.gates.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() > 0
