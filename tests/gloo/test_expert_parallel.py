"""Expert parallelism on real ranks, against one process that computes every expert on every token.

Losses and gradients in float64; two strands, planned and in random orders, bit by bit against one.

`make test` has each axis that experts may lie along on two ranks, all routings, and one layout of
four ranks; wide are the others, and eight ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixture_models import EXPERTS, ROUTINGS, MixtureLoss, furthest, gradients_of
from processes import gloo_group, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from traced_once import traced_once

from interlace.api import clip_grad_norm_, compile_step, stage_parameters
from interlace.config import ParallelConfig, PlanConfig, Recompute, RunConfig
from interlace.degrees import resolve_layout
from interlace.errors import InputError
from interlace.experts.between_ranks import (
    EXCHANGE,
    by_expert,
    expert_exchange,
    host_counts,
    in_order,
    received_counts,
)
from interlace.experts.merged_sends import expected_sends
from interlace.experts.rows_by_expert import expert_order
from interlace.graphs.collectives import exchange_rows, wait
from interlace.graphs.recompute import RecomputePolicy
from interlace.ir.plan import PhasePlan
from interlace.models.experts import ExpertLayer, Experts
from interlace.parallel.data import data_layout
from interlace.parallel.expert import BetweenRanks, apply_expert_parallel
from interlace.parallel.meshes import EXPERT_AXIS, Meshes, axis_groups, build_meshes
from interlace.rules import check
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import build_strands
from interlace.step import Step
from interlace.train.step_runners import EagerRunner, planned_step
from interlace.train.weights import MasterWeights
from orders import random_order
from phases import plan_by
from wide import WIDE

BOUND = 1e-10
"""Largest difference of a float64 gradient, relative to the largest element of its parameter."""
MICRO_BATCHES = 3
LAYERS, WIDTH, INNER = 2, 16, 12
Layout = dict[str, Any]
TWO: list[tuple[Layout, Recompute]] = [
    ({"data_replicate": 2, "expert": 2}, "none"),
    ({"data_shard": 2, "expert": 2}, "layer"),
    ({"context": 2, "expert": 2}, "none"),
    ({"data_shard": 2, "expert": 2, "expert_sends": "merged"}, "layer"),
]
FOUR: list[tuple[Layout, Recompute]] = [
    ({"data_replicate": 2, "data_shard": 2, "expert": 4, "expert_sends": "merged"}, "none"),
]
OTHERS: list[tuple[Layout, Recompute]] = [
    ({"data_shard": 4, "expert": 2, "reduce": "micro_batch"}, "layer"),
    ({"data_replicate": 4, "expert": 2}, "layer"),
    ({"data_shard": 4, "expert": 2}, "none"),
    ({"data_shard": 4, "expert": 2, "zero": 1}, "none"),
    ({"data_replicate": 2, "data_shard": 2, "expert": 4}, "none"),
    ({"data_replicate": 2, "data_shard": 2, "expert": 2}, "none"),
]


def batches(data_rank: int) -> list[Batch]:
    """The micro-batches of a rank: other tokens than those of the others."""
    draw = torch.Generator().manual_seed(data_rank)
    text = torch.randint(0, 64, (MICRO_BATCHES, 2, 13), generator=draw)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in text]


def _seen(meshes: Meshes) -> list[Batch]:
    """As if ranks of a context saw other samples: without attention there is no difference."""
    return batches(meshes.data_rank * meshes.context.size() + meshes.context.get_local_rank())


def _ran(runner: Step | EagerRunner, weights: MasterWeights, mine: list[Batch]) -> list[Tensor]:
    runner(mine)
    return [*(loss.detach().clone() for loss in runner.losses), *gradients_of(weights).values()]


def _reference(routing: str, ranks: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Losses by rank, and gradients of their mean."""
    module = MixtureLoss(LAYERS, WIDTH, INNER, reference=True)
    module.push(routing)
    losses = [[module(*batch) for batch in batches(rank)] for rank in range(ranks)]
    (sum(map(sum, losses)) / (ranks * MICRO_BATCHES)).backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return [[loss.detach() for loss in own] for own in losses], gradients


