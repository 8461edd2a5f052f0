"""`interlace.compile_step` on a module that is not ours: the MLP-Mixer of the examples."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import interlace
from interlace.config import OverlapConfig, PlanConfig
from interlace.errors import InputError, PeerError
from interlace.parallel.local_parts import local

_functional = torch.ops._c10d_functional
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QUICK = PlanConfig(cluster="h100", search="list")
GRADIENT_BOUND = 1e-10
"""Largest difference over the largest gradient, in float64. (The bias before a norm has the
gradient 0, up to rounding.)"""


def example() -> ModuleType:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("vision_mixer")


def mixer() -> nn.Module:
    torch.manual_seed(3)
    return example().Mixer(width=16, layers=1).double()


def images() -> list[tuple[Tensor, ...]]:
    return [(x[:4].double(), y[:4]) for x, y in example().batches(0, "cpu")]


def eager_gradients() -> dict[str, Tensor]:
    """Of the mean loss over the micro-batches, by plain autograd on one process."""
    model, batches = mixer(), images()
    for batch in batches:
        (example().loss_fn(model, *batch) / len(batches)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's part of each gradient."""
    return {name: local(p.grad).clone() for name, p in model.named_parameters()}


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    largest = max(float(gradient.abs().max()) for gradient in one.values())
    errors = [float((one[name] - other[name]).abs().max()) for name in one]
    return one.keys() == other.keys() and max(errors) <= GRADIENT_BOUND * largest


class Summed(nn.Module):
    """Sums a view of a value that is read again later."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        own = self.linear(x.unsqueeze(1))
        view = own.detach().squeeze((1,))
        total = _functional.wait_tensor(_functional.all_reduce(view, "sum", self.group))
        return (own.squeeze(1) * total).mean()


def views_are_not_written_to(mesh: DeviceMesh) -> bool:
    """Whether the sum over two ranks left alone what it looked at."""
    torch.manual_seed(3)
    model = Summed(mesh.get_group().group_name)
    batches = [(torch.randn(4, 3),) for _ in range(2)]
    with torch.no_grad():
        own = [model.linear(x) for (x,) in batches]
        wanted = [(each * (2 * each)).mean() for each in own]  # ranks have equal weights and data
    step = interlace.compile_step(model, lambda m, x: m(x), batches[0], mesh=mesh, config=QUICK)
    step(batches)
    return all(torch.allclose(a, b) for a, b in zip(step.losses, wanted, strict=True))


def two_ranks() -> dict[str, bool]:
    """What a rank finds to hold."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = mixer()
        wanted = eager_gradients()
        example().split(model, mesh)
        steps = {
            strands: interlace.compile_step(
                model, example().loss_fn, images()[0], mesh=mesh, strands=strands, config=QUICK
            )
            for strands in (1, 2)
        }
        held: dict[str, bool] = {}
        two = steps[2]
        two(images())
        first = gradients_of(model)
        held["parameters keep their layout"] = all(
            type(p.grad) is type(p.data)
            and getattr(p.grad, "placements", ()) == getattr(p, "placements", ())
            for p in model.parameters()
        )
        held["equal to eager autograd"] = near(
            wanted, {name: whole(p.grad) for name, p in model.named_parameters()}
        )
        two(images())
        doubled = {name: 2 * gradient for name, gradient in first.items()}
        held["a second step adds"] = near(doubled, gradients_of(model))
        model.zero_grad(set_to_none=False)
        two(images())
        held["gradients set to zero"] = same(first, gradients_of(model))
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()
        two(images())
        held["gradients of somebody else"] = same(doubled, gradients_of(model))
        model.zero_grad()
        steps[1](images())
        held["one strand gives the same bits"] = same(first, gradients_of(model))
        model.zero_grad()
        timeline = two.record(images())
        held["a recorded step gives the same bits"] = same(first, gradients_of(model))
        held["collectives have the name of their axis"] = timeline.lanes == ("compute", "tp")
        held["views keep their values"] = views_are_not_written_to(mesh)
        held["losses are kept"] = len(two.losses) == len(images())
        return held


