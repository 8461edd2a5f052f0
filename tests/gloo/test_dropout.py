"""Proves that dropout in traced graphs is right, drops what its numbers say and nothing else."""

import pytest
import torch
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.config import ParallelConfig
from interlace.errors import InputError
from interlace.graphs.dropout import fix_dropout, no_dropout, seeds_for
from interlace.graphs.recompute import RecomputePolicy
from interlace.graphs.trace import trace_chunk
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import build_meshes
from interlace.runtime.traced_strands import build_strands

OP = torch.ops.interlace.dropout


class Block(nn.Module):
    """Two linears with dropout inside (a part per rank) and behind (whole on every rank)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.outer = nn.Dropout(0.25), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(self.up(x).relu())))


class Model(nn.Module):
    """Two blocks and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [
        (torch.randn(6, 8, generator=draw), torch.randn(6, 8, generator=draw)) for _ in range(count)
    ]


def test_masks_depend_on_numbers_alone() -> None:
    """Equal numbers give equal masks; another step, micro-batch, operator or rank gives another;
    about the right share is dropped and the rest is scaled up; OFF drops nothing."""
    x = torch.ones(40, 50)
    first = seeds_for(1, step=2, micro_batch=3)
    kept, mask = OP(x, first, 7, -1, 0.25)
    torch.rand(5)  # the global generator plays no part
    assert torch.equal(OP(x, first, 7, -1, 0.25)[1], mask)
    assert torch.equal(kept, mask * (1 / 0.75))
    assert abs(float(mask.float().mean()) - 0.75) < 0.05
    others = [
        OP(x, seeds_for(1, step=3, micro_batch=3), 7, -1, 0.25),
        OP(x, seeds_for(1, step=2, micro_batch=4), 7, -1, 0.25),
        OP(x, seeds_for(2, step=2, micro_batch=3), 7, -1, 0.25),
        OP(x, seeds_for(1, step=2, micro_batch=3, data_rank=1), 7, -1, 0.25),
        OP(x, first, 8, -1, 0.25),
        OP(x, first, 7, 0, 0.25),
        OP(x, first, 7, 1, 0.25),
    ]
    masks = [mask, *(other[1] for other in others)]
    for i, one in enumerate(masks):
        for another in masks[i + 1 :]:
            agree = float((one == another).float().mean())
            assert abs(agree - (0.75**2 + 0.25**2)) < 0.06  # as masks that know nothing of another
    assert torch.equal(OP(x, no_dropout(), 7, 0, 0.25)[0], x)