def _case(
    config: ParallelConfig, meshes: Meshes, recompute: Recompute, routing: str
) -> dict[str, Any]:
    """What a rank finds: how far it is from the reference, and which ways have the same bits."""
    assert meshes.experts is not None
    module = MixtureLoss(LAYERS, WIDTH, INNER)
    module.push(routing)
    merged = config.expert_sends == "merged"
    apply_expert_parallel(module, meshes.experts[EXPERT_AXIS], meshes.counts, merged=merged)
    data = data_layout(module, config, meshes, torch.float64)
    weights = MasterWeights(module, torch.float32, data=data, meshes=meshes)
    mine = _seen(meshes)
    strands = build_strands(
        module, mine[0], meshes.axis_of_group, data=data, buffer_dtype=torch.float64,
        recompute=RecomputePolicy(mode=recompute),
    )  # fmt: skip
    constants = {**weights.constants(), **weights.buffers()}
    one = _ran(planned_step(weights, strands, strands.sequential, constants), weights, mine)
    bits = {}
    for seed in range(2):
        head = 5 * seed
        plan = plan_by(
            strands.op_graphs,
            lambda graph, seed=seed: PhasePlan(random_order(graph, seed), 0, 0),
            head,
        )
        two = _ran(planned_step(weights, strands, plan, constants), weights, mine)
        bits[f"plan {seed}"] = all(map(torch.equal, one, two))
    eager = _ran(EagerRunner(weights, meshes), weights, mine)
    ranks = meshes.data_ranks * meshes.context.size()
    losses, wanted = _reference(routing, ranks)
    place = meshes.data_rank * meshes.context.size() + meshes.context.get_local_rank()
    names = list(weights.masters)
    return {
        "loss": max(float(abs(a - b)) for a, b in zip(losses[place], one, strict=False)),
        "one": furthest(dict(zip(names, one[MICRO_BATCHES:], strict=True)), wanted),
        "eager": furthest(dict(zip(names, eager[MICRO_BATCHES:], strict=True)), wanted),
        "bits": bits,
        "bytes": [
            op.bytes_out
            for op in strands.op_graphs["forward"].operators
            if op.target == str(EXCHANGE)
        ],
    }


def _routings(number: int) -> list[str]:
    """All with the first layout of two ranks; then they take turns."""
    names = list(ROUTINGS)
    if number == 0 and dist.get_world_size() == 2:
        return names
    return [names[(number + 2) % len(names)]]


def child_cases(cases: list[tuple[Layout, Recompute]]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found = {}
    with gloo_group():
        for number, (layout, recompute) in enumerate(cases):
            config = ParallelConfig(bucket_mib=0.001, **layout)
            meshes = build_meshes(config, "cpu")
            with traced_once():  # a routing is a value, of which graphs know nothing
                for routing in _routings(number):
                    name = f"{layout} {recompute} {routing}"
                    found[name] = _case(config, meshes, recompute, routing)
    return found


def exchanged(merged: bool, ranks: int) -> list[int]:
    """Bytes of the exchanges of a layer as they stand in its graph, for planner and recorder."""
    tokens, per_token, size = 2 * 12, 2, 8  # bytes of a number
    rows = tokens * per_token
    if not merged:
        return [rows * WIDTH * size] * 2
    sends = expected_sends(tokens, per_token, EXPERTS, ranks) * WIDTH * size
    return [rows * 4, rows * size, sends, sends]  # of rows, gates


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, TWO, id="2"),
        pytest.param(4, FOUR, id="4"),
        pytest.param(4, OTHERS, marks=WIDE, id="4, wide"),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(ranks: int, cases: Any) -> None:
    layouts = {
        f"{layout} {recompute} {routing}": layout["expert"]
        for layout, recompute in cases
        for routing in ROUTINGS
    }
    for result in run_ranks("test_expert_parallel:child_cases", ranks, args=[cases], timeout_s=300):
        for name, found in result.value.items():
            assert found["loss"] < BOUND, (name, found)
            assert found["one"] < BOUND, (name, found)
            assert found["eager"] < BOUND, (name, found)
            assert all(found["bits"].values()), (name, found)
            assert found["bytes"] == LAYERS * exchanged("merged" in name, layouts[name]), name


