"""Data-parallel layouts: two strands against one strand bit by bit, and against one process.

Each case runs real ranks. The reference is a plain single-process Llama in float64 that sees the
micro-batches of all data-parallel ranks.

`make test` runs each way along an axis alone, on two ranks, and on four some pairs of ways with
each in one of them. Wide are the other pairs, degree 4, and three axes on eight ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from strand_world import bits
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.graphs.torch_private import init_fake_world
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.plan import PhasePlan, Plan
from interlace.models import model_file
from interlace.models.transformers_model import TransformersLoss, build
from interlace.parallel.context import local_positions
from interlace.parallel.data import data_layout
from interlace.parallel.meshes import Meshes, axis_sizes, build_meshes
from interlace.parallel.tensor import loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.train.built_model import NextTokenLoss, build_module
from interlace.train.step_runners import EagerRunner, loss_and_results, planned_step
from interlace.train.weights import MasterWeights
from orders import random_order
from phases import plan_by
from wide import WIDE

FAMILIES = ("llama", "gpt")
VOCABULARY, SEQUENCE, MICRO_BATCHES, SAMPLES = 64, 16, 3, 2
MODEL = ModelConfig(layers=1, width=32, heads=4, kv_heads=2, ffn_width=48)
BOUND = 1e-10
"""Largest difference of a float64 gradient, relative to the largest element of its parameter."""


def parallel(text: str) -> ParallelConfig:
    """`rep2 zero3x2 ulysses2 tp2 each` as a layout; so is `ep2`."""
    config = ParallelConfig(bucket_mib=0.01)
    for word in text.split():
        name, degree = word.rstrip("0123456789"), int(word[len(word.rstrip("0123456789")) :] or 1)
        changes: dict[str, dict[str, Any]] = {
            "rep": {"data_replicate": degree},
            "zero1x": {"data_shard": degree, "zero": 1},
            "zero3x": {"data_shard": degree, "zero": 3},
            "ulysses": {"context": degree, "context_method": "ulysses"},
            "ring": {"context": degree, "context_method": "ring"},
            "tp": {"tensor": degree},
            "ep": {"expert": degree},
            "each": {"reduce": "micro_batch"},
        }
        config = replace(config, **changes[name])
    return config


@dataclass
class Rank:
    """One rank's share of a case in float64."""

    meshes: Meshes
    weights: MasterWeights
    strands: Strands
    constants: dict[tuple[str, str], Tensor]
    batches: list[Batch]


def global_batches(data_ranks: int) -> list[Batch]:
    """The micro-batches of a step of all data ranks: [micro-batches x data ranks]."""
    draw = torch.Generator().manual_seed(3)
    count = MICRO_BATCHES * data_ranks
    text = torch.randint(0, VOCABULARY, (count, SAMPLES, SEQUENCE + 1), generator=draw)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in text]


def open_rank(text: str, architecture: str, meshes: Meshes, groups: dict[str, str]) -> Rank:
    """Build, lay out, trace and share a case."""
    layout = parallel(text)
    config = run_config(layout, architecture)
    torch.manual_seed(7)
    module = build_module(config, meshes, VOCABULARY, torch.device("cpu")).double()
    data = data_layout(module, layout, meshes, torch.float64)
    weights = MasterWeights(module, torch.float32, data=data, meshes=meshes)
    mine = global_batches(meshes.data_ranks)[meshes.data_rank :: meshes.data_ranks]
    if layout.context > 1:
        mesh = meshes.context
        own = local_positions(SEQUENCE, mesh.size(), mesh.get_local_rank(), layout.context_method)
        mine = [(tokens[:, own], targets[:, own]) for tokens, targets in mine]
    with loss_context(meshes.tensor):
        strands = build_strands(module, mine[0], groups, data=data, buffer_dtype=torch.float64)
    constants = {**weights.constants(), **weights.buffers()}
    return Rank(meshes, weights, strands, constants, mine)


def run_config(layout: ParallelConfig, architecture: str) -> RunConfig:
    """What `build_module` reads. An architecture that is not ours is a folder of `transformers`."""
    if architecture not in FAMILIES:
        model = ModelConfig(source="hugging_face", config=architecture)
    elif architecture == "gpt":
        model = replace(MODEL, architecture="gpt", kv_heads=MODEL.heads)
    else:
        model = MODEL
    return RunConfig(
        model=model,
        parallel=layout,
        data=replace(RunConfig().data, sequence_length=SEQUENCE),
        train=replace(TrainConfig(), micro_batches=MICRO_BATCHES),
    )


