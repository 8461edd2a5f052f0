"""The ways to run a step: two strands, one strand, plain eager autograd.

Each engine takes the micro-batches of a step and leaves the gradient of their mean loss in the
master weights, in the parameters' own layout. They differ in nothing else, so runs can be
compared bit by bit.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from interlace.compiled import NO_DRAWS, CompiledStep, Draws
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import Meshes
from interlace.parallel.tensor import finish_gradients, loss_context
from interlace.runtime.eager_recorder import EagerRecorder
from interlace.runtime.executor import Batch, StepExecutor
from interlace.runtime.recorder import Recorder, clock_for
from interlace.runtime.traced_strands import Strands
from interlace.train.weights import MasterWeights


class Engine(Protocol):
    """Runs the micro-batches of one step."""

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Loss of each micro-batch (scalars); gradients are in the masters afterwards."""
        ...

    def record(self, batches: Sequence[Batch], label: str, rank: int) -> Timeline | None:
        """The same step, recorded operator by operator; None if that cannot be seen."""
        ...

    number: int
    """Which step of training comes next; dropout depends on it."""

    @property
    def losses(self) -> list[Tensor]:
        """Losses of the last step, recorded or not."""
        ...


class EagerEngine:
    """What a user has today: PyTorch autograd on the DTensor module."""

    def __init__(self, weights: MasterWeights, meshes: Meshes) -> None:
        self.number = 0
        self.weights = weights
        self.meshes = meshes
        self.losses: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}
        if weights.separate or weights.data is not None:
            self._sums = {
                name: torch.zeros_like(local(parameter), dtype=weights.dtype)
                for name, parameter in weights.module.named_parameters()
            }

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward and backward of each micro-batch in turn."""
        return self._step(batches, None)

    def _step(self, batches: Sequence[Batch], recorder: EagerRecorder | None) -> list[Tensor]:
        module = self.weights.module
        for parameter in (*module.parameters(), *self.weights.parameters):
            parameter.grad = None
        for buffer in self._sums.values():
            buffer.zero_()
        self.losses = []
        with loss_context(self.meshes.tensor), recorder or nullcontext():
            self.weights.gather()
            for index, batch in enumerate(batches, 1):
                if recorder is not None:
                    recorder.micro_batch, recorder.strand = index, "forward"
                loss = module(*batch)
                if recorder is not None:
                    recorder.strand = "backward"
                (loss / len(batches)).backward()
                self.losses.append(loss.detach())
                self._add_up()
            if self._sums:
                self.weights.set_gradients(self.weights.average(self._sums), self._layouts)
        finish_gradients(self.weights.parameters)
        return self.losses

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

    def record(self, batches: Sequence[Batch], label: str, rank: int) -> Timeline:
        """The same step under a dispatch mode that stamps every operator."""
        recorder = EagerRecorder(self.meshes.axis_of_group, clock_for(batches[0][0].device.type))
        self._step(batches, recorder)
        return recorder.timeline(label, rank)


class StrandEngine:
    """Traced graphs in planned order."""

    def __init__(
        self,
        weights: MasterWeights,
        strands: Strands,
        plan: Plan,
        constants: Mapping[tuple[str, str], Tensor],
        draws: Draws = NO_DRAWS,
    ) -> None:
        """`constants` are the weights' constants and
        buffers; engines may share them."""
        self.number = 0
        self.weights = weights
        self.compiled = CompiledStep(strands, plan, constants, draws=draws)
        self.buffers = {key: tensor for key, tensor in constants.items() if "gradient" in key[0]}
        self.losses: list[Tensor] = []

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """All micro-batches of a step."""
        return self._step(batches, None)

    def _step(self, batches: Sequence[Batch], recorder: Recorder | None) -> list[Tensor]:
        for buffer in self.buffers.values():
            buffer.zero_()
        self.losses = self.compiled.run(batches, self.number, recorder)
        self.weights.set_gradients(self.buffers, self.strands.placements)
        finish_gradients(self.weights.parameters)
        return self.losses

    @property
    def strands(self) -> Strands:
        """The graphs that it runs."""
        return self.compiled.strands

    @property
    def executor(self) -> StepExecutor:
        """What runs them."""
        return self.compiled.executor

    def record(self, batches: Sequence[Batch], label: str, rank: int) -> Timeline:
        """The same graphs, run by the recorder's interpreter."""
        recorder = self.compiled.recorder()
        self._step(batches, recorder)
        return recorder.timeline(label, rank)
