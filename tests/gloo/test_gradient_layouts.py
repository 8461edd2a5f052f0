"""Gradients whose layout is not their parameter's: they are brought to it inside the graph.

Modules are laid out by PyTorch's own calls. Each one's losses and whole gradients are compared with
those of an eager twin on one process, in float64, with one strand and with two.

Wide are layouts that convert as another one does, and one rank, where nothing is converted.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from processes import gloo_group, run_ranks
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional as F
from traced_once import traced_once

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.graphs.gradient_layouts import convert
from interlace.graphs.torch_private import fake_tensor_mode
from interlace.graphs.writer import GraphWriter
from wide import WIDE

QUICK = PlanConfig(cluster="h100", search="list")
BOUND = 1e-12
"""Largest difference over the largest gradient, in float64."""
WEIGHT_BOUND = 1e-7
"""Of weights after a step of AdamW at a rate of 0.1, which divides gradients by their own size."""
WIDTH, HEADS, LENGTH, WORDS = 8, 4, 4, 16


class Attention(nn.Module):
    """Attention with a gain per element of a query's head, as in Qwen3."""

    def __init__(self, *, q_norm: bool) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(WIDTH // HEADS) if q_norm else nn.Identity()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        q, k, v = (z.view(*z.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for z in (q, k, v))
        scores = self.q_norm(q) @ k.transpose(-2, -1)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.w2 = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(nn.Module):
    """One block between an embedding and a head."""

    def __init__(self, *, q_norm: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.attention_norm, self.ffn_norm, self.norm = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.attention, self.ffn = Attention(q_norm=q_norm), FeedForward()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.attention_norm(x))
        return self.head(self.norm(x + self.ffn(self.ffn_norm(x))))


def lay_out_llama(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """As torchtitan lays it out, with sequence parallelism and without."""
    whole = Replicate()
    outside = Shard(1) if sequence else whole
    gather = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(whole,))
    norm = SequenceParallel() if sequence else WholeOnEachRank()
    column = ColwiseParallel(use_local_output=not sequence)
    row = RowwiseParallel(output_layouts=outside, use_local_output=sequence)
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=outside)
        if sequence
        else WholeOnEachRank(),
        "attention": gather,
        "ffn": gather,
        "norm": norm,
        "attention_norm": norm,
        "ffn_norm": norm,
        "head": ColwiseParallel(input_layouts=outside, output_layouts=whole),
        **{f"attention.{name}": column for name in ("wq", "wk", "wv")},
        "attention.wo": row,
        "ffn.w1": ColwiseParallel(),
        "ffn.w3": ColwiseParallel(),
        "ffn.w2": row,
    }
    if sequence:
        plan["attention.q_norm"] = WholeOnEachRank()
    parallelize_module(model, mesh, plan)


class WholeOnEachRank(ParallelStyle):
    """Parameters become DTensors of which each rank has all (torchtitan calls it NoParallel)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            x = inputs[0]
            return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()]),)

        return distribute_module(module, device_mesh, input_fn=whole)


class Gains(nn.Module):
    """Whole gains of one element per head meet activations of which each rank holds some heads: on
    two ranks a part of a gradient has one element. Beside it what gives odd gradients: a number, a
    sum of two weights, a mean of a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(2))
        self.number, self.mean = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(4, 2))
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x @ (self.one + self.other)) * self.gain
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
        return x + self.number + self.mean.mean()


def lay_out_gains(model: nn.Module, mesh: DeviceMesh) -> None:
    whole = [Replicate()] * mesh.ndim
    places = dict.fromkeys(("gain", "number", "one"), whole)
    places |= {"mean": [Shard(0)] * mesh.ndim, "other": [*whole[1:], Shard(1)]}
    places |= {"up.weight": [*whole[1:], Shard(0)], "up.bias": [*whole[1:], Shard(0)]}
    distribute(model, mesh, places)


