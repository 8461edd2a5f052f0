"""Stages that are laid out each in its own way: bits of the same graphs one after the other, and
gradients of plain eager autograd on one process within a bound, for every schedule.

Wide are shared sequences in the layout of the first case, and six ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from traced_once import traced_once

import interlace
from interlace.config import PlanConfig
from interlace.ir.actions import Action, backward, forward, together
from interlace.ir.stage_messages import chunks_of
from interlace.schedules.finder import find
from wide import wide_unless

QUICK = PlanConfig(cluster="h100", search="list")
SCHEDULES = (
    "gpipe", "one_f_one_b", "eager_one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v",
    "dual_pipe_v", "stp", "folded", "eager_folded",
)  # fmt: skip
BOUND = 1e-10
"""Largest difference of a float64 gradient, over the largest gradient of the model."""
WORDS, WIDTH, LENGTH, SAMPLES, MICRO_BATCHES = 48, 16, 8, 4, 4


class Block(nn.Module):
    """A norm and an MLP beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Skipping(nn.Module):
    """Blocks of which the last reads the embedding too, over a long skip."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = Block()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x + first))


def loss_of(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def built(blocks: int = 4) -> nn.Module:
    torch.manual_seed(7)
    return Skipping(blocks).double()


def whole_batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    size = (SAMPLES, LENGTH)
    return [
        (torch.randint(WORDS, size, generator=draw), torch.randint(WORDS, size, generator=draw))
        for _ in range(MICRO_BATCHES)
    ]


def eager() -> tuple[float, dict[str, Tensor]]:
    module, total = built(), 0.0
    for batch in (batches := whole_batches()):
        loss = loss_of(module, *batch) / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def laid_out(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Megatron's layout over `tp`; with `sequence` what is between its matmuls is cut too."""
    names = mesh.mesh_dim_names or ()
    if "tp" not in names or mesh["tp"].size() == 1:
        return module
    tp = mesh["tp"]
    if not sequence:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in [*module.blocks, module.last]:
            parallelize_module(block, tp, plan)
        return module
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in [*module.blocks, module.last]:
        parallelize_module(block, tp, plan)
    parallelize_module(
        module,
        tp,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    return module


Layout = list[dict[str, int]]


def meshes_of(layout: Layout) -> list[DeviceMesh]:
    """One mesh for each stage, over consecutive ranks."""
    found, first = [], 0
    for axes in layout:
        sizes = tuple(axes.values())
        count = int(torch.tensor(sizes).prod())
        ranks = torch.arange(first, first + count).view(sizes)
        found.append(DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes)))
        first += count
    return found


def rows_of(mesh: DeviceMesh) -> list[tuple[Tensor, ...]]:
    """This rank's rows of the micro-batches."""
    names = mesh.mesh_dim_names or ()
    if "dp_replicate" not in names:
        return whole_batches()
    data = mesh["dp_replicate"]
    number, count = data.get_local_rank(), data.size()
    return [tuple(t.chunk(count)[number] for t in batch) for batch in whole_batches()]


def own_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    return next(mesh for mesh in meshes if dist.get_rank() in mesh.mesh.flatten().tolist())


def one_by_one(name: str) -> Callable[..., tuple[tuple[Action, ...], ...]]:
    """A schedule with the chunks of another one where that has them, one micro-batch after the
    other."""
    found = find(name)

    def actions(
        ranks: int, micro_batches: int, chunks: int = found.chunks
    ) -> tuple[tuple[Action, ...], ...]:
        rank_of = chunks_of(found.of_ranks(ranks, 8, chunks))
        lists: list[list[Action]] = [[] for _ in range(ranks)]
        for number in range(1, micro_batches + 1):
            for chunk in sorted(rank_of):
                lists[rank_of[chunk]].append(together(forward(number, chunk)))
            for chunk in sorted(rank_of, reverse=True):
                lists[rank_of[chunk]].append(together(backward(number, chunk)))
        return tuple(map(tuple, lists))

    return actions


