"""compile_step traces a few of many equal blocks, unless the forward of the whole module treats one
of them in another way.

Wide are forms of what is around a block that are alike or differ by the same rule as another one.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_repeat import Block, differences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.graphs import repeat
from interlace.graphs.repeat import trace_repeated
from interlace.graphs.torch_private import init_fake_world
from interlace.graphs.trace import trace_chunk
from interlace.runtime.mesh_axes import axis_of_group
from wide import wide_unless

DEPTH, TWIN = 12, 5
"""Blocks of each module, and blocks of a twin with periods of one block."""
DESCRIBED = PlanConfig(cluster="h100")
Around = Callable[["Net", int, list[Tensor]], Tensor]
"""What code does in place of calling the block of that number, given the input of the first block
and the outputs of all blocks so far."""


class Net(nn.Module):
    """Blocks, and the code around them."""

    def __init__(self, around: Around, depth: int = DEPTH) -> None:
        super().__init__()
        self.around = around
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList(Block(i, 8, scaled=False) for i in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = [self.first(x)]
        for i in range(len(self.blocks)):
            seen.append(self.around(self, i, seen))
        return (self.last(seen[-1]) - y).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 1)


def recomputed(net: Net, i: int, seen: list[Tensor]) -> Tensor:
    return checkpoint(net.blocks[i], seen[-1], use_reentrant=False)  # type: ignore[return-value]


def cast(net: Net, i: int, seen: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.blocks[i](seen[-1])


def unseen(net: Net, i: int, seen: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return net.blocks[i](seen[-1])


ALIKE: dict[str, Around] = {
    "plain": lambda net, i, seen: net.blocks[i](seen[-1]),
    "around each": lambda net, i, seen: seen[-1] * 0.5 + net.blocks[i](seen[-1].relu()) * net.scale,
    "what came first": lambda net, i, seen: net.blocks[i](seen[-1]) + seen[0],
    "recomputed": recomputed,
    "autocast": cast,
    "only the last": lambda net, i, seen: (
        net.blocks[i](seen[-1]) * (1.0 if i < len(net.blocks) - 1 else 0.25)
    ),
    "only the first": lambda net, i, seen: net.blocks[i](seen[-1] if i else seen[-1] * 2.0),
}


QUICK_ALIKE = ("plain", "what came first", "recomputed", "autocast")


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(around, id=name, marks=wide_unless(name in QUICK_ALIKE))
        for name, around in ALIKE.items()
    ],
)
def test_equal_blocks_are_copied(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are those of tracing all blocks, and know what was read of all. The blocks in the
    middle were not even captured, but where calls of blocks stand in a graph of their own."""
    if around is not recomputed:
        monkeypatch.setattr(repeat, "check_deep_forward", None)
    net = Net(around)
    found = trace_repeated(net, batch(), watch=True)
    assert (found.copied, found.reason) == (DEPTH - TWIN, "")
    assert differences(found.chunk, trace_chunk(net, batch()), {}) == []
    assert found.chunk.reads is not None
    assert found.chunk.reads.hold()
    net.blocks[6].norm.eps = 0.1
    assert "eps" in found.chunk.reads.broken()


def plainly(net: Net, i: int, seen: list[Tensor]) -> Tensor:
    return net.blocks[i](seen[-1])


def only(number: int, other: Around) -> Around:
    """A way around the blocks that is another one for one of them."""
    return lambda net, i, seen: (other if i == number else plainly)(net, i, seen)


DIFFERENT: dict[str, tuple[Around, str]] = {
    "a factor": (only(6, lambda net, i, seen: 2.0 * net.blocks[i](seen[-1])), "operators"),
    "factors by number": (
        lambda net, i, seen: net.blocks[i](seen[-1]) * (1.0 + (i == 6)),
        "is not like",
    ),
    "a skip": (lambda net, i, seen: net.blocks[i](seen[-1]) + seen[3 if i == 7 else 0], "not"),
    "another way in": (only(6, lambda net, i, seen: net.blocks[i](seen[0])), "is not like"),
    "left out": (only(6, lambda net, i, seen: seen[-1]), "operators"),
    "run twice": (
        only(6, lambda net, i, seen: net.blocks[i](net.blocks[i](seen[-1]))),
        "operators",
    ),
    "another order": (
        lambda net, i, seen: net.blocks[{6: 7, 7: 6}.get(i, i)](seen[-1]),
        "is not like",
    ),
    "no gradient": (only(6, unseen), "operators"),
    "autocast": (only(6, cast), "operators"),
    "recomputed": (only(6, recomputed), "operators"),
}


