"""What the tests of strands run inside a rank: a laid-out Llama, ways to run it, fingerprints.

Everything is made from seeds, so that ranks and ways to run start from the same numbers.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from interlace.config import ModelConfig, OptimizerConfig, ParallelConfig
from interlace.hardware.computed_costs import MachineModel, analytic_costs
from interlace.ir.costs import CostTable
from interlace.ir.plan import PhasePlan, Plan
from interlace.measure.start_up import profile_strands
from interlace.models import model_file
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import Meshes, build_meshes
from interlace.parallel.tensor import apply_tensor_parallel, loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.search.planner import make_plan
from interlace.step import Step
from interlace.train.built_model import NextTokenLoss
from interlace.train.optimizer import build_optimizer, clip_gradients
from interlace.train.step_runners import EagerRunner, StepRunner, planned_step
from interlace.train.weights import MasterWeights
from orders import depth_first_order, random_order
from phases import planned_graphs

VOCABULARY = 256
MICRO_BATCHES = 4
MODEL_SEED = 7
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
SLOW_LINK = MachineModel(
    flops_per_s=1e11, bytes_per_s=1e10, link_bits_per_s=10e9, link_latency_ns=50_000
)
"""A machine on which a small model communicates for about as long as it computes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small model; `sequence` tokens per sample."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 4
    ffn_width: int = 96
    sequence: int = 32
    tied_head: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn_width=self.ffn_width,
            tied_head=self.tied_head,
        )

    def build(self) -> torch.nn.Module:
        """The plain model on one device, always with the same weights."""
        torch.manual_seed(MODEL_SEED)
        return model_file("llama").build(self.model, VOCABULARY, self.sequence)

    def batches(self, step: int, count: int = MICRO_BATCHES) -> list[Batch]:
        """The micro-batches of a step: two samples each."""
        draw = torch.Generator().manual_seed(1000 + step)
        text = torch.randint(0, VOCABULARY, (count, 2, self.sequence + 1), generator=draw)
        return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in text]


@dataclass
class World:
    """One rank's share of a case. `start` holds the masters as they were first."""

    case: Case
    meshes: Meshes
    weights: MasterWeights
    strands: Strands
    constants: dict[tuple[str, str], Tensor]
    start: dict[str, Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Gradient sums by parameter name."""
        return {name: t for (role, name), t in self.constants.items() if role == "gradient"}

    def reset(self) -> None:
        """Put the first weights back."""
        for name, master in self.weights.masters.items():
            local(master).copy_(self.start[name])
        self.weights.publish()

    def computed(self) -> CostTable:
        """Times that follow from shapes: measuring takes longer than all else, and a search finds
        an order that interleaves with either."""
        return analytic_costs(self.strands.op_graphs, SLOW_LINK, {"tp": self.meshes.layout.size()})

    def costs(self) -> CostTable:
        """Times measured on this machine, equal on all ranks."""
        batch = self.case.batches(0)[0]
        return profile_strands(
            self.strands, batch, "cpu", self.constants, repeats=2, machine="test"
        )

    def runner(self, plan: Plan | None = None) -> Step:
        """Runs strands as planned; without a plan one strand after the other."""
        plan = plan or self.strands.sequential
        return planned_step(self.weights, self.strands, plan, self.constants)

    def planned(self, search: str = "list", costs: CostTable | None = None) -> Step:
        """Two strands in the order that suits a slow link, or `costs`."""
        return self.runner(make_plan(self.strands.op_graphs, costs or self.computed(), search))

    def random_plan(self, seed: int) -> Plan:
        """A valid plan that no search would make; equal on all ranks. Seeds differ in style, in
        how much of the forward strand runs ahead, and in barriers."""
        graphs, draw = self.strands.op_graphs, random.Random(seed)
        make = random_order if seed % 2 else depth_first_order
        head = draw.choice((0, 1, 5, 20, len(graphs["forward"].operators)))
        phases = {}
        for name, graph in planned_graphs(graphs, head).items():
            order = make(graph, seed)
            barriers = tuple(draw.sample(order, draw.choice((0, 0, 3))))
            phases[name] = PhasePlan(order, 0, 0, barriers)
        return Plan("random", self.strands.digest, "-", "two_strand", phases, head)

    def eager(self) -> EagerRunner:
        """Plain autograd."""
        return EagerRunner(self.weights, self.meshes)


def open_world(case: Case, ranks: int) -> World:
    """Build, lay out and trace a case; the process group exists."""
    meshes = build_meshes(ParallelConfig(tensor=ranks), "cpu")
    model = case.build()
    apply_tensor_parallel(model, meshes.tensor, model_file("llama").TENSOR_PLAN)
    weights = MasterWeights(NextTokenLoss(model), case.dtype)
    with loss_context(meshes.tensor):
        strands = build_strands(weights.module, case.batches(0)[0], meshes.axis_of_group)
    world = World(case, meshes, weights, strands, {**weights.constants(), **weights.buffers()})
    world.start = {name: local(p).clone() for name, p in weights.masters.items()}
    return world


def bits(tensor: Tensor) -> str:
    """A hash of a tensor's exact bits."""
    data = local(tensor).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def fingerprint(world: World, losses: Sequence[Tensor]) -> dict[str, str]:
    """The exact bits of every loss, gradient and weight, by name."""
    found = {f"loss {i}": bits(loss.reshape(1)) for i, loss in enumerate(losses, 1)}
    for name, master in world.weights.masters.items():
        assert master.grad is not None
        found[f"gradient {name}"] = bits(master.grad)
        found[f"weight {name}"] = bits(master)
    for name, parameter in world.weights.module.named_parameters():
        found[f"computing weight {name}"] = bits(parameter)
    return found


def train(world: World, runner: StepRunner, steps: int) -> list[dict[str, str]]:
    """Train from the first weights: after each step the fingerprint, gradients as clipped."""
    world.reset()
    optimizer = build_optimizer(world.weights.parameters, OPTIMIZER)
    found = []
    for step in range(steps):
        losses = losses_of(runner, world.case.batches(step))
        clip_gradients(world.weights.parameters, OPTIMIZER.clip_norm)
        optimizer.step()
        world.weights.publish()
        found.append(fingerprint(world, losses))
    return found


def losses_of(runner: StepRunner, batches: list[Batch]) -> list[Tensor]:
    """Run a step; the losses of its micro-batches."""
    runner(batches)
    return runner.losses


def differences(one: list[dict[str, str]], other: list[dict[str, str]]) -> list[str]:
    """Which steps and names differ in any bit; the comparison that all tests of bits use."""
    assert len(one) == len(other)
    return [
        f"step {step}: {name}"
        for step, (a, b) in enumerate(zip(one, other, strict=True), 1)
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