def child_exchange(rounds: int) -> list[str]:
    """Random routings, there and back, by the operator and by the messages of lowered graphs."""
    wrong = []
    with gloo_group():
        name = str(dist.group.WORLD.group_name)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for seed in range(rounds):
            draw = torch.Generator().manual_seed(1000 * seed + rank)
            tokens, experts = 5, 2 * ranks
            ids = torch.randint(0, experts + (seed % 3 == 0), (tokens, 2), generator=draw)
            if seed % 5 == 0 and rank == seed % ranks:
                ids = torch.full_like(ids, experts)  # all rows dropped
            order, place, sent = expert_order(ids, experts)
            counts = host_counts(sent, received_counts(sent, ranks, name))
            rows = torch.randn(2 * tokens, 3, generator=draw)[order]
            there = expert_exchange(rows, counts, ranks, 2 * tokens, True, name)
            sent_too = wait(exchange_rows(rows, counts, ranks, 2 * tokens, True, name))
            back = expert_exchange(there, counts, ranks, 2 * tokens, False, name)
            back_too = wait(exchange_rows(there, counts, ranks, 2 * tokens, False, name))
            kept = int(sent.sum())
            wanted = torch.cat((rows[:kept], torch.zeros(2 * tokens - kept, 3)))
            if not (torch.equal(there, sent_too) and len(there) == int(counts[1].sum())):
                wrong.append(f"seed {seed}: forth")
            if not (torch.equal(back, wanted) and torch.equal(back_too, wanted)):
                wrong.append(f"seed {seed}: back")
            if not torch.equal(order[place], torch.arange(2 * tokens)):
                wrong.append(f"seed {seed}: order")
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_come_back_as_they_went(ranks: int) -> None:
    for result in run_ranks("test_expert_parallel:child_exchange", ranks, args=[40], timeout_s=120):
        assert result.value == []


def test_rows_of_ranks_are_sorted_by_expert_as_in_torchtitan() -> None:
    """Cases of torchtitan's TestPermute, of rows that came from two ranks for two experts."""
    rows = torch.arange(10)
    assert in_order(rows, [2, 3, 1, 4], by_expert(2, 2)).tolist() == [0, 1, 5, 2, 3, 4, 6, 7, 8, 9]
    assert in_order(rows, [0, 6, 0, 4], by_expert(2, 2)).tolist() == rows.tolist()
    assert in_order(rows, [5, 0, 5, 0], by_expert(2, 2)).tolist() == rows.tolist()
    assert in_order(rows[:0], [0, 0, 0, 0], by_expert(2, 2)).tolist() == []


def test_layouts_that_cannot_be_are_refused_with_their_numbers() -> None:
    config = RunConfig(parallel=ParallelConfig(data_replicate=3, expert=2))
    with pytest.raises(InputError, match="expert = 2 does not fit into the 3 ranks"):
        check(config)
    with pytest.raises(InputError, match="nothing is sent where a rank has all experts"):
        check(replace(config, parallel=ParallelConfig(expert_sends="merged")))
    shards = ParallelConfig(data_replicate=2, data_shard=3, expert=2)
    with pytest.raises(InputError, match="data_shard 3"):
        check(replace(config, parallel=shards))
    unknown = ParallelConfig(data_shard=-1, expert=4)
    with pytest.raises(InputError, match="expert = 4 does not fit into the 6 ranks"):
        resolve_layout(replace(config, parallel=unknown), 6)


