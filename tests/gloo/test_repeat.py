"""Graphs made by tracing a few blocks and copying them are those of tracing all blocks.

Wide are language models on one rank, as those on one of two ranks have the same blocks and
collectives beside them, and on two a GPT and a Llama with grouped queries.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_ranks
from torch import Tensor, fx, nn

from interlace.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from interlace.errors import InputError
from interlace.graphs.accumulate import accumulate_gradients
from interlace.graphs.blocks import Stack, find_stack, shallow
from interlace.graphs.op_graphs import export, output_storages
from interlace.graphs.recompute import RecomputePolicy
from interlace.graphs.repeat import trace_repeated
from interlace.graphs.torch_private import fake_tensor_mode, init_fake_world
from interlace.graphs.trace import ChunkGraphs, StrandGraph, trace_chunk
from interlace.models import model_file
from interlace.parallel.data import data_layout
from interlace.parallel.meshes import build_meshes
from interlace.parallel.tensor import apply_tensor_parallel, loss_context
from interlace.runtime.traced_strands import build_strands
from interlace.train.built_model import NextTokenLoss, build_module
from wide import WIDE

SEQUENCE = 16
TRACED = 5
"""Blocks that are traced of a stack of blocks of one kind."""


def differences(one: ChunkGraphs, other: ChunkGraphs, axis_of_group: dict[str, str]) -> list[str]:
    """What is not the same in two traces of a module; the accumulation changes both."""
    found = [
        f"{strand}: {name}"
        for strand in ("forward", "backward")
        for name, part in _parts(getattr(one, strand)).items()
        if part != _parts(getattr(other, strand))[name]
    ]
    if _numbers(one) != _numbers(other):
        found.append("numbers of autograd")
    for field in ("saved", "parameters", "placements"):
        if getattr(one, field) != getattr(other, field):
            found.append(field)
    graphs = [_op_graphs(chunk, axis_of_group) for chunk in (one, other)]
    return found + [f"exported {i}" for i, (a, b) in enumerate(zip(*graphs, strict=True)) if a != b]


def _parts(strand: StrandGraph) -> dict[str, object]:
    """The graph as text has every name, operator, argument and result, in order."""
    nodes = [node for node in strand.graph.nodes if node.op != "output"]
    return {
        "operators": str(strand.graph),
        "bindings": list(strand.bindings.items()),
        "shapes": [_shape(node) for node in nodes],
        "modules": [_modules(node) for node in nodes],
    }


def _numbers(chunk: ChunkGraphs) -> list[int | None]:
    """Autograd's, from 0, as every trace goes on counting. Sums of gradients carry numbers behind
    those of the forward, which are all alike."""
    forward, backward = (
        [node.meta.get("seq_nr") for node in strand.graph.nodes if node.op != "output"]
        for strand in (chunk.forward, chunk.backward)
    )
    known = [each for each in forward if each is not None]
    least, most = min(known, default=0), max(known, default=0)
    return [None if n is None else min(n, most) - least for n in (*forward, *backward)]


def _shape(node: fx.Node) -> object:
    value = node.meta["val"]
    return (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else type(value)


def _modules(node: fx.Node) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _op_graphs(chunk: ChunkGraphs, axis_of_group: dict[str, str]) -> tuple[object, object]:
    storages = output_storages(chunk.forward)
    backward = accumulate_gradients(chunk, torch.float32)
    return export(chunk.forward, axis_of_group), export(backward, axis_of_group, storages)


Model = tuple[str, int, dict[str, Any]]
GROUPED: Model = ("llama", 6, {"kv_heads": 2})
TIED: Model = ("llama", 7, {"tied_head": True})
GPT: Model = ("gpt", 6, {})


def compare_language_models(tensor: int, cases: list[Model]) -> list[str]:
    """In a fake world of `tensor` ranks: every difference between repeated and direct traces."""
    init_fake_world(tensor)
    meshes = build_meshes(ParallelConfig(tensor=tensor), "cpu")
    found = []
    for architecture, depth, options in cases:
        fields = {"width": 32, "heads": 4, "kv_heads": 4, "ffn_width": 48, **options}
        config = ModelConfig(architecture=architecture, layers=depth, **fields)
        file = model_file(architecture)
        with fake_tensor_mode(), loss_context(meshes.tensor):
            model = file.build(config, 64, SEQUENCE)
            apply_tensor_parallel(model, meshes.tensor, file.TENSOR_PLAN)
            module = NextTokenLoss(model)
            batch = tuple(torch.zeros(2, SEQUENCE, dtype=torch.int64) for _ in range(2))
            repeated, direct = trace_repeated(module, batch), trace_chunk(module, batch)
        wrong = differences(repeated.chunk, direct, meshes.axis_of_group)
        if repeated.copied != depth - TRACED:
            wrong.append(f"copied {repeated.copied}: {repeated.reason}")
        found += [f"{architecture}, {depth} layers, {options}: {what}" for what in wrong]
    return found


@pytest.mark.parametrize(
    ("tensor", "cases"),
    [
        pytest.param(2, [TIED], id="2"),
        pytest.param(2, [GROUPED, GPT], marks=WIDE, id="2, wide"),
        pytest.param(1, [TIED, GROUPED, GPT], marks=WIDE, id="1"),
    ],
)
def test_graphs_of_language_models_are_those_of_a_direct_trace(
    tensor: int, cases: list[Model]
) -> None:
    """Names, operators, order, shapes, bindings, module paths, gradients, layouts, OpGraphs: Llama
    with grouped queries and with a tied head, GPT; alone and on one of two ranks."""
    (rank,) = run_ranks(
        "test_repeat:compare_language_models", 1, args=[tensor, cases], timeout_s=300
    )
    assert rank.value == []


def compare_runs() -> list[str]:
    """In fake worlds: runs whose graphs, after all passes, are not those of a direct trace."""
    llama = ModelConfig(layers=6, width=32, heads=4, kv_heads=4, ffn_width=48)
    gpt = replace(llama, architecture="gpt", dropout=0.1, tied_head=True)
    ring = ParallelConfig(tensor=2, context=2, context_method="ring")
    sharded = ParallelConfig(tensor=2, data_shard=2, zero=3, bucket_mib=0.01)
    cases = [(llama, ring, "layer"), (gpt, sharded, "none")]
    found = []
    for model, parallel, mode in cases:
        init_fake_world(4)
        config = RunConfig(
            model=model, parallel=parallel, data=DataConfig(sequence_length=SEQUENCE)
        )
        meshes = build_meshes(parallel, "cpu")
        with fake_tensor_mode(), loss_context(meshes.tensor):
            module = build_module(config, meshes, 64, torch.device("cpu"))
            length = SEQUENCE // parallel.context
            batch = tuple(torch.zeros(2, length, dtype=torch.int64) for _ in range(2))
            repeated, direct = (
                build_strands(
                    module,
                    batch,
                    meshes.axis_of_group,
                    data=data_layout(module, parallel, meshes, torch.float32),
                    recompute=RecomputePolicy(mode=mode),
                    repeat=repeat,
                )
                for repeat in (True, False)
            )
        dist.destroy_process_group()
        if dict(repeated.op_graphs) != dict(direct.op_graphs) or repeated.not_repeated:
            found.append(f"{model.architecture}: {repeated.not_repeated}")
    return found


def test_later_passes_see_the_same_graphs() -> None:
    """Ring attention with recomputation per layer, and sharded weights with dropout: what the
    planner gets is the same, with a copied block as with a traced one."""
    (rank,) = run_ranks("test_repeat:compare_runs", 1, timeout_s=300)
    assert rank.value == []


def run(chunk: ChunkGraphs, module: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Loss and gradients by running the graphs."""
    values = {("parameter", name): p for name, p in module.named_parameters()}
    values |= {("buffer", name): b for name, b in module.named_buffers()}
    values |= {("batch", str(i)): part for i, part in enumerate(batch)}
    values["tangent", ""] = torch.ones(())

    def call(strand: StrandGraph) -> Sequence[Tensor]:
        inputs = [values[binding.role, binding.target] for binding in strand.bindings.values()]
        return strand.module(*inputs)

    with torch.no_grad():
        loss, *saved = call(chunk.forward)
        values |= {("saved", name): v for name, v in zip(chunk.saved, saved, strict=True)}
        gradients = call(chunk.backward)
    return {"loss": loss, **dict(zip(chunk.parameters, gradients, strict=True))}


