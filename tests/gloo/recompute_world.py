"""What the tests of recomputation run inside a rank: models under each policy, and their bits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from strand_world import SLOW_LINK, bits
from torch import Tensor, nn

from interlace.config import ModelConfig, ParallelConfig, Recompute
from interlace.graphs.dropout import seeds_for
from interlace.graphs.recompute import RecomputePolicy
from interlace.hardware.computed_costs import analytic_costs
from interlace.ir.plan import Plan
from interlace.models import model_file
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import build_meshes
from interlace.parallel.tensor import apply_tensor_parallel, loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.search.planner import make_plan
from interlace.step import Step
from interlace.train.built_model import NextTokenLoss
from interlace.train.step_runners import planned_step
from interlace.train.weights import MasterWeights

VOCABULARY, SEQUENCE = 64, 16


@dataclass(frozen=True, kw_only=True)
class Family:
    """A small model."""

    architecture: str = "llama"
    kv_heads: int = 4
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    def build(self) -> nn.Module:
        """Always with the same weights."""
        torch.manual_seed(11)
        config = ModelConfig(
            architecture=self.architecture,  # type: ignore[arg-type]
            layers=2,
            width=32,
            heads=4,
            kv_heads=self.kv_heads,
            ffn_width=64,
            dropout=self.dropout,
        )
        return model_file(self.architecture).build(config, VOCABULARY, SEQUENCE)

    def batches(self, step: int, count: int = 4) -> list[Batch]:
        """The micro-batches of a step; with dropout, each with its seeds."""
        draw = torch.Generator().manual_seed(100 + step)
        text = torch.randint(0, VOCABULARY, (count, 2, SEQUENCE + 1), generator=draw)
        found: list[Batch] = []
        for index, sample in enumerate(text):
            tokens = (sample[:, :-1].contiguous(), sample[:, 1:].contiguous())
            seeds = seeds_for(5, step=step, micro_batch=index)
            found.append((*tokens, seeds) if self.dropout else tokens)  # type: ignore[arg-type]
        return found


@dataclass
class Case:
    """One rank's share of a family, traced under one policy."""

    family: Family
    weights: MasterWeights
    strands: Strands

    def planned(self) -> Plan:
        """Two strands in the order that suits a slow link."""
        graphs = self.strands.op_graphs
        costs = analytic_costs(graphs, SLOW_LINK, {"tp": dist.get_world_size()})
        return make_plan(graphs, costs, "list")

    def run(self, plan: Plan, steps: int = 2) -> list[dict[str, str]]:
        """Bits of losses and gradients; weights move by plain descent between steps."""
        runner = self.runner(plan)
        start = {name: p.detach().clone() for name, p in self.weights.masters.items()}
        found = []
        with torch.no_grad():
            for step in range(steps):
                runner(self.family.batches(step))
                facts = {f"loss {i}": bits(loss.reshape(1)) for i, loss in enumerate(runner.losses)}
                for name, master in self.weights.masters.items():
                    assert master.grad is not None
                    facts[f"gradient {name}"] = bits(master.grad)
                    master.sub_(master.grad, alpha=0.1)
                self.weights.publish()
                found.append(facts)
            for name, master in self.weights.masters.items():
                master.copy_(start[name])
            self.weights.publish()
        return found

    def runner(self, plan: Plan) -> Step:
        """Runs steps as planned; `gradients` says what a step gave."""
        constants = {**self.weights.constants(), **self.weights.buffers()}
        return planned_step(self.weights, self.strands, plan, constants)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Copies of this rank's gradients of the last step."""
        masters = self.weights.masters.items()
        return {name: local(p.grad).clone() for name, p in masters if p.grad is not None}

    @property
    def kept_bytes(self) -> int:
        """Saved inputs of the backward, as the planner sees them."""
        given = self.strands.op_graphs["backward"].inputs
        return sum(value.bytes for value in given if value.role == "saved")


def open_case(
    family: Family, mode: Recompute = "none", budget_bytes: int = 0, *, ranks: int
) -> Case:
    """Build, lay out and trace a family; the process group exists."""
    meshes = build_meshes(ParallelConfig(tensor=ranks), "cpu")
    model = family.build()
    apply_tensor_parallel(model, meshes.tensor, model_file(family.architecture).TENSOR_PLAN)
    weights = MasterWeights(NextTokenLoss(model), family.dtype)
    policy = RecomputePolicy(mode=mode, budget_bytes=budget_bytes)
    with loss_context(meshes.tensor):
        strands = build_strands(
            weights.module, family.batches(0)[0][:2], meshes.axis_of_group, recompute=policy
        )
    return Case(family, weights, strands)


def counts(strands: Strands, names: Mapping[str, str]) -> dict[str, int]:
    """How many operators of the backward have each target, by a name for it."""
    operators = strands.op_graphs["backward"].operators
    return {name: sum(target in op.target for op in operators) for name, target in names.items()}