class Mixed(nn.Module):
    """What `distribute_module` lays out without a plan: embedding, norm, linears, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        return self.head(x + self.down(self.up(x).relu()))


def lay_out_mixed(model: nn.Module, mesh: DeviceMesh, weights: Placement, batch: Placement) -> None:
    """Every parameter by `weights` on all axes, and the batch by `batch`."""

    def place(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            over = [weights if parameter.ndim > 1 or weights == Shard(0) else Replicate()]
            if parameter not in laid_out:
                part = distribute_tensor(parameter.data, mesh, over * mesh.ndim)
                laid_out[parameter] = nn.Parameter(part)
            module.register_parameter(name, laid_out[parameter])

    def cut(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        whole = DTensor.from_local(inputs[0], mesh, [Replicate()] * mesh.ndim)
        return (whole.redistribute(placements=[batch] * mesh.ndim),)

    laid_out: dict[nn.Parameter, nn.Parameter] = {}
    distribute_module(model, mesh, place, cut, lambda _, output, __: output.full_tensor())


def distribute(model: nn.Module, mesh: DeviceMesh, places: dict[str, list[Placement]]) -> None:
    for name, placements in places.items():
        owner, _, attribute = name.rpartition(".")
        part = distribute_tensor(model.get_parameter(name).data, mesh, placements)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(part))


def text_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def text() -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(0, WORDS, (4, LENGTH), generator=draw),
            torch.randint(0, WORDS, (4, LENGTH), generator=draw),
        )
        for _ in range(3)
    ]


def numbers_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if isinstance(model.gain, DTensor):
        mesh = model.gain.device_mesh
        x, y = (DTensor.from_local(z, mesh, [Replicate()] * mesh.ndim) for z in (x, y))
    return F.mse_loss(model(x), y)


def numbers() -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(4, WIDTH, generator=draw, dtype=torch.float64),
            torch.randn(4, 2, generator=draw, dtype=torch.float64),
        )
        for _ in range(3)
    ]


class Case(NamedTuple):
    """A module, how it is laid out, and what it is trained on."""

    build: Callable[[], nn.Module]
    lay_out: Callable[[nn.Module, DeviceMesh], None]
    loss: Callable[..., Tensor] = text_loss
    batches: Callable[[], list[tuple[Tensor, ...]]] = text


CASES = {
    "torchtitan's Llama": Case(
        lambda: Llama(q_norm=True), lambda m, mesh: lay_out_llama(m, mesh, sequence=True)
    ),
    "torchtitan's Llama without sequence parallelism": Case(
        lambda: Llama(q_norm=False), lambda m, mesh: lay_out_llama(m, mesh, sequence=False)
    ),
    "gains of heads": Case(Gains, lay_out_gains, numbers_loss, numbers),
    "rows, batch cut": Case(Mixed, lambda m, mesh: lay_out_mixed(m, mesh, Shard(0), Shard(0))),
    "columns, sequence cut": Case(
        Mixed, lambda m, mesh: lay_out_mixed(m, mesh, Shard(1), Shard(1))
    ),
}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@traced_once()
def facts(case: Case, mesh: DeviceMesh, ways: Sequence[int]) -> dict[str, Any]:
    """How far losses, gradients and trained weights of so many strands are from those of eager
    autograd on one process, and whether gradients lie as their parameters do."""
    torch.manual_seed(3)
    twin = case.build().double()
    model = copy.deepcopy(twin)
    case.lay_out(model, mesh)
    batches = case.batches()
    expected = torch.stack([case.loss(twin, *batch) for batch in batches])
    expected.mean().backward()
    largest = max(float(p.grad.abs().max()) for p in twin.parameters())
    found: dict[str, Any] = {}
    for strands in ways:
        step = interlace.compile_step(
            model, case.loss, batches[0], mesh=mesh, strands=strands, config=QUICK
        )
        model.zero_grad()
        step(batches)
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        losses = torch.stack(step.losses) - expected.detach()
        errors = [float((full(p.grad) - q.grad).abs().max()) for p, q in pairs]
        found[f"{strands} strands"] = [float(losses.abs().max()), max(errors) / largest]
    found["layouts"] = all(
        getattr(p.grad, "placements", ()) == getattr(p, "placements", ())
        and p.grad.stride() == p.stride()
        for p in model.parameters()
    )
    for each in (model, twin):
        torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False).step()
    found["weights"] = max(float((full(p) - q).detach().abs().max()) for p, q in pairs)
    return found


def table(names: list[str], shape: list[int]) -> dict[str, Any]:
    with gloo_group():
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("a", "b")[: len(shape)])
        return {
            name: facts(CASES[name], mesh, (1, 2) if name == names[0] else (1,)) for name in names
        }


QUICK_CASES = ["torchtitan's Llama", "gains of heads", "rows, batch cut"]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param([2], QUICK_CASES, id="2"),
        pytest.param([2, 2], ["gains of heads"], id="2 x 2"),
        pytest.param(
            [2], [each for each in CASES if each not in QUICK_CASES], marks=WIDE, id="2, wide"
        ),
        pytest.param([2, 2], ["rows, batch cut"], marks=WIDE, id="2 x 2, wide"),
        pytest.param([1], ["gains of heads"], marks=WIDE, id="1"),
    ],
)
def test_gradients_are_those_of_eager_autograd(shape: list[int], names: list[str]) -> None:
    """Losses, whole gradients and the weights after a step of AdamW, with one strand and, of the
    first case, two, on one rank, on two, and on a mesh of two axes; gradients have the layouts of
    their parameters."""
    ranks = math.prod(shape)
    results = run_ranks("test_gradient_layouts:table", ranks, args=[names, shape], timeout_s=200)
    for result in results:
        assert list(result.value) == names
        for name, found in result.value.items():
            assert found.pop("layouts"), name
            assert found.pop("weights") < WEIGHT_BOUND, (name, found)
            assert all(error < BOUND for pair in found.values() for error in pair), (name, found)


def every_conversion() -> list[str]:
    """The pairs of layouts on two axes after whose conversion a rank has another part than
    DTensor gives it. All conversions are in one graph."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        whole = torch.arange(64.0).view(8, 8)
        kinds = (Replicate(), Shard(0), Shard(1))
        pairs = itertools.product(
            itertools.product((*kinds, Partial("sum"), Partial("avg")), repeat=2),
            itertools.product(kinds, repeat=2),
        )
        graph, mode = fx.Graph(), fake_tensor_mode()
        parts, outputs, expected = [], [], {}
        for given, wanted in pairs:
            cuts = [p if isinstance(p, Shard) else Replicate() for p in given]
            part = distribute_tensor(whole, mesh, cuts, src_data_rank=None).to_local().clone()
            total = whole
            for axis, placement in enumerate(given):
                if placement.is_partial():  # the parts are 1 and 2 times the tensor
                    part = part * (1 + mesh.get_local_rank(axis))
                    total = total * (3 if placement == Partial("sum") else 1.5)
            with graph.inserting_before(next(iter(graph.nodes), None)):
                node = graph.placeholder(f"part_{len(parts)}")
            node.meta["val"] = mode.from_tensor(part)
            parts.insert(0, part)
            outputs.append(convert(GraphWriter(graph, {}, like=node), node, given, wanted, mesh))
            expected[f"{given} -> {wanted}"] = distribute_tensor(
                total, mesh, wanted, src_data_rank=None
            ).to_local()
        graph.output(tuple(outputs))
        found = fx.GraphModule(nn.Module(), graph)(*parts)
        return [
            name
            for (name, tensor), other in zip(expected.items(), found, strict=True)
            if not torch.equal(tensor, other)
        ]


