"""`ShapedSteps`: a step for each shape of batches, on ranks that agree on it."""

from typing import Any

import pytest
import torch
from processes import gloo_group, run_ranks
from strange_modules import Tied
from strange_world import QUICK, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from interlace import ShapedSteps
from interlace.errors import InputError, InterlaceError

LENGTHS = (6, 8, 6, 6, 8, 8)
KEPT = (2, 5)
"""Steps before which gradients are not set back: these add to the ones of the step before."""
MICRO_BATCHES = 4
BOUND = 1e-10


def model() -> nn.Module:
    return Tied(words=12).double()


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["tokens"])


def batches(length: int, count: int = MICRO_BATCHES) -> list[dict[str, Tensor]]:
    return [{"tokens": torch.randint(0, 12, (2, length))} for _ in range(count)]


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def trained(steps: ShapedSteps, module: nn.Module, rank: int) -> float:
    """The largest difference of a gradient to those of an eager twin, over steps of two lengths."""
    twin, off = seeded(model), 0.0
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (module, twin)]
    for number, length in enumerate(LENGTHS):
        drawn = batches(length)
        if number not in KEPT:
            for optimizer in optimizers:
                optimizer.zero_grad()
        for batch in drawn:
            (loss_of(twin, batch) / MICRO_BATCHES).backward()
        steps(drawn[rank::2])
        for parameter, other in zip(module.parameters(), twin.parameters(), strict=True):
            off = max(off, float((whole(parameter.grad) - other.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    return off


def said(steps: ShapedSteps, drawn: list[Any]) -> str:
    """How these are refused."""
    try:
        steps(drawn)
    except InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def run() -> dict[str, Any]:
    """In a rank: replicas, what is refused, and a module under `fully_shard`."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        rank, module = mesh.get_rank(), seeded(model)
        steps = ShapedSteps(module, loss_of, mesh=mesh, most=2, config=QUICK)
        torch.manual_seed(3)
        replicas = trained(steps, module, rank)
        sums = [
            sorted(
                tensor.data_ptr()
                for (role, _), tensor in step.tensors.constants.items()
                if role == "gradient"
            )
            for step in steps.steps.values()
        ]
        refused = {
            "other rank": said(steps, batches((6, 8)[rank], 2)),
            "fewer": said(steps, batches(6, 2 + rank)),
            "mixed": said(steps, batches(6, 1) + batches((6, 8)[rank], 1)),
            "third": said(steps, batches(10, 2)),
            "after": said(steps, batches(8, 2)),
        }
        drawn = batches(6, 2)
        evaluated = float(steps.evaluate(drawn))
        with torch.no_grad():
            wanted = float(torch.stack([loss_of(module, batch) for batch in drawn]).mean())
        shard = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        cut = seeded(model)
        fully_shard(cut, mesh=shard)
        torch.manual_seed(3)
        sharded = trained(ShapedSteps(cut, loss_of, config=QUICK), cut, rank)
        return {
            "replicas": replicas,
            "sharded": sharded,
            "shapes": list(steps.steps),
            "shared": sums[0] == sums[1],
            "refused": refused,
            "evaluated": abs(evaluated - wanted),
        }


def test_two_ranks_train_on_two_lengths() -> None:
    """Gradients of an eager twin, also added up over shapes; one set of sums; ranks and
    micro-batches of different shapes are named on both ranks, and the steps work afterwards."""
    results = [each.value for each in run_ranks("test_shaped_steps:run", 2, timeout_s=120)]
    for rank, found in enumerate(results):
        assert found["replicas"] < BOUND
        assert found["sharded"] < BOUND
        assert found["shared"]
        assert found["evaluated"] < BOUND
        assert [shape[:12] for shape in found["shapes"]] == ["(int64[2, 6]", "(int64[2, 8]"]
        refused = found["refused"]
        assert refused["other rank"].startswith("PeerError: ranks have different micro-batches at")
        for of_rank in ("rank 0: 2 micro-batches of (int64[2, 6])", "rank 1: 2 micro-batches of"):
            assert of_rank in refused["other rank"]
        assert "rank 1: 3 micro-batches of (int64[2, 6])" in refused["fewer"]
        mixed = "micro-batch 0 is (int64[2, 6]) on cpu"
        assert mixed in refused["mixed"]
        assert refused["mixed"].startswith("InputError" if rank else "PeerError: rank 1 refused")
        assert refused["third"].startswith("InputError: micro-batches of (int64[2, 10]) on cpu")
        assert "most=3" in refused["third"]
        assert refused["after"] == "taken"


def test_masks_differ_over_shapes() -> None:
    """Steps of all shapes are counted together, and masks follow from the number."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    steps = ShapedSteps(module, lambda m, x: m(x).square().mean(), config=QUICK)
    for number, rows in enumerate((2, 3, 2), 1):
        steps([(torch.ones(rows, 4, dtype=torch.float64),)] * 2)
        assert steps.last is not None
        assert steps.last.number == number + 1
    assert len(steps.steps) == 2


def test_what_cannot_be() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(InputError, match="most = 0"):
        ShapedSteps(module, loss_of, most=0)
    with pytest.raises(InputError, match="stages"):
        ShapedSteps(module, loss_of, stages=[object()])
    with pytest.raises(InputError, match="no micro-batch"):
        ShapedSteps(module, loss_of)([])
