"""Session: one rank's model, data, weights, optimizer and runners, built from a RunConfig."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.compiled import Compilation
from interlace.config import Mode, RunConfig
from interlace.data.batches import Batches, Dataset
from interlace.degrees import widest
from interlace.errors import InputError, RunError
from interlace.graphs.random_draws import draws_values
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan
from interlace.parallel.context import local_positions
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS, Meshes, StageGroups
from interlace.parallel.tensor import loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.memory_limit import constant_bytes
from interlace.runtime.user_module import Constants
from interlace.step import Step
from interlace.train.optimizer import clip_by, global_norm, norm_over_stages
from interlace.train.rank_job import RankJob
from interlace.train.step_runners import (
    StepRunner,
    averaged_losses,
    gives_results,
    loss_and_results,
)
from interlace.train.weights import MasterWeights

PLAIN_MODES = frozenset[Mode]({"plain-1", "plain-2"})
"""Ways to run strands without `overlap.decompose`."""
DECOMPOSED_MODES = frozenset[Mode]({"decomposed-1", "decomposed-2", "inductor"})
"""Ways to run strands with all passes decomposed; PyTorch's scheduler knows no step with ends."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types that `train.dtype` and `train.reduce_dtype` name."""


@dataclass
class Setup:
    """What one rank trains: data, weights and optimizer on its device, and its place."""

    job: RankJob
    device: torch.device
    meshes: Meshes
    dataset: Dataset
    vocab_size: int
    """Rows of the embedding."""
    weights: MasterWeights
    drawn: bytes
    """Where the random generators stood when the model was built, as a digest: ranks that hold
    different parts of it must have drawn them from the same whole."""

    @property
    def config(self) -> RunConfig:
        """As this rank sees it."""
        return self.job.config

    @property
    def asked(self) -> RunConfig:
        """As the run file has it, alike on all ranks."""
        return self.job.asked

    @property
    def rank(self) -> int:
        """Of the job."""
        return self.job.rank

    @property
    def world_size(self) -> int:
        """Of the job."""
        return self.job.world_size

    @property
    def stages(self) -> StageGroups | None:
        """With whom this rank works in a pipeline, if there is one."""
        return self.meshes.stages

    @property
    def same_graphs(self) -> dist.ProcessGroup | None:
        """The ranks that run the same graphs and hold the same buffers; None for all."""
        return self.stages.stage if self.stages is not None and self.stages.apart else None

    def held_out(self) -> list[Batch]:
        """What evaluations see, alike on all ranks; of stages that are laid out each in its own
        way, this rank's rows of it."""
        train = self.asked.train
        size = train.micro_batch_size * (widest(self.job.layouts) if self.job.layouts else 1)
        batches = self.dataset.held_out(size, train.evaluate_batches)
        if self.job.layouts:
            own, shares = self.meshes.data_rank, self.meshes.data_ranks
            batches = [(each[0].chunk(shares)[own], each[1].chunk(shares)[own]) for each in batches]
        return [self.move(batch) for batch in batches]

    def batches(self, position: int = 0) -> Batches:
        """The micro-batches of this rank's share of the data, from that sample on."""
        return self.dataset.batches(
            self.config.train.micro_batch_size,
            position,
            shard=self.meshes.data_rank,
            num_shards=self.meshes.data_ranks,
        )

    def move(self, batch: tuple[Tensor, Tensor]) -> Batch:
        """What this rank sees of a batch, on its device."""
        if self.config.parallel.context > 1:
            mesh, method = self.meshes.context, self.config.parallel.context_method
            length = self.config.data.sequence_length
            own = local_positions(length, mesh.size(), mesh.get_local_rank(), method)
            batch = (batch[0][:, own], batch[1][:, own])
        tokens, targets = batch
        return tokens.to(self.device), targets.to(self.device)