def test_two_ranks() -> None:
    """Gradients of two strands on two ranks: those of plain autograd, bitwise those of one strand,
    in the parameters' layout, added to what was there."""
    for result in run_ranks("test_compile_step:two_ranks", 2, timeout_s=100):
        assert len(result.value) == 10
        assert all(result.value.values()), result.value


def decomposed() -> dict[str, Any]:
    """What a rank finds of steps whose collectives are cut into sends."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, wanted = mixer(), eager_gradients()
        example().split(model, mesh)
        seen, listings = {}, []
        for strands in (1, 2):
            step = interlace.compile_step(
                model,
                example().loss_fn,
                images()[0],
                mesh=mesh,
                strands=strands,
                config=QUICK,
                overlap=OverlapConfig(decompose="ring"),
            )
            step(images())
            seen[strands] = gradients_of(model)
            parameters = model.named_parameters()
            held = near(wanted, {name: whole(p.grad) for name, p in parameters})
            model.zero_grad()
            assert step.decomposed is not None
            listings.append(step.decomposed.summary())
        plain = interlace.compile_step(
            model, example().loss_fn, images()[0], mesh=mesh, strands=1, config=QUICK
        )
        return {
            "near": held,
            "same": same(seen[1], seen[2]),
            "listings": listings,
            "whole by default": plain.decomposed is None,
        }


def test_collectives_are_decomposed_on_demand() -> None:
    """Gradients are those of plain autograd, two strands have the bits of one, and the step lists
    what was matched."""
    for result in run_ranks("test_compile_step:decomposed", 2, timeout_s=150):
        one, two = result.value.pop("listings")
        assert one == two
        assert one.startswith("decomposed "), one
        assert not one.startswith("decomposed 0 "), one
        assert result.value == {"near": True, "same": True, "whole by default": True}


def replicas() -> dict[str, bool]:
    """Four ranks, dp_replicate 2 x tp 2: each replica sees every other micro-batch."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
        model, wanted = mixer(), eager_gradients()
        example().split(model, mesh["tp"])
        mine = images()[mesh.get_local_rank("dp_replicate") :: 2]
        assert len(mine) * 2 == len(images())
        seen, held = {}, {}
        for strands in (2, 1):
            step = interlace.compile_step(
                model, example().loss_fn, mine[0], mesh=mesh, strands=strands, config=QUICK
            )
            step(mine)
            seen[strands] = gradients_of(model)
            held[f"{strands}: the mean over replicas"] = near(
                wanted, {name: whole(p.grad) for name, p in model.named_parameters()}
            )
            step(mine)
            doubled = {name: 2 * gradient for name, gradient in seen[strands].items()}
            held[f"{strands}: a second step adds"] = near(doubled, gradients_of(model))
            model.zero_grad()
        held["one strand gives the same bits"] = same(seen[1], seen[2])
        held["the sum is planned"] = "dp_replicate" in step.record(mine).lanes
        sharded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        with pytest.raises(InputError, match="the axis dp_shard of 2 ranks"):
            interlace.compile_step(model, example().loss_fn, mine[0], mesh=sharded)
        return held


def test_gradients_are_averaged_over_replicas() -> None:
    """An axis `dp_replicate` beside tensor parallelism: gradients are those of plain autograd over
    the micro-batches of all replicas, with two strands and with one, and are added to what was
    there. Weights that are to be sharded are refused."""
    for result in run_ranks("test_compile_step:replicas", 4, timeout_s=150):
        assert len(result.value) == 6
        assert all(result.value.values()), result.value


def refused_by_one() -> list[str]:
    """What a rank is told when only rank 1 is at fault: by its inputs, then by its loss. Then all
    is well."""
    told = []
    with gloo_group():
        mine = dist.get_rank() == 1
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        inputs = batch()
        wrong_inputs: Any = set(inputs) if mine else inputs
        for example, loss in (
            (wrong_inputs, linear_loss),
            (inputs, branching_loss if mine else linear_loss),
        ):
            with pytest.raises((InputError, PeerError)) as caught:
                interlace.compile_step(model, loss, example, mesh=mesh, config=QUICK)
            told.append(f"{type(caught.value).__name__}: {caught.value.message}")
        step = interlace.compile_step(model, linear_loss, inputs, mesh=mesh, strands=1)
        told.append(f"{len(step.plan.phases)}")
    return told


