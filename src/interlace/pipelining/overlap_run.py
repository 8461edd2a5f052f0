"""The values of a step inside PyTorch's pipeline runtime: of each stage and micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interlace.graphs.trace import Binding
from interlace.ir.actions import Action, Direction, Share, Slot, strand
from interlace.ir.plan import Plan
from interlace.measure.start_up import zeros_for
from interlace.pipelining.traced_stage import TracedStage
from interlace.runtime.executor import StepExecutor, StepRun
from interlace.runtime.recorder import Recorder
from interlace.schedules.stage import StageSchedule


class StageExecutor(StepExecutor):
    """Runs actions of the stages of this rank, one by one, as another runtime asks for them."""

    def __init__(self, stages: Sequence[TracedStage], plan: Plan, schedule: StageSchedule) -> None:
        """`plan` has an order for each phase of `schedule` on this rank."""
        self.stages = {stage.index: stage for stage in stages}
        super().__init__(
            {label: part for stage in stages for label, part in stage.parts.items()},
            plan,
            {label: graph for stage in stages for label, graph in stage.op_graphs.items()},
            {key: value for stage in stages for key, value in stage.constants().items()},
            schedule=schedule,
        )
        self.sums = {
            (stage.index, binding.target): node.meta["val"]
            for stage in stages
            for part in stage.parts.values()
            for node, binding in part.inputs.items()
            if binding.role == "gradient" and binding.target in stage.inputs
        }
        """Fake tensors like the sums of gradients of activations."""

    def begin(self) -> None:
        """Take the parameters and buffers as they are now, and their gradients, which are made
        where there are none."""
        constants: dict[tuple[str, str], Tensor] = {}
        for stage in self.stages.values():
            stage.binding.check()
            constants |= stage.constants()
            for name, parameter in stage.parameters.items():
                constants["gradient", name] = _sum_of(parameter)
        self.rebind(constants)


@torch.no_grad()
def _sum_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, which autograd would add to."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != parameter.stride():
        parameter.grad = torch.zeros_like(parameter).copy_(parameter.grad)
    return parameter.grad


@dataclass
class PassValues:
    """What a stage is given for a micro-batch."""

    batch: tuple[Tensor, ...]
    named: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Activations, gradients of outputs and sums of gradients of activations, by (role, target)."""


class OverlapRun(StepRun):
    """A step, action by action. Micro-batches count from 1."""

    def __init__(self, executor: StageExecutor, recorder: Recorder | None) -> None:
        super().__init__(executor, (), recorder)
        self._sums = executor.sums
        self.given: dict[tuple[int, int], PassValues] = {}  # type: ignore[assignment]
        """By stage and micro-batch, from the forward to the end of the backward."""

    def action(self, action: Action) -> None:
        """Run passes in their planned order, and drop what nobody will read."""
        for slot in action.slots:
            if slot.strand.direction == Direction.BACKWARD and slot.strand.share != Share.WEIGHT:
                self._make_sums(slot)
        with self.executor.plain_operators():
            super().action(action)

    def value(self, label: str, binding: Binding, micro_batch: int) -> Any:
        """What an input of a strand stands for on a micro-batch."""
        given = self.given[strand(label).chunk or 0, micro_batch]
        if binding.role == "batch":
            return given.batch[int(binding.target)]
        found = given.named.get((binding.role, binding.target))
        return super().value(label, binding, micro_batch) if found is None else found

    def gradients(self, stage: int, micro_batch: int) -> Mapping[str, Tensor]:
        """The gradients of the activations that a stage was given, after its backward."""
        named = self.given[stage, micro_batch].named
        return {target: value for (role, target), value in named.items() if role == "gradient"}

    def _make_sums(self, slot: Slot) -> None:
        stage = slot.strand.chunk or 0
        named = self.given[stage, slot.micro_batch].named
        device = self.executor.constant("tangent", "").device
        for (index, name), like in self._sums.items():
            if index == stage:
                named["gradient", name] = zeros_for(like, device)