@dataclass
class Session(Setup):
    """What training needs: a setup, and the ways to run its steps, which share weights and
    gradient sums."""

    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    runners: dict[Mode, StepRunner]
    """By mode; at least that of `config.strands`."""
    compiled: tuple[Compilation, Constants] | None = None
    """What plans of strands were made from, and what stands for the inputs of their graphs; None in
    a pipeline, and without strands."""

    @property
    def constant_bytes(self) -> int:
        """What this rank holds during all of a step."""
        module, data = self.weights.module, self.weights.data
        held = None if self.main is None else self.main.strands.held
        parallel, dtype = self.config.parallel, self.config.train.dtype
        return sum(constant_bytes(parallel, dtype, module, data, held).values())

    @property
    def runner(self) -> StepRunner:
        """The runner that the run asked for."""
        return self.runners[self.config.strands]

    @property
    def steps(self) -> dict[Mode, Step]:
        """The runners that run traced graphs."""
        return {mode: each for mode, each in self.runners.items() if isinstance(each, Step)}

    @property
    def main(self) -> Step | None:
        """A step on the graphs that the run chose; None if it runs none. Of two strands if there
        are, else of one."""
        chosen = {m: s for m, s in self.steps.items() if m not in PLAIN_MODES | DECOMPOSED_MODES}
        return chosen.get("2") or next(iter(chosen.values()), None)

    @property
    def plan(self) -> Plan | None:
        """Of two strands, if there is one."""
        return self.steps["2"].plan if "2" in self.steps else None

    @property
    def costs(self) -> CostTable | None:
        """The measured times of the graphs that the run works on."""
        return self.main.costs if self.main is not None else None

    def update(self, step: int) -> float:
        """Clip, step the optimizer and its schedule, publish. Returns the gradient norm.

        Raises RunError, before anything is changed, if the gradients are not finite.
        """
        norm = float(self._norm())
        if not math.isfinite(norm):
            raise RunError(
                f"the gradient norm of step {step} is {norm}; the weights are those of the step "
                "before",
                hint="lower optimizer.learning_rate, or raise optimizer.warmup_steps",
            )
        clip_by(self.weights.parameters, norm, self.config.optimizer.clip_norm)
        self.optimizer.step()
        self.schedule.step()
        self.weights.publish()
        return norm

    def _norm(self) -> Tensor:
        """Of all gradients of the model, over all ranks."""
        weights, main = self.weights, self.main
        if self.stages is None or main is None or main.strands.handovers is None:
            return global_norm(weights.parameters)
        holders = main.strands.handovers.holders
        # Masters that are cut are laid out over the ranks of a stage, which counts them.
        copies = self.stages.copies if weights.shards is None else 1
        counts = {name: len(holders(name)) * copies for name in weights.masters}
        return norm_over_stages(weights.masters, weights.names, counts)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses of micro-batches on this rank, with the weights as they are now.

        Raises InputError in a pipeline for a model that draws random numbers in training: what it
        is without them only its own code knows, and a rank has a stage of it."""
        runner, data = self.runner, self.weights.data
        gathers_each = data is not None and data.gathers_each
        if isinstance(runner, Step) and (self.stages is not None or gathers_each):
            draws = any(draws_values(part.strand.graph) for part in runner.executor.parts.values())
            if draws and self.stages is not None:
                raise InputError(
                    "the model draws random numbers in training beside dropout, what it is without "
                    "them only its own code knows, and a rank has one stage of it",
                    hint="set parallel.pipeline to 1",
                )
            if not draws:
                return self._evaluated(runner, batches)
        self.weights.gather()
        module = self.weights.module.eval()
        try:
            with loss_context(self.meshes.tensor):
                return [loss_and_results(module(*batch))[0] for batch in batches]
        finally:
            module.train()
            if gathers_each and "eager" not in self.runners:
                self.weights.drop_whole()

    def _evaluated(self, runner: Step, batches: Sequence[Batch]) -> list[Tensor]:
        """By the graph of training, whose loss may have an auxiliary loss in it."""
        losses = runner.executor.evaluate(batches)
        if not gives_results(runner):
            return losses
        if self.stages is None:
            return [cross_entropy for cross_entropy, *_ in runner.results]
        return list(averaged_losses(runner, torch.stack(losses), 0).unbind())

    def mean(self, loss: Tensor) -> float:
        """The mean over the ranks that see other tokens."""
        return float(self.total(loss)) / self._sharing

    def total(self, own: Tensor) -> Tensor:
        """The sum over the ranks that see other tokens. Collective."""
        total = own.detach().clone()
        if self._sharing > 1:
            for name in (SHARD_AXIS, REPLICATE_AXIS):
                dist.all_reduce(total, group=self.meshes.weights.get_group(name))
        return total

    @property
    def _sharing(self) -> int:
        """How many ranks see other tokens."""
        if self.weights.data is not None:
            return self.weights.data.ranks
        return self.stages.copies if self.stages is not None else 1