def test_what_one_rank_refuses_is_refused_on_all() -> None:
    """The others would wait for it in the next collective. They are told which rank, and why."""
    first, second = (r.value for r in run_ranks("test_compile_step:refused_by_one", 2))
    assert second[0].startswith("InputError: example_inputs is set")
    assert second[1].startswith("InputError: ModuleWithLoss cannot be traced")
    assert first[0].startswith("PeerError: rank 1 refused: example_inputs is set")
    assert first[1].startswith("PeerError: rank 1 refused: ModuleWithLoss cannot be traced")
    assert first[2] == second[2]


def test_the_example_runs_under_torchrun() -> None:
    """The example as its first lines say: two ranks, the loss falls, and the step is recorded."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / "vision_mixer.py"), "--steps", "11"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=150, env=env
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
    assert lines[-1].startswith("communication ")


def linear_loss(model: nn.Module, x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (weight * (model(x) - target).square().mean(dim=1)).mean()


def branching_loss(model: nn.Module, x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Depends on a value: it cannot be traced."""
    factor = 2 if x.sum() > 0 else 1
    return factor * linear_loss(model, x, target, weight)


def batch(rows: int = 4) -> tuple[Tensor, ...]:
    return torch.randn(rows, 3), torch.randn(rows, 2), torch.rand(rows)


@pytest.fixture(scope="module")
def alone() -> tuple[nn.Module, interlace.Step]:
    """A step of one process, with three inputs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    return model, interlace.compile_step(model, linear_loss, batch(), config=QUICK)


def test_one_process(alone: tuple[nn.Module, interlace.Step]) -> None:
    """Without ranks and mesh: several inputs, the mean of the losses, no gradient for a parameter
    that wants none, and an optimizer of the user's own."""
    model, step = alone
    batches = [batch() for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = step(batches)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == {"0.weight", "2.weight", "2.bias"}
    found = {name: gradient.clone() for name, gradient in found.items()}
    optimizer.zero_grad()
    wanted = torch.stack([linear_loss(model, *each) for each in batches]).mean()
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    before = step(batches)
    optimizer.step()
    assert step(batches) < before


def test_batches_that_do_not_fit_are_refused(alone: tuple[nn.Module, interlace.Step]) -> None:
    """Other shapes, bare tensors, none at all, one for two strands: each says what is wrong."""
    _, step = alone
    with pytest.raises(InputError, match=r"micro-batch 1 is \(float32\[5, 3\] on cpu"):
        step([batch(), batch(5)])
    with pytest.raises(InputError, match="micro-batch 0 is a Tensor, not a tuple"):
        step([torch.randn(4, 3)])
    with pytest.raises(InputError, match="there is no micro-batch"):
        step([])
    with pytest.raises(InputError, match="at least two micro-batches"):
        step([batch()])


def test_wrong_calls_are_refused() -> None:
    """A loss that is no number, inputs that are no tensors, a loss without parameters."""
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match=r"loss_fn gives float32\[4, 2\]"):
        interlace.compile_step(model, lambda m, x: m(x), batch()[:1])
    with pytest.raises(InputError, match="example_inputs is generator"):
        interlace.compile_step(model, linear_loss, (each for each in batch()))
    with pytest.raises(InputError, match=r"example_inputs\[1\] is Linear"):
        interlace.compile_step(model, linear_loss, (batch()[0], model))
    with pytest.raises(InputError, match="example_inputs holds no tensor"):
        interlace.compile_step(model, linear_loss, {"x": 3})
    with pytest.raises(InputError, match="depends on no parameter"):
        interlace.compile_step(model, lambda m, x: x.square().mean(), batch()[:1])
    with pytest.raises(InputError, match="strands = 3"):
        interlace.compile_step(model, linear_loss, batch(), strands=3)


def test_importing_interlace_imports_no_torch() -> None:
    """Planning on a laptop needs no torch; `compile_step` fetches it when it is asked for."""
    code = "import sys, interlace; assert 'torch' not in sys.modules; interlace.compile_step"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
