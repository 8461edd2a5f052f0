"""What Megatron-Core asserts of its schedule plan for experts, written anew.

Outputs and the gradient of every parameter, on ranks that hold the experts between them, over four
micro-batches: a layer beside itself, with a shared expert, with gradients of weights put off, and a
chunk of so many layers beside one of fewer or more. Rows that have no expert take the place of
padded tokens. Where nothing accumulates, as all micro-batches but one pull at nothing, gradients
are autograd's bit by bit; over four ours add up in the matmul and autograd's behind it, which
differs in the last bits.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from traced_once import traced_once

from interlace.api import compile_step
from interlace.config import PlanConfig
from interlace.ir.actions import Direction
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.models.moe import ExpertBlock, Routed
from interlace.parallel.expert import apply_expert_parallel
from interlace.step import Step

pytestmark = pytest.mark.gloo
RANKS, MICRO_BATCHES, SEQUENCE, BATCH, WIDTH = 2, 4, 8, 2, 16
BOUND = 1e-12
"""Largest difference to autograd on the same layers, relative to the largest element."""
PLAN = PlanConfig(cluster="laptop")
"""Nothing is measured."""
TWO = "two_strand"
CASES: dict[str, tuple[list[bool], dict[str, Any], list[tuple[str, str]]]] = {
    "experts": ([False], {}, [(TWO, ""), ("zb_h1", "")]),
    "after a dense layer, beside a shared expert, with a capacity": (
        [True, False],
        {"shared_width": 8, "capacity_factor": 0.75},
        [(TWO, "")],
    ),
    "2 layers beside 1": ([False] * 3, {}, [("folded", "layers.2"), ("folded", "layers.1")]),
}
"""By name: whether each layer is dense, what experts are like, and the schedules, with the layer
at which a second chunk begins."""


class Layers(nn.Module):
    """Blocks of attention and experts."""

    def __init__(self, dense: list[bool], experts: dict[str, Any]) -> None:
        super().__init__()
        config = ModelConfig(
            architecture="moe", layers=len(dense), width=WIDTH, heads=2, kv_heads=2, ffn_width=12,
            experts=ExpertsConfig(count=8, chosen=2, **experts),
        )  # fmt: skip
        self.layers = nn.ModuleList(ExpertBlock(config, SEQUENCE, dense=each) for each in dense)

    def forward(self, x_SBD: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x_SBD)
            x_SBD = found.x if isinstance(found, Routed) else found
        return x_SBD


def output(module: Layers, x_SBD: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the output is `pull` everywhere."""
    found = module(x_SBD)
    return found.sum() * pull, found


def _module(case: str, mesh: DeviceMesh) -> Layers:
    torch.manual_seed(3)
    module = Layers(*CASES[case][:2]).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    apply_expert_parallel(module, mesh["ep"])
    return module


Batch = tuple[Tensor, Tensor]
"""Of `output`."""


def _autograd(module: Layers, batches: Sequence[Batch]) -> list[Tensor]:
    """Outputs, then gradients, by autograd on the same ranks."""
    outputs = []
    for batch in batches:
        loss, found = output(module, *batch)
        outputs.append(found.detach())
        (loss / (MICRO_BATCHES * RANKS)).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)
    return [*outputs, *(p.grad for p in module.parameters() if p.grad is not None)]


def _case(case: str, mesh: DeviceMesh) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    shape = SEQUENCE, BATCH, WIDTH
    inputs = [torch.randn(shape, dtype=torch.double, generator=draw) for _ in range(MICRO_BATCHES)]
    pull, nothing = torch.ones((), dtype=torch.double), torch.zeros((), dtype=torch.double)
    batches = [(each, pull) for each in inputs]
    first_alone = [(each, nothing if number else pull) for number, each in enumerate(inputs)]
    wanted = _autograd(_module(case, mesh), batches)
    of_first = _autograd(_module(case, mesh), first_alone)
    found: dict[str, Any] = {}
    first: list[Tensor] = []
    for schedule, split in [("one_strand", ""), *CASES[case][2]]:
        module = _module(case, mesh)
        step = compile_step(
            module, output, batches[0], mesh=mesh, schedule=schedule,
            split_at=[split] if split else [], config=PLAN,
        )  # fmt: skip
        bits = _stepped(step, module, batches)
        first = first or bits
        directions = [{slot.strand.direction for slot in action.slots}
                      for action in step.actions(MICRO_BATCHES)]  # fmt: skip
        module.zero_grad()
        alone = _stepped(step, module, first_alone)
        found[f"{schedule} {split}"] = {
            "one": len(alone) == len(of_first) and all(map(torch.equal, alone, of_first)),
            "bits": len(bits) == len(first) and all(map(torch.equal, bits, first)),
            "outputs": all(map(torch.equal, bits[:MICRO_BATCHES], wanted)),
            "off": max(
                float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
                for a, b in zip(bits, wanted, strict=True)
            ),
            "pairs": sum(each == set(Direction) for each in directions),
        }
    return found


def _stepped(step: Step, module: Layers, batches: Sequence[Batch]) -> list[Tensor]:
    """Outputs, then gradients."""
    step(batches)
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [*(each[0].clone() for each in step.results), *grads]


def child_cases() -> dict[str, Any]:
    with gloo_group():
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        found = {}
        for case in CASES:
            with traced_once():
                found[case] = _case(case, mesh)
        dist.barrier()
    return found


def test_outputs_and_gradients_of_layers_are_those_of_autograd() -> None:
    for result in run_ranks("test_expert_overlap:child_cases", RANKS, timeout_s=200):
        for case, ways in result.value.items():
            for way, found in ways.items():
                assert found["bits"], (case, way, found)
                assert found["outputs"], (case, way, found)
                assert found["one"], (case, way, found)
                assert found["off"] < BOUND, (case, way, found)
                alone = way.startswith(("one_strand", "zb_h1"))
                assert (found["pairs"] == 0) == alone, (case, way, found)