def test_repeated_graphs_give_the_bits_of_traced_ones() -> None:
    """On real weights: loss and every gradient of 7 layers, bitwise equal to running the direct
    trace, and equal to autograd within float32 rounding."""
    torch.manual_seed(3)
    config = ModelConfig(layers=7, width=32, heads=4, kv_heads=2, ffn_width=48)
    module = NextTokenLoss(model_file("llama").build(config, 64, SEQUENCE))
    text = torch.randint(0, 64, (2, SEQUENCE + 1))
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    repeated = trace_repeated(module, batch)
    assert repeated.copied == 2
    found = run(repeated.chunk, module, batch)
    direct = run(trace_chunk(module, batch), module, batch)
    assert found.keys() == direct.keys()
    assert all(torch.equal(found[name], direct[name]) for name in found)
    loss = module(*batch)
    loss.backward()
    torch.testing.assert_close(found.pop("loss"), loss.detach())
    assert len(found) == 7 * 9 + 3
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


class Block(nn.Module):
    """Feed-forward on a residual stream; what it does may depend on its number."""

    def __init__(self, number: int, inner: int, scaled: bool) -> None:
        super().__init__()
        self.number, self.scaled = number, scaled
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y / (self.number + 1) if self.scaled else y)


class Net(nn.Module):
    """Blocks of the given inner sizes; `also` is what happens around them."""

    def __init__(self, inner: Sequence[int], also: str = "") -> None:
        super().__init__()
        self.also = also
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(i, n, also == "scaled") for i, n in enumerate(inner))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x)
            if self.also == "reads input":
                x = x + y
            if self.also == "reads first" and seen:
                x = x + seen[0]
            seen.append(x)
        if self.also == "sums all":
            x = torch.stack(seen).sum(0)
        if self.also == "reads seventh":
            x = x + seen[6]
        return self.last(x).square().mean()


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(4, 8)