def child_refused() -> list[str]:
    said = []
    with gloo_group():
        meshes = build_meshes(ParallelConfig(data_replicate=3, expert=3), "cpu")
        assert meshes.experts is not None
        for module in (MixtureLoss(1, 8, 8), torch.nn.Linear(2, 2)):
            with pytest.raises(InputError) as refused:
                apply_expert_parallel(module, meshes.experts[EXPERT_AXIS])
            said.append(str(refused.value))
        one_each = build_meshes(ParallelConfig(data_replicate=3, expert=3), "cpu").experts
        assert one_each is not None
        dealt = MixtureLoss(1, 8, 8)
        dealt.blocks[0].experts = Experts(3, 8, 8)
        apply_expert_parallel(dealt, one_each[EXPERT_AXIS])
        replicas = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_replicate",))
        for mesh in (None, replicas):
            with pytest.raises(InputError) as refused:
                compile_step(dealt, _call, batches(0)[0], mesh=mesh)
            said.append(str(refused.value))
        stages = [
            DeviceMesh("cpu", [0], mesh_dim_names=("ep",)),
            DeviceMesh("cpu", [1, 2], mesh_dim_names=("ep",)),
        ]
        with pytest.raises(InputError) as refused:
            compile_step(dealt, _call, batches(0)[0], stages=stages, schedule="one_f_one_b")
        said.append(str(refused.value))
        dist.barrier()  # a rank that leaves takes the store with it
    return said


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    said = run_ranks("test_expert_parallel:child_refused", 3, timeout_s=60)[0].value
    assert f"the {EXPERTS} experts of blocks.0.experts" in said[0]
    assert "parallel.expert = 3" in said[0]
    assert "Linear has no experts" in said[1]
    assert "one of 3 ranks, and stages are given" in said.pop()
    for each, axes in zip(said[2:], ("no axes", "dp_replicate"), strict=True):
        assert (
            f"one of 3 ranks, which are not the axis ep of the mesh of compile_step ({axes}" in each
        )


def _call(module: MixtureLoss, *batch: Tensor) -> Tensor:
    return module(*batch)


def child_merged(rounds: int) -> dict[str, Any]:
    """Random routings through experts that return what they get, forward and backward: a row for
    each expert against one for each rank."""
    torch.set_default_dtype(torch.float64)
    wrong, width = [], 3
    with gloo_group():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        for seed in range(rounds):
            draw = torch.Generator().manual_seed(1000 * seed + rank)
            each = [1, 3, 2][seed % 3]
            tokens, experts, chosen = (1 + seed % 7), each * ranks, min(1 + seed % 4, each * ranks)
            x = torch.randn(tokens, width, generator=draw)
            scores = torch.rand(tokens, experts, generator=draw)
            if seed % 4 == 1:
                scores[:, :each] += 1  # most to one rank
            ids = scores.topk(chosen).indices
            if seed % 5 == 0:
                ids[0, 0] = experts  # dropped
            gates = torch.rand(tokens, chosen, generator=draw).masked_fill(ids == experts, 0)
            found = []
            for merged in (False, True):
                layer = Same()
                layer.count, layer.exchange = experts, BetweenRanks(mesh, merged=merged)
                inputs = x.clone().requires_grad_(), gates.clone().requires_grad_()
                out = layer.dispatched(inputs[0], ids, inputs[1])
                out.square().sum().backward()
                found.append((out.detach(), *(each.grad for each in inputs)))
            total = (gates * (ids != experts)).sum(1, keepdim=True)
            if not torch.allclose(found[1][0], x * total, rtol=1e-14, atol=1e-14):
                wrong.append(f"seed {seed}: not the identity times the gates")
            for one, other in zip(*found, strict=True):
                if not torch.allclose(one, other, rtol=1e-13, atol=1e-13):
                    wrong.append(f"seed {seed}: unlike a row for each expert")
        dist.barrier()
    return {"wrong": wrong}


class Same(ExpertLayer):
    """Experts that return what they get."""

    def on_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_merged_sends_are_the_identity_weighted_by_the_gates(ranks: int) -> None:
    for result in run_ranks("test_expert_parallel:child_merged", ranks, args=[36], timeout_s=120):
        assert result.value["wrong"] == []


def test_sends_that_are_expected() -> None:
    """Of 1,000 tokens: two experts of eight on two ranks, four and eight, eight of 128 on eight."""
    given = (2, 8, 2), (2, 8, 4), (2, 8, 8), (8, 128, 8), (2, 4, 1)
    found = [expected_sends(1000, *each) for each in given]
    assert found == [1571, 1857, 2000, 5339, 1000]