QUICK_DIFFERENT = ("a factor", "a skip", "another way in", "run twice", "no gradient")


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        pytest.param(*row, id=name, marks=wide_unless(name in QUICK_DIFFERENT))
        for name, row in DIFFERENT.items()
    ],
)
def test_one_block_that_is_treated_in_another_way(around: Around, reason: str) -> None:
    """No twin of 5 blocks meets block 6 of 12, so all blocks are traced."""
    net = Net(around)
    found = trace_repeated(net, batch(), watch=True)
    assert found.copied == 0
    assert reason in found.reason


OWNER: list[nn.Module] = []
INSIDE: dict[str, Callable[[Block], float]] = {
    "its number": lambda block: 2.0 if block.number == 6 else 1.0,
    "another block": lambda block: 2.0 if block is OWNER[0].blocks[6] else 1.0,
    "a block that it holds": lambda block: 2.0 if block is block.others[0] else 1.0,
}
"""What a block in the middle asks for in its own code."""


class Asking(Block):
    """A block that does what it does by who it is."""

    def __init__(self, number: int, factor: Callable[[Block], float]) -> None:
        super().__init__(number, 8, scaled=False)
        self.factor = factor
        self.others: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor(self)


@pytest.mark.parametrize("factor", INSIDE.values(), ids=INSIDE)
def test_a_block_that_asks_which_one_it_is(factor: Callable[[Block], float]) -> None:
    net = Net(plainly)
    net.blocks = nn.ModuleList(Asking(i, factor) for i in range(DEPTH))
    OWNER[:] = [net]
    for block in net.blocks:
        block.others.append(net.blocks[6])
    assert trace_repeated(net, batch(), watch=True).copied == 0


STATE = {"calls": 0}


class Telling(Block):
    """A block that tells others something beside what it gives: `way` says how."""

    way = "count"

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.way == "count":
            STATE["calls"] += 1
            return out * (2.0 if STATE["calls"] == 7 else 1.0)
        OWNER[0].told.append(out.square().mean())  # type: ignore[union-attr, operator]
        return out


class TellingNet(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.told: list[Tensor] = []
        loss = super().forward(x, y)
        return loss + sum(self.told)


@pytest.mark.parametrize("way", ["count", "values"])
def test_a_block_that_tells_more_than_it_gives(way: str) -> None:
    """It is refused as it is without stand-ins, with which counts and sums would fall short."""
    net = TellingNet(plainly)
    net.blocks = nn.ModuleList(Telling(i, 8, scaled=False) for i in range(DEPTH))
    OWNER[:], STATE["calls"] = [net], 0
    for block in net.blocks:
        block.way = way
    with pytest.raises(InputError, match="changes Python state"):
        trace_repeated(net, batch(), watch=True)


class Handing(Block):
    """A block of several results, all but one of which it hands on as it got them."""

    def forward(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x + given[0]), *given


class HandingNet(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, bias, target = self.first(x), self.scale * x, y
        for block in self.blocks:
            out, bias, target = block(out, bias, target)
        return (self.last(out + bias) - target).square().mean()


def test_what_blocks_hand_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "check_deep_forward", None)
    net = HandingNet(plainly)
    net.blocks = nn.ModuleList(Handing(i, 8, scaled=False) for i in range(DEPTH))
    found = trace_repeated(net, batch(), watch=True)
    assert (found.copied, found.reason) == (DEPTH - TWIN, "")
    assert differences(found.chunk, trace_chunk(net, batch()), {}) == []


def test_a_hook_of_one_block() -> None:
    net = Net(plainly)
    net.blocks[6].register_forward_hook(lambda module, args, result: result * 2.0)
    assert trace_repeated(net, batch(), watch=True).copied == 0


def test_blocks_over_ranks() -> None:
    """Tensor-parallel blocks, whose hooks take a mesh that was first seen in block 0."""
    init_fake_world(2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        net = Net(plainly)
        for block in net.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        found = trace_repeated(net, batch(), watch=True)
        assert (found.copied, found.reason) == (DEPTH - TWIN, "")
        assert differences(found.chunk, trace_chunk(net, batch()), axis_of_group(mesh)) == []
    finally:
        dist.destroy_process_group()


def test_few_blocks_are_traced_without_a_twin() -> None:
    found = trace_repeated(Net(plainly, depth=2 * TWIN - 1), batch(), watch=True)
    assert (found.copied, found.reason) == (0, "")


def test_a_language_model_of_transformers() -> None:
    """Its blocks are copied, also where each makes a cache of its own; loss and gradients are those
    of eager PyTorch."""
    config = LlamaConfig(
        num_hidden_layers=DEPTH, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)

    def loss_fn(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels.flatten())

    micro = [(torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8))) for _ in range(2)]
    step = interlace.compile_step(model, loss_fn, micro[0], config=DESCRIBED)
    assert step.strands.measured.not_repeated == ""
    assert any("layers.6." in name for name in step.strands.parameters)
    loss = step(micro)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    losses = [loss_fn(model, *each) for each in micro]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(loss, torch.stack(losses).mean().detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