@pytest.mark.parametrize(
    ("inner", "also", "copied"),
    [
        ([8] * 6, "", 1),
        ([8] * 6 + [16], "", 2),
        ([16, 16] + [8] * 6, "", 1),
        ([8, 16] * 5, "", 2),
        ([8, 8, 16] * 6, "", 6),
        ([8] * 7, "reads input", 2),
    ],
)
def test_blocks_of_several_kinds(inner: list[int], also: str, copied: int) -> None:
    """Other blocks at an end, kinds that alternate, blocks that all read one outer value: as
    many blocks are copied as the pattern allows, and the graphs are those of a direct trace."""
    net = Net(inner, also)
    repeated = trace_repeated(net, _batch())
    assert (repeated.copied, repeated.reason) == (copied, "")
    assert differences(repeated.chunk, trace_chunk(net, _batch()), {}) == []


@pytest.mark.parametrize(
    ("also", "reason"),
    [
        ("scaled", "are not alike"),
        ("reads first", "of blocks take 23 and 24 operators backward"),
        ("sums all", "not alike"),
        ("reads seventh", "with 5 of its blocks, Net cannot be traced"),
    ],
)
def test_blocks_that_cannot_stand_for_each_other(also: str, reason: str) -> None:
    """A block that uses its own number, one that reads the first block, code that gathers from all
    blocks or from one in the middle: all are traced, and the reason is given."""
    net = Net([8] * 8, also)
    repeated = trace_repeated(net, _batch())
    assert repeated.copied == 0
    assert reason in repeated.reason
    assert differences(repeated.chunk, trace_chunk(net, _batch()), {}) == []


def test_weights_that_blocks_share_or_do_not_train() -> None:
    """A matrix shared by all blocks, and blocks without gradients, are traced in full."""
    shared, frozen = Net([8] * 7), Net([8] * 7)
    for block in shared.blocks:
        block.up = shared.blocks[0].up
    frozen.blocks.requires_grad_(False)
    for net in (shared, frozen):
        repeated = trace_repeated(net, _batch())
        assert repeated.copied == 0
        assert repeated.reason
        assert differences(repeated.chunk, trace_chunk(net, _batch()), {}) == []


def test_what_cannot_be_traced_is_an_error_of_the_whole_module() -> None:
    """Control flow on values inside the blocks is reported as without repeating."""

    class Picky(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) if x.sum() > 0 else x.sum()

    with pytest.raises(InputError, match="Picky cannot be traced"):
        trace_repeated(Picky([8] * 7), _batch())


def test_the_twin_shares_the_blocks() -> None:
    """It has the first blocks and the last ones, the very objects; the module is left alone."""
    net = Net([8] * 9)
    stack = find_stack(net)
    assert stack == Stack("blocks", 9, 1, 1, 2)
    twin = shallow(net, stack)
    assert list(twin.blocks) == [*net.blocks[:3], *net.blocks[-2:]]
    assert len(net.blocks) == 9
    assert twin.first is net.first
    assert math.isclose(float(twin(*_batch()).isfinite()), 1.0)


def test_short_stacks_need_no_reason() -> None:
    """With few blocks there is nothing to gain, which is no news; a long list of blocks that do
    not repeat is."""
    assert find_stack(Net([8] * 5)) == ""
    assert "do not repeat" in str(find_stack(Net([8, 16, 16, 8, 16, 8, 8, 8, 16, 16])))
    assert "holds no ModuleList" in str(find_stack(nn.Linear(2, 2)))