def test_every_conversion_is_that_of_dtensor() -> None:
    """All pairs of layouts on two axes, nested shards, sums and means among them."""
    for result in run_ranks("test_gradient_layouts:every_conversion", 4, timeout_s=100):
        assert result.value == []


class Scaled(nn.Module):
    """A linear with a parameter of its own kind beside it."""

    def __init__(self, other: Tensor) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(3, 2), nn.Parameter(other)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.view_as_real(self.other).mean()


class Claimed(nn.Module):
    """A weight of which forward takes the local part, and says how its gradient lies."""

    def __init__(self, claim: Placement) -> None:
        super().__init__()
        self.weight, self.claim = nn.Parameter(torch.randn(6, 4)), claim

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return F.linear(x, self.weight.to_local(grad_placements=[self.claim]))


def refusals() -> dict[str, str]:
    """What two ranks are told."""
    found = {}

    def refused(name: str, model: nn.Module) -> None:
        with pytest.raises(InputError) as error:
            interlace.compile_step(
                model, lambda m, x: m(x).square().mean(), (torch.randn(2, 4),), mesh=mesh, strands=1
            )
        found[name] = str(error.value)

    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        for name, size in (("uneven", 5), ("empty", 1)):
            model = nn.Linear(4, size, bias=False)
            distribute(model, mesh, {"weight": [Shard(0)]})
            refused(name, model)
        refused("complex", Scaled(torch.randn(2, dtype=torch.complex64)))
        model = nn.Linear(4, 4, bias=False)
        model.weight.grad_dtype = torch.bfloat16
        refused("type of gradient", model)
        for name, claim in (("maximum", Partial("max")), ("uneven gradient", Shard(0))):
            model = Claimed(claim)
            distribute(model, mesh, {"weight": [Replicate()]})
            if name == "uneven gradient":
                model.weight = nn.Parameter(distribute_tensor(torch.randn(5, 4), mesh))
            refused(name, model)
    return found


def test_what_cannot_be_converted_is_refused_by_name() -> None:
    """On all ranks alike, and before anything runs: unequal and empty parts, complex parameters,
    gradients that add up in another way than by sums."""
    for result in run_ranks("test_gradient_layouts:refusals", 2, timeout_s=100):
        for name in ("uneven", "empty"):
            assert "parameter 'weight' is cut along dimension 0 into 2 parts" in result.value[name]
        assert "parameter 'other' is complex64" in result.value["complex"]
        assert "gradient is asked for in bfloat16" in result.value["type of gradient"]
        assert "laid out as (P(max)), and the parameter as (R)" in result.value["maximum"]
        assert "the gradient of 'weight' is cut along" in result.value["uneven gradient"]