def child_compiled(replicas: int) -> dict[str, Any]:
    """`compile_step` on a mesh dp_replicate x ep: two strands, clipped, three steps of SGD."""
    torch.set_default_dtype(torch.float64)
    with gloo_group():
        ranks = dist.get_world_size()
        mesh = init_device_mesh(
            "cpu", (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "ep")
        )
        module = MixtureLoss(LAYERS, WIDTH, INNER)
        apply_expert_parallel(module, mesh["ep"], merged=replicas == 1)
        mine = batches(dist.get_rank())
        config = PlanConfig(cluster="laptop" if replicas > 1 else "")
        step = compile_step(module, _call, mine[0], mesh=mesh, config=config)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        worst = step.compare(mine, repeats=1).worst
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            step(mine)
            norms.append(float(clip_grad_norm_(step, 0.1)))
            optimizer.step()
        wanted, reference = _trained(ranks)
        dealt = dict(module.named_parameters()), reference, ranks // replicas
        off = _furthest(*dealt, mesh.get_local_rank("ep"))
        dist.barrier()
    return {"norms": norms, "wanted": wanted, "off": off, "worst": worst}


def child_stages(schedules: list[str], replicas: int) -> list[dict[str, Any]]:
    """`compile_step` on a mesh pp x dp_replicate x ep: three steps of SGD by each schedule."""
    torch.set_default_dtype(torch.float64)
    found = []
    with gloo_group(), traced_once():
        names = ("pp", "dp_replicate", "ep")
        mesh = init_device_mesh("cpu", (2, replicas, 2), mesh_dim_names=names)
        for schedule in schedules:
            module = MixtureLoss(LAYERS, WIDTH, INNER)
            apply_expert_parallel(module, mesh["ep"], merged=replicas > 1)
            mine = batches(dist.get_rank() % (2 * replicas))
            config = PlanConfig(cluster="laptop")
            step = compile_step(module, _call, mine[0], mesh=mesh, schedule=schedule, config=config)
            optimizer = torch.optim.SGD(stage_parameters(step).values(), lr=0.5)
            norms = []
            for _ in range(3):
                optimizer.zero_grad()
                step(mine)
                norms.append(float(clip_grad_norm_(step, 0.1)))
                optimizer.step()
            wanted, reference = _trained(2 * replicas)
            off = _furthest(stage_parameters(step), reference, 2, mesh.get_local_rank("ep"))
            found.append({"norms": norms, "wanted": wanted, "off": off})
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("schedules", "replicas"),
    [
        (["one_f_one_b", "folded", "zb_h1"], 1),
        pytest.param(["one_f_one_b"], 2, marks=WIDE),
    ],
)
def test_compile_step_deals_experts_of_stages(schedules: list[str], replicas: int) -> None:
    name, ranks = "test_expert_parallel:child_stages", 4 * replicas
    for result in run_ranks(name, ranks, args=[schedules, replicas], timeout_s=200):
        for found in result.value:
            assert found["norms"] == pytest.approx(found["wanted"], rel=BOUND)
            assert found["off"] < BOUND, found


def _furthest(
    parameters: Mapping[str, Tensor], reference: MixtureLoss, ranks: int, rank: int
) -> float:
    """How far parameters are from those of one process, of which a rank has its own experts."""
    whole, off = dict(reference.named_parameters()), 0.0
    for name, parameter in parameters.items():
        want = whole[name].detach()
        if want.shape != parameter.shape:
            want = want.chunk(ranks)[rank]
        off = max(off, float((parameter.detach() - want).abs().max() / want.abs().max()))
    return off


def _trained(ranks: int) -> tuple[list[float], MixtureLoss]:
    """The same in one process, which sees the micro-batches of all ranks."""
    module = MixtureLoss(LAYERS, WIDTH, INNER, reference=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [module(*batch) for rank in range(ranks) for batch in batches(rank)]
        torch.stack(losses).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
    return norms, module


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=WIDE)])
def test_compile_step_trains_dealt_experts(ranks: int, replicas: int) -> None:
    name = "test_expert_parallel:child_compiled"
    for result in run_ranks(name, ranks, args=[replicas], timeout_s=200):
        found = result.value
        assert found["norms"] == pytest.approx(found["wanted"], rel=BOUND)
        assert found["off"] < BOUND, found
        assert found["worst"] < BOUND, found


def test_groups_of_experts_are_ranks_in_a_row() -> None:
    config = ParallelConfig(data_replicate=2, data_shard=2, tensor=2, expert=2)
    assert config.ranks == 8
    groups = axis_groups(config)
    assert groups[EXPERT_AXIS] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["ep_dp_replicate"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
