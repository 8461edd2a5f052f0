"""The ways to run a step: planned strands (`step.Step`), and plain eager autograd.

Each runner takes the micro-batches of a step and leaves the gradient of their mean loss in the
master weights, in the parameters' own layout. They differ in nothing else, so runs can be
compared bit by bit.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.graphs.parts import RESULT
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import Meshes
from interlace.parallel.tensor import finish_gradients, loss_context
from interlace.runtime.cuda_graph import GraphMemory
from interlace.runtime.eager_recorder import EagerRecorder
from interlace.runtime.executor import Batch
from interlace.runtime.recorder import clock_for
from interlace.runtime.stage_link import StageLink
from interlace.runtime.traced_strands import FORWARD, Strands
from interlace.schedules.finder import Schedule
from interlace.step import NO_DRAWS, Draws, Step
from interlace.train.weights import MasterWeights, TrainedWeights


class StepRunner(Protocol):
    """Runs the micro-batches of one step."""

    number: int
    """Which step of training comes next; dropout depends on it."""
    losses: list[Tensor]
    """Of the micro-batches of the last step, recorded or not."""

    @property
    def results(self) -> Sequence[tuple[Tensor, ...]]:
        """What the module gave beside each of these losses."""
        ...

    def __call__(self, micro_batches: Sequence[Batch], /) -> Tensor:
        """The mean loss; gradients are in the masters afterwards."""
        ...

    def record(self, micro_batches: Sequence[Batch], /, label: str) -> Timeline | None:
        """The same step, recorded operator by operator; None if that cannot be seen."""
        ...


def loss_and_results(found: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What a module gave: its loss, and what stands beside that."""
    if isinstance(found, tuple):
        loss, *results = found
        return loss, tuple(results)
    return found, ()


class EagerRunner:
    """What a user has today: PyTorch autograd on the DTensor module."""

    def __init__(self, weights: MasterWeights, meshes: Meshes) -> None:
        self.number = 0
        self.weights = weights
        self.meshes = meshes
        self.losses: list[Tensor] = []
        self.results: list[tuple[Tensor, ...]] = []
        self._sums: dict[str, Tensor] = {}
        if weights.separate or weights.data is not None:
            self._sums = {
                name: torch.zeros_like(local(parameter), dtype=weights.dtype)
                for name, parameter in weights.module.named_parameters()
            }

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of each micro-batch in turn."""
        return self._run(batches, None)

    def _run(self, batches: Sequence[Batch], recorder: EagerRecorder | None) -> Tensor:
        module = self.weights.module
        for parameter in (*module.parameters(), *self.weights.parameters):
            parameter.grad = None
        for buffer in self._sums.values():
            buffer.zero_()
        self.losses, self.results = [], []
        with loss_context(self.meshes.tensor), recorder or nullcontext():
            self.weights.gather()
            for index, batch in enumerate(batches, 1):
                if recorder is not None:
                    recorder.micro_batch, recorder.strand = index, "forward"
                loss, results = loss_and_results(module(*batch))
                if recorder is not None:
                    recorder.strand = "backward"
                (loss / len(batches)).backward()
                self.losses.append(loss.detach())
                self.results.append(results)
                self._add_up()
            if self._sums:
                self.weights.set_gradients(self.weights.average(self._sums), self._layouts)
        finish_gradients(self.weights.parameters)
        return torch.stack(self.losses).mean()

    def _add_up(self) -> None:
        """Where masters are not the module's parameters: sum this micro-batch's gradients in
        float32."""
        if not self._sums:
            return
        self._layouts = {}
        for name, parameter in self.weights.module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            self._sums[name].add_(local(gradient))
            self._layouts[name] = getattr(gradient, "placements", None)
            parameter.grad = None

    def record(self, batches: Sequence[Batch], label: str) -> Timeline:
        """The same step under a dispatch mode that stamps every operator."""
        recorder = EagerRecorder(self.meshes.axis_of_group, clock_for(batches[0][0].device.type))
        self._run(batches, recorder)
        return recorder.timeline(label, dist.get_rank())


def planned_step(
    weights: MasterWeights,
    strands: Strands,
    plan: Plan,
    constants: Mapping[tuple[str, str], Tensor],
    draws: Draws = NO_DRAWS,
    costs: CostTable | None = None,
    *,
    schedule: Schedule | None = None,
    link: StageLink | None = None,
    captured_in: GraphMemory | None = None,
) -> Step:
    """Traced graphs in planned order. `constants` are the weights' constants and buffers; steps may
    share them. `schedule` and `link` are those of a pipeline; `captured_in` as of `Step`."""
    tensors = TrainedWeights(weights, strands.placements, constants)
    return Step(
        strands, plan, tensors, schedule=schedule, draws=draws, costs=costs, link=link,
        captured_in=captured_in,
    )  # fmt: skip


def gives_results(step: Step) -> bool:
    """Whether the model says something beside its loss; alike on all ranks."""
    return any(name.role == RESULT for name in step.strands.measured.parts[FORWARD].names)


def from_last_stage(step: Step, own: Tensor | None, like: Tensor, what: str) -> Tensor:
    """What the ranks of the last chunk have, alike, as `own`, on all ranks of the pipeline; `like`
    has its shape and type, and `what` is for errors. Collective over the pipeline."""
    assert step.link is not None
    assert step.strands.handovers is not None
    found = torch.zeros_like(like) if own is None else own.clone()
    step.link.share(found, step.strands.handovers.rank_of[-1], what)
    return found


def averaged_losses(step: Step, losses: Tensor, place: int) -> Tensor:
    """By micro-batch, the loss that the model gives as its result number `place`, in the place of
    `losses`, as these are told. Collective over the pipeline."""
    assert step.link is not None
    own = None
    if step.results:
        own = step.link.averaged(torch.stack([each[place] for each in step.results]))
    return from_last_stage(step, own, losses, "the losses of an evaluation")
