"""Proves that a pipeline changes no bit: every schedule over 2 and 4 ranks, against one strand of
the same module on one rank, which is compared with eager autograd.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from traced_once import traced_once

import interlace
from interlace.config import PlanConfig

QUICK = PlanConfig(cluster="h100", search="list")
SCHEDULES = (
    "gpipe", "one_f_one_b", "eager_one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v",
    "dual_pipe_v", "stp", "folded", "eager_folded",
)  # fmt: skip
WORDS, WIDTH, LENGTH = 48, 16, 6


class LongSkip(nn.Module):
    """Blocks with dropout, of which the last ones read the embedding too; the head is tied to it,
    and a mask and positions are read in the middle."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(blocks))
        self.drop = nn.Dropout(0.25)

    def forward(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        first = x = self.words(tokens)
        half = len(self.blocks) // 2
        for index, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            if index == half:
                x = torch.where(mask.unsqueeze(-1), x + self.places(places), x)
            if index == len(self.blocks) - 1:
                x = x + first
            x = x + self.drop(torch.relu(block(norm(x))))
        return x @ self.words.weight.t()


def loss_of(module: nn.Module, *batch: Tensor) -> Tensor:
    *inputs, targets = batch
    return nn.functional.cross_entropy(module(*inputs).flatten(0, 1), targets.flatten())


def language(count: int, seed: int = 5) -> list[tuple[Tensor, ...]]:
    """Micro-batches of integers and booleans."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.arange(LENGTH)
    return [
        (
            torch.randint(WORDS, (2, LENGTH), generator=draw),
            places,
            torch.randint(2, (2, LENGTH), generator=draw).bool(),
            torch.randint(WORDS, (2, LENGTH), generator=draw),
        )
        for _ in range(count)
    ]


def built(blocks: int = 9) -> LongSkip:
    torch.manual_seed(7)
    return LongSkip(blocks)


def wanted(make: Callable[[], nn.Module], batches: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Losses and gradients of one strand on one rank."""
    module = make()
    torch.manual_seed(11)
    step = interlace.compile_step(module, loss_of, batches[0], strands=1, config=QUICK)
    step(batches)
    evaluated = step.evaluate(batches)
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {**found, "losses": torch.stack(step.losses), "evaluated": evaluated}


def differing(
    make: Callable[[], nn.Module],
    batches: list[tuple[Tensor, ...]],
    mesh: DeviceMesh,
    schedule: Any,
    right: dict[str, Tensor],
) -> dict[str, Any]:
    """What differs on this rank, and which gradients it has."""
    module = make()
    torch.manual_seed(11)
    step = interlace.compile_step(
        module, loss_of, batches[0], mesh=mesh, schedule=schedule, config=QUICK
    )
    step(batches)
    evaluated = step.evaluate(batches)
    own = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found = {**own, "losses": torch.stack(step.losses), "evaluated": evaluated}
    return {
        "wrong": [name for name, value in found.items() if not torch.equal(value, right[name])],
        "own": sorted(own),
        "parts": sorted(step.strands.parts),
    }


def every_schedule(micro_batches: int) -> dict[str, Any]:
    """What differs from one strand, by schedule."""
    with gloo_group(60), traced_once():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        batches = language(micro_batches)
        right = wanted(built, batches)
        names = sorted(set(right) - {"losses", "evaluated"})
        found: dict[str, Any] = {"parameters": names}
        for schedule in SCHEDULES:
            found[schedule] = differing(built, batches, mesh, schedule, right)
        return found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 5), (4, 8)])
def test_every_schedule_has_the_bits_of_one_strand(ranks: int, micro_batches: int) -> None:
    """Losses on all ranks; each gradient on the rank of its stage, a tied one on both."""
    results = run_ranks("test_pipeline_step:every_schedule", ranks, args=[micro_batches],
                        timeout_s=300)  # fmt: skip
    found = [result.value for result in results]
    for schedule in SCHEDULES:
        of_ranks = [each[schedule] for each in found]
        assert [each["wrong"] for each in of_ranks] == [[]] * ranks, schedule
        held = sorted(name for each in of_ranks for name in each["own"])
        assert sorted(set(held)) == found[0]["parameters"]
        assert all(len(each["own"]) < len(found[0]["parameters"]) for each in of_ranks)
