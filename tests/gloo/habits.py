"""What people's modules and loops do beside layers: rows of the matrix in `test_architectures.py`.

Forms of batches, autocast, logs, checkpoints, gradients of one's own, random depth, other meshes
and `fully_shard`. A new one is a line in `HABITS`.
"""

from typing import Any

import torch
import transformers
from strange_modules import Recomputed, Twice, double, function, mlp, numbers
from strange_world import MICRO_BATCHES, Case, squares
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask

import interlace
from interlace.graphs.dropout import seeds_for

HALF = 2**-8
"""Of gradients under autocast to bfloat16, whose numbers are rounded by this part of themselves."""
KEEP = 0.75
"""Probability with which a sample goes through a block."""
LOGGER = transformers.utils.logging.get_logger("transformers.of_a_stranger")
DRAWN = torch.ops.interlace.drawn


def named() -> dict[str, Any]:
    """As a collator gives it: a tensor twice, and a number."""
    x = torch.randn(3, 4, dtype=torch.float64)
    return {"inputs": x, "labels": torch.randn(3, 3, dtype=torch.float64), "again": x, "scale": 2.0}


def of_names(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    found = module(batch["inputs"]) + module(batch["again"])
    return (batch["scale"] * found - batch["labels"]).square().mean()


def listed() -> list[Any]:
    """Lists of tensors, of which one is empty."""
    pair = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]
    return [pair, [], torch.randn(3, 3, dtype=torch.float64)]


def of_lists(module: nn.Module, pair: list[Tensor], nothing: list[Tensor], y: Tensor) -> Tensor:
    assert not nothing
    return (module(pair[0]) * module(pair[1]) - y).square().mean()


def under_autocast(module: nn.Module, x: Tensor) -> Tensor:
    """As a loop for mixed precision has it: the forward inside, the loss outside."""
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x)
    return found.float().square().mean()


def masked_by_blocks() -> tuple[Any, ...]:
    """A mask as `flex_attention` takes it."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
    return (torch.randn(2, 4, dtype=torch.float64), mask)


class Warned(nn.Module):
    """Says once that it is slow, as models of transformers do in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning_once("this path is slow")
        return torch.tanh(self.linear(x))


class RandomDepth(nn.Module):
    """Blocks that samples skip at random, as in timm (`bernoulli_`). A twin is given what a step
    draws."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.given: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.given is None:
                kept = x.new_empty((x.shape[0], 1)).bernoulli_(KEEP)
            else:
                kept = self.given.pop(0)
            x = x + torch.tanh(block(x)) * (kept / KEEP)
        return x


def what_is_drawn(twin: nn.Module, step: interlace.Step, copies: int) -> None:
    """Give the twin what the next step draws for each micro-batch, of which each of `copies` ranks
    has its share."""
    graph = step.strands.graphs["forward"].graph
    nodes = graph.find_nodes(op="call_function", target=DRAWN.default)
    assert len(nodes) == 2
    assert isinstance(twin, RandomDepth)
    twin.given = []
    for index in range(MICRO_BATCHES):
        number, rank = divmod(index, copies)
        seeds = seeds_for(step.draws.seed, step=step.number, micro_batch=number, data_rank=rank)
        twin.given += [DRAWN(seeds, *node.args[1:]) for node in nodes]


def sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)


def on_an_equal_mesh(module: nn.Module, mesh: DeviceMesh) -> None:
    """A second mesh of the same ranks, which has groups of its own."""
    own = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("model",))
    parallelize_module(module, own, {"0": ColwiseParallel(), "2": RowwiseParallel()})


HABITS = [
    Case("dict as batch", double(lambda: nn.Linear(4, 3)), named, of_names),
    Case("lists as batch", double(lambda: nn.Linear(4, 3)), listed, of_lists),
    Case("BlockMask as input", mlp, masked_by_blocks, refused="BlockMask of FlexAttention"),
    Case("autocast in the loss", lambda: mlp().float(), lambda: (torch.randn(8, 4),),
         under_autocast, bound=HALF),
    Case("warning_once", double(Warned), numbers(2, 4)),
    Case("torch.utils.checkpoint", double(Recomputed), numbers(2, 4)),
    Case("autograd.Function", function(lambda m, x: Twice.apply(m.w) * x, w=(3,)), numbers(3)),
    Case("stochastic depth", double(RandomDepth), numbers(6, 4), tell=what_is_drawn),
    Case("fully_shard", mlp, numbers(2, 4), lay_out=sharded, axis="dp_shard"),
    Case("an equal mesh of its own", mlp, numbers(2, 4), squares, lay_out=on_an_equal_mesh),
]  # fmt: skip
"""All of them on one rank, where `fully_shard` has a mesh of size 1, and on two."""