def test_other_random_operators_are_refused() -> None:
    """Random numbers drawn inside of an operator cannot be repeated; the error names it."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x * torch.poisson(x.abs()) - y).mean()

    with pytest.raises(InputError, match=r"poisson.*draws random numbers"):
        fix_dropout(trace_chunk(Noisy(), data(1)[0]), batch_inputs=2)


def reference(masks: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in plain eager code with given masks, in the order of use."""
    model, left = Model(), iter(masks)
    x, y = data(1)[0]
    for block in model.blocks:
        inner = next(left) / 0.75 * block.up(x).relu()
        x = x + next(left) / 0.5 * block.down(inner)
    loss = (x - y).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def child(ranks: int) -> dict[str, object]:
    """One micro-batch on each rank, under two policies; what the plain code gives for its masks."""
    with gloo_group():
        meshes = build_meshes(ParallelConfig(tensor=ranks), "cpu")
        rank = meshes.tensor.get_local_rank()
        seeds = seeds_for(9, step=0, micro_batch=0)
        found = {mode: run(ranks, mode, seeds) for mode in ("none", "layer")}
        off, _ = run(ranks, "none", no_dropout())
        masks: list[Tensor] = []
        for number in range(4):
            inner = number % 2 == 0
            parts = []
            for other in range(ranks):
                x = torch.ones(6, 16 // ranks if inner else 8)
                part = other if inner and ranks > 1 else -1
                parts.append(OP(x, seeds, number, part, 0.25 if inner else 0.5)[1])
            masks.append(torch.cat(parts, dim=1) if inner else parts[0])
        loss, gradients = reference(masks)
    mine, sums = found["none"]
    pieces = {
        name: part.chunk(ranks, dim)[rank] if (dim := split_dim(name)) is not None else part
        for name, part in gradients.items()
    }
    return {
        "loss": float(mine),
        "expected": float(loss),
        "off": float(off),
        "off expected": float(
            reference([torch.full((6, 16), 0.75), torch.full((6, 8), 0.5)] * 2)[0]
        ),
        "furthest": max(float((sums[n] - pieces[n]).abs().max()) for n in pieces),
        "same bits": all(torch.equal(sums[n], found["layer"][1][n]) for n in pieces),
    }


def split_dim(name: str) -> int | None:
    if "up" in name:
        return 0
    return 1 if name.endswith("down.weight") else None


def run(ranks: int, mode: str, seeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    meshes = build_meshes(ParallelConfig(tensor=ranks), "cpu")
    model = Model()
    if ranks > 1:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, meshes.tensor, plan)  # type: ignore[arg-type]
    strands = build_strands(
        model,
        data(1)[0],
        meshes.axis_of_group,
        recompute=RecomputePolicy(mode=mode),  # type: ignore[arg-type]
    )
    assert strands.takes_seeds
    parameters = {("parameter", n): local(p) for n, p in model.named_parameters()}
    sums = {("gradient", n): torch.zeros_like(local(p)) for n, p in model.named_parameters()}
    executor = strands.executor(strands.sequential, parameters | sums)
    (loss,) = executor.step([(*data(1)[0], seeds)])  # type: ignore[list-item]
    return loss, {name: total for (_, name), total in sums.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_plain_code_with_the_same_masks(ranks: int) -> None:
    """Split activations get a mask of their own on each rank, whole ones the same mask on all:
    loss and gradients equal eager code on one device with the joined masks. Recomputation draws
    the same masks, and evaluation drops nothing."""
    results = [r.value for r in run_ranks("test_dropout:child", ranks, args=[ranks], timeout_s=120)]
    for found in results:
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["off"] == pytest.approx(found["off expected"], rel=1e-6)
        assert abs(found["loss"] - found["off"]) > 1e-3
        assert found["furthest"] < 1e-6
        assert found["same bits"]


def on_two_axes() -> dict[str, bool]:
    """Masks on a mesh of two axes that are not called as in a run file: the first block is cut over
    `x` and the second over `y`, with weights that are frozen among them."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        model = Model()
        for index, block in enumerate(model.blocks):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["xy"[index]], plan)  # type: ignore[arg-type]
            block.up.requires_grad_(False)
        torch.manual_seed(5)
        step = compiled(model, mesh)
        drops = [
            node.args
            for node in step.strands.graphs["forward"].graph.nodes
            if node.target == OP.default
        ]
        x, y = (mesh.get_local_rank(axis) for axis in "xy")
        seeds = [step.seeds(index) for index in range(2)]
        step(data(2))
        losses = [whole_loss(*batch, seed) for batch, seed in zip(data(2), seeds, strict=True)]
        other = Model()
        for block in other.blocks:
            parallelize_module(
                block, mesh["y"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        draws = step.draws
        elsewhere = compiled(other, mesh).draws
        return {
            "parts": [args[3] for args in drops] == [x, -1, y, -1],
            "losses": torch.allclose(torch.stack(step.losses), torch.stack(losses), rtol=1e-5),
            "one seed": len({int(seed) for seed in seeds}) == 2 and draws.data_rank == 0,
            "other data along the unused axis": elsewhere.data_rank == x,
        }


def compiled(model: nn.Module, mesh: DeviceMesh) -> interlace.Step:
    return interlace.compile_step(model, lambda m, x, y: m(x, y), data(1)[0], mesh=mesh, strands=1)


def whole_loss(x: Tensor, y: Tensor, seed: Tensor) -> Tensor:
    """Eager code on one device with the masks of all ranks, which hold a half of each inner one."""
    model = Model()
    for number, block in enumerate(model.blocks):
        halves = [OP(torch.ones(6, 8), seed, 2 * number, part, 0.25)[1] for part in (0, 1)]
        outer = OP(torch.ones(6, 8), seed, 2 * number + 1, -1, 0.5)[1]
        x = x + outer / 0.5 * block.down(torch.cat(halves, 1) / 0.75 * block.up(x).relu())
    return (x - y).square().mean().detach()


def test_masks_follow_from_what_is_cut_and_not_from_names() -> None:
    """Axes of any name, several of them, frozen weights: each rank draws for its part of a value
    that is cut over an axis, and all ranks draw alike for values that are equal on them. Ranks
    along an axis over which nothing is laid out or exchanged see other data, and draw others."""
    for result in run_ranks("test_dropout:on_two_axes", 4, timeout_s=150):
        assert len(result.value) == 4
        assert all(result.value.values()), result.value
