"""The model with experts under every mix of axes with `ep`, in float64: gradients of strands and of
eager autograd against one process, two strands bit by bit against one, an auxiliary loss too.

`make test` runs each axis beside experts on two ranks, and a mix on four; wide are the other
mixes, and those of 8 ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixture_models import furthest, gradients_of
from processes import gloo_group, run_ranks
from torch import Tensor

from interlace.config import ParallelConfig, RunConfig
from interlace.graphs.recompute import RecomputePolicy
from interlace.ir.plan import PhasePlan
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.models import model_file
from interlace.parallel.context import local_positions
from interlace.parallel.data import data_layout
from interlace.parallel.meshes import Meshes, build_meshes
from interlace.parallel.tensor import loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import build_strands
from interlace.train.built_model import NextTokenLoss, build_module
from interlace.train.step_runners import EagerRunner, planned_step
from interlace.train.weights import MasterWeights
from orders import random_order
from phases import plan_by
from wide import WIDE

BOUND = 1e-10
"""Largest difference of a float64 gradient, relative to the largest element of its parameter."""
SEQUENCE, MICRO_BATCHES, VOCABULARY = 8, 2, 64
Layout = dict[str, Any]
PLAIN = ExpertsConfig(count=4, chosen=2, shared_width=8)
BALANCED = replace(PLAIN, balance="auxiliary_loss", auxiliary_weight=0.1)
Case = tuple[Layout, str]
CASES: dict[int, list[Case]] = {
    2: [
        ({"tensor": 2}, "balanced"),
        ({"data_shard": 2}, "plain"),
        ({"data_shard": 2, "zero": 1}, "balanced"),
        ({"data_shard": 2, "expert": 2}, "balanced"),
        ({"context": 2, "expert": 2}, "plain"),
        ({"context": 2, "expert": 2, "context_method": "ring"}, "plain"),
    ],
    4: [
        ({"data_shard": 2, "expert": 2, "tensor": 2}, "balanced"),
    ],
}
WIDE_CASES: dict[int, list[Case]] = {
    4: [
        ({"data_shard": 2, "tensor": 2}, "plain"),
        ({"data_shard": 2, "tensor": 2, "zero": 1}, "balanced"),
        ({"data_shard": 2, "expert": 2, "tensor": 2, "zero": 1}, "plain"),
        ({"data_shard": 2, "context": 2, "expert": 4}, "plain"),
        ({"data_shard": 4, "expert": 4, "zero": 1}, "plain"),
        ({"data_replicate": 2, "context": 2, "expert": 2}, "plain"),
    ],
    8: [
        ({"data_shard": 4, "expert": 4, "tensor": 2, "zero": 1}, "plain"),
        ({"data_shard": 4, "expert": 4, "tensor": 2}, "balanced"),
    ],
}


def model_of(kind: str) -> ModelConfig:
    """A small one."""
    experts = BALANCED if kind == "balanced" else PLAIN
    return ModelConfig(
        architecture="moe", layers=1, width=16, heads=4, kv_heads=2, ffn_width=12, experts=experts
    )


def batches(data_rank: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(data_rank)
    text = torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2, SEQUENCE + 1), generator=draw)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in text]


def _own(meshes: Meshes, config: ParallelConfig) -> list[Batch]:
    mine = batches(meshes.data_rank)
    if config.context == 1:
        return mine
    mesh = meshes.context
    place = local_positions(SEQUENCE, mesh.size(), mesh.get_local_rank(), config.context_method)
    return [(tokens[:, place], targets[:, place]) for tokens, targets in mine]


def _reference(kind: str, data_ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = model_file("moe").build(model_of(kind), VOCABULARY, SEQUENCE)
    module = NextTokenLoss(model, 0.1).double()
    for rank in range(data_ranks):
        for batch in batches(rank):
            (module(*batch)[0] / (data_ranks * MICRO_BATCHES)).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _case(layout: Layout, kind: str, groups: dict[str, str]) -> dict[str, Any]:
    """`groups` collects the axes of groups of all meshes: DTensor keeps some of an earlier one that
    is equal."""
    config = ParallelConfig(bucket_mib=0.001, **layout)
    meshes = build_meshes(config, "cpu")
    groups |= meshes.axis_of_group
    run = RunConfig(
        model=model_of(kind),
        parallel=config,
        data=replace(RunConfig().data, sequence_length=SEQUENCE),
    )
    torch.manual_seed(3)
    module = build_module(run, meshes, VOCABULARY, torch.device("cpu")).double()
    data = data_layout(module, config, meshes, torch.float64)
    weights = MasterWeights(module, torch.float32, data=data, meshes=meshes)
    mine = _own(meshes, config)
    with loss_context(meshes.tensor):
        strands = build_strands(
            module, mine[0], groups, data=data, buffer_dtype=torch.float64,
            recompute=RecomputePolicy(mode="layer" if kind == "plain" else "none"),
        )  # fmt: skip
    constants = {**weights.constants(), **weights.buffers()}
    found = []
    plan = plan_by(strands.op_graphs, lambda graph: PhasePlan(random_order(graph, 4), 0, 0), 7)
    for each in (strands.sequential, plan):
        step = planned_step(weights, strands, each, constants)
        step(mine)
        found.append(([loss.clone() for loss in step.losses], gradients_of(weights)))
    (losses, one), (others, two) = found
    EagerRunner(weights, meshes)(mine)
    wanted = _reference(kind, meshes.data_ranks)
    return {
        "bits": all(map(torch.equal, losses, others))
        and all(map(torch.equal, one.values(), two.values())),
        "strands": furthest(one, wanted),
        "eager": furthest(gradients_of(weights), wanted),
    }


def child_cases(cases: list[Case]) -> dict[str, Any]:
    groups: dict[str, str] = {}
    with gloo_group():
        found = {f"{layout} {kind}": _case(layout, kind, groups) for layout, kind in cases}
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        *(pytest.param(ranks, cases, id=str(ranks)) for ranks, cases in CASES.items()),
        *(pytest.param(n, each, marks=WIDE, id=f"{n}, wide") for n, each in WIDE_CASES.items()),
    ],
)
def test_gradients_are_those_of_one_process(ranks: int, cases: list[Case]) -> None:
    for result in run_ranks("test_expert_layouts:child_cases", ranks, args=[cases], timeout_s=300):
        assert len(result.value) == len(cases)
        for name, found in result.value.items():
            assert found["strands"] < BOUND, (name, found)
            assert found["eager"] < BOUND, (name, found)
            assert found["bits"], (name, found)