def table(cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """What one rank finds in each case (layout, architecture), one after the other."""
    groups: dict[str, str] = {}
    meshes: dict[tuple[int, ...], Meshes] = {}
    found = []
    with gloo_group():
        for text, architecture in cases:
            layout = parallel(text)
            degrees = tuple(axis_sizes(layout).values())
            if degrees not in meshes:
                meshes[degrees] = build_meshes(layout, "cpu")
                groups |= meshes[degrees].axis_of_group
            found.append(facts_of(text, architecture, meshes[degrees], groups))
    return found


def facts_of(
    text: str, architecture: str, meshes: Meshes, groups: dict[str, str]
) -> dict[str, Any]:
    """Names whose bits differ between one strand and two, and errors of whole gradients.

    `groups` names the axes of all process groups so far: DTensor keeps what it has worked out for
    one mesh, groups included, and takes it for every equal mesh of the process.
    """
    rank = open_rank(text, architecture, meshes, groups)
    graphs = rank.strands.op_graphs
    plans = {"one": rank.strands.sequential, "random": random_plan(graphs)}
    seen = {}
    for name, plan in plans.items():
        runner = planned_step(rank.weights, rank.strands, plan, rank.constants)
        runner(rank.batches)
        seen[name] = {f"loss {i}": bits(loss.reshape(1)) for i, loss in enumerate(runner.losses)}
        seen[name] |= {n: bits(grad_of(p)) for n, p in rank.weights.masters.items()}
    expected = reference(rank.meshes.data_ranks, architecture)
    strands = worst_error(rank.weights, expected)
    EagerRunner(rank.weights, rank.meshes)(rank.batches)
    return {
        "case": f"{architecture} {text}",
        "different": [name for name in seen["one"] if seen["one"][name] != seen["random"][name]],
        "strands": strands,
        "eager": worst_error(rank.weights, expected),
        "lanes": sorted(set(rank.strands.pair.lanes) - {COMPUTE_LANE}),
    }


def random_plan(graphs: Mapping[str, OpGraph]) -> Plan:
    """A valid plan of two strands that no search would make, with a head."""
    head = len(graphs["forward"].operators) // 5
    return plan_by(graphs, lambda graph: PhasePlan(random_order(graph, 5), 0, 0), head)


def worst_error(weights: MasterWeights, expected: dict[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient differs most, and by how much of its largest element."""
    errors = {}
    # The gradient of a key's bias is zero but for rounding: softmax does not see it.
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in weights.masters.items():
        difference = whole(grad_of(parameter)) - expected[name]
        scale = max(least, float(expected[name].abs().max()))
        errors[name] = float(difference.abs().max()) / scale
    return max(errors.items(), key=lambda item: item[1])


def grad_of(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@cache
def reference(data_ranks: int, architecture: str) -> dict[str, Tensor]:
    """Gradients of one process with plain autograd over all micro-batches."""
    torch.manual_seed(7)
    if architecture in FAMILIES:
        config = run_config(ParallelConfig(), architecture).model
        module: nn.Module = NextTokenLoss(
            model_file(architecture).build(config, VOCABULARY, SEQUENCE)
        )
    else:
        model: Any = build(architecture, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
        model.config._experts_implementation = "eager"  # their own loop; in float64 too
        module = TransformersLoss(model)
    module.double()
    losses = [loss_and_results(module(*batch))[0] for batch in global_batches(data_ranks)]
    torch.stack(losses).mean().backward()
    return {name: grad_of(p) for name, p in module.named_parameters()}


AXES: dict[str, tuple[str, ...]] = {
    "replicate": ("rep2",),
    "shard": ("zero1x2", "zero3x2"),
    "context": ("ulysses2", "ring2"),
    "tensor": ("tp2",),
}


def mixes(axes: int) -> list[str]:
    """Every layout that is 2 wide along so many axes."""
    chosen = combinations(AXES.values(), axes)
    return [" ".join(words) for ways in chosen for words in product(*ways)]


EIGHT_RANKS = [
    "rep2 zero1x2 ulysses2", "zero1x2 ring2 tp2", "rep2 ulysses2 tp2", "rep2 zero3x2 ring2",
    "rep2 zero3x2 tp2", "zero3x2 ulysses2 tp2",
]  # fmt: skip
"""Of `mixes(3)`: all sets of three axes, and of every two ways along two axes one with both."""


Case = tuple[str, str]
TWO_RANKS: list[Case] = [
    ("rep2", "llama"), ("zero1x2", "gpt"), ("zero3x2", "llama"), ("ulysses2", "gpt"),
    ("ring2", "llama"), ("tp2", "gpt"), ("zero3x2 each", "gpt"),
]  # fmt: skip
FOUR_RANKS: list[Case] = [
    ("zero3x2 ring2", "llama"), ("zero1x2 ulysses2", "gpt"), ("rep2 tp2", "gpt"),
    ("zero3x2 tp2 each", "llama"),
]  # fmt: skip


def other_family(cases: list[Case]) -> list[Case]:
    return [(text, FAMILIES[1 - FAMILIES.index(family)]) for text, family in cases]


def in_turn(layouts: list[str]) -> list[Case]:
    """With one family each, so that each way along an axis comes with both."""
    return [(text, FAMILIES[(at + at // 2) % 2]) for at, text in enumerate(layouts)]


MORE_ON_FOUR = [
    *(each for each in in_turn(mixes(2)) if each not in FOUR_RANKS),
    *in_turn(["rep4", "zero1x4", "zero3x4 each", "ulysses4", "ring4", "tp4"]),
    *in_turn(["rep2 zero3x2 each", "zero3x2 tp2 each", "zero3x2 ring2 each"]),
]
WIDE_CASES = {2: other_family(TWO_RANKS), 4: MORE_ON_FOUR, 8: in_turn(EIGHT_RANKS)}


def test_the_tables_hold_every_pair() -> None:
    """On four and eight ranks every pair of ways along two axes is there, and each way along an
    axis with both families; on eight every three axes too; what is not wide has each way."""
    every_way = {word for ways in AXES.values() for word in ways}
    assert {text for text, _ in TWO_RANKS} == {*mixes(1), "zero3x2 each"}
    assert {word for text, _ in FOUR_RANKS for word in text.split()} >= every_way
    held = {pair for text in EIGHT_RANKS for pair in combinations(text.split(), 2)}
    assert held == {tuple(text.split()) for text in mixes(2)}
    assert set(EIGHT_RANKS) <= set(mixes(3))
    assert {text for text, _ in FOUR_RANKS + MORE_ON_FOUR} >= set(mixes(2))
    for cases in (FOUR_RANKS + MORE_ON_FOUR, WIDE_CASES[8]):
        words = {(word, family) for text, family in cases for word in text.split()}
        assert words >= set(product(every_way, FAMILIES))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, TWO_RANKS, id="2"),
        pytest.param(4, FOUR_RANKS, id="4"),
        *(pytest.param(n, each, marks=WIDE, id=f"{n}, wide") for n, each in WIDE_CASES.items()),
    ],
)
def test_every_layout_agrees_with_one_process(ranks: int, cases: list[Case]) -> None:
    """Two strands have the bits of one; gradients are those of one process within BOUND."""
    assert all(parallel(text).ranks == ranks for text, _ in cases)
    results = run_ranks("test_data_parallel:table", ranks, args=[cases], timeout_s=1200)
    assert [len(result.value) for result in results] == [len(cases)] * ranks
    for facts in (facts for result in results for facts in result.value):
        assert facts["different"] == [], facts
        assert facts["strands"][1] < BOUND, facts
        assert facts["eager"][1] < BOUND, facts
    lanes = {text: facts["lanes"] for (text, _), facts in zip(cases, results[0].value, strict=True)}
    if cases is FOUR_RANKS:  # a planner sees each axis as a link of its own
        assert lanes["zero3x2 ring2"] == ["cp", "dp_shard"]
        assert lanes["rep2 tp2"] == ["dp_replicate", "tp"]


class Unused(nn.Module):
    """One of two weights of a layer does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0][0](x).square().mean()


@pytest.mark.parametrize("word", ["zero3x2", "zero1x2", "zero3x2 each"])
def test_weights_without_a_gradient_are_not_sharded(word: str) -> None:
    """Their part of a bucket would be filled with others' gradients: refused by name."""
    init_fake_world(2)
    try:
        layout, module = parallel(word), Unused()
        meshes = build_meshes(layout, "cpu")
        data = data_layout(module, layout, meshes, torch.float32)
        with pytest.raises(InputError, match=r"does not depend on 'layers\.0\.1\.weight'"):
            build_strands(module, (torch.randn(2, 4),), meshes.axis_of_group, data=data)
    finally:
        dist.destroy_process_group()