def ran(meshes: list[DeviceMesh], schedule: Any, sequence: bool) -> dict[str, Tensor]:
    """Losses and the gradients that this rank has, by schedule."""
    mesh = own_mesh(meshes)
    module = laid_out(built(), mesh, sequence)
    batches = rows_of(mesh)
    step = interlace.compile_step(
        module, loss_of, batches[0], stages=meshes, schedule=schedule, config=QUICK
    )
    loss = step(batches).detach()
    own = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    norm = interlace.clip_grad_norm_(step, 1e9)
    evaluated = step.evaluate(batches)
    return {**own, "loss": loss, "norm": norm, "evaluated": evaluated}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def every_schedule(layout: Layout, sequence: bool, schedules: list[str]) -> dict[str, Any]:
    """What differs from one micro-batch after the other, and from eager autograd."""
    with gloo_group(60), traced_once():
        meshes = meshes_of(layout)
        loss, gradients = eager()
        largest = max(float(g.abs().max()) for g in gradients.values())
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        numbers = {"loss": loss, "evaluated": loss, "norm": float(norm)}
        in_turn: dict[tuple[int, ...], dict[str, Tensor]] = {}
        found: dict[str, Any] = {}
        for schedule in schedules:
            placed = chunks_of(find(schedule).of_ranks(len(layout), 8, find(schedule).chunks))
            ranks = tuple(placed[chunk] for chunk in sorted(placed))
            if ranks not in in_turn:
                in_turn[ranks] = ran(meshes, one_by_one(schedule), sequence)
            right = in_turn[ranks]
            own = [name for name in right if name in gradients]
            errors = [float((whole(right[n]) - gradients[n]).abs().max()) / largest for n in own]
            errors += [abs(float(right[n]) - number) for n, number in numbers.items()]
            other = ran(meshes, schedule, sequence)
            found[schedule] = {
                "own": own,
                "error": max(errors),
                "differ": [
                    name
                    for name in sorted(right.keys() | other.keys())
                    if not torch.equal(local(right[name]), local(other[name]))
                ],
            }
        return found


OTHERS = {1: ("zb_v",), 2: ("one_f_one_b",), 3: ("dual_pipe_v",), 4: ("folded",)}
"""Of the other layouts one schedule each."""
CASES: list[tuple[Layout, bool]] = [
    ([{"tp": 2}, {"dp_replicate": 2}], False),
    ([{"tp": 2}, {"dp_replicate": 2}], True),
    ([{"tp": 1}, {"tp": 2}], True),
    ([{"dp_replicate": 2, "tp": 2}, {"tp": 2}], True),
    ([{"tp": 4}, {"tp": 2}], False),
]
QUICK_CASES = (0, 2)
"""Stages of unlike axes by every schedule, and of unlike sizes with shared sequences; wide are the
first layout with shared sequences, and six ranks."""


@pytest.mark.parametrize(
    "number",
    [pytest.param(each, marks=wide_unless(each in QUICK_CASES)) for each in range(len(CASES))],
)
def test_every_schedule_has_the_bits_of_one_strand(number: int) -> None:
    layout, sequence = CASES[number]
    ranks = sum(int(torch.tensor(list(axes.values())).prod()) for axes in layout)
    schedules = list(SCHEDULES if number == 0 else OTHERS[number])
    results = run_ranks(
        "test_stage_layouts:every_schedule", ranks, args=[layout, sequence, schedules],
        timeout_s=300,
    )  # fmt: skip
    names = {name for name, _ in built().named_parameters()}
    for schedule in schedules:
        of_ranks = [result.value[schedule] for result in results]
        assert {name for each in of_ranks for name in each["own"]} == names, schedule
        assert max(each["error"] for each in of_ranks) < BOUND, schedule
        assert [each["differ"] for each in of_ranks] == [[]] * ranks, schedule
