"""The ways to run a step: two strands, one strand, plain eager autograd.

Each engine takes the micro-batches of a step and leaves the gradient of their mean loss in the
master weights, in the parameters' own layout. They differ in nothing else, so runs can be
compared bit by bit.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from interlace.graphs.dropout import seeds_for
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import Meshes
from interlace.parallel.tensor import finish_gradients, loss_context
from interlace.runtime.eager_recorder import EagerRecorder
from interlace.runtime.executor import Batch
from interlace.runtime.recorder import Clock, Recorder, clock_for
from interlace.runtime.strands import Strands
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


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What masks of dropout depend on, beside step and micro-batch."""

    seed: int = 0
    data_rank: int = 0
    """Numbers the ranks that see other tokens."""


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
        draws: Draws = Draws(),
    ) -> None:
        """A plan without a `pair` phase runs one strand. `constants` are the weights' constants and
        buffers; engines may share them."""
        self.number = 0
        self.draws = draws
        self.weights = weights
        self.strands = strands
        self.executor = strands.executor(plan, constants)
        self.buffers = {key: tensor for key, tensor in constants.items() if "gradient" in key[0]}
        self.losses: list[Tensor] = []

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """All micro-batches of a step."""
        return self._step(batches, None)

    def _step(self, batches: Sequence[Batch], recorder: Recorder | None) -> list[Tensor]:
        for buffer in self.buffers.values():
            buffer.zero_()
        if self.strands.takes_seeds:
            batches = [(*batch, self._seeds(index)) for index, batch in enumerate(batches)]
        self.losses = self.executor.step(batches, recorder)
        self.weights.set_gradients(self.buffers, self.strands.placements)
        finish_gradients(self.weights.parameters)
        return self.losses

    def _seeds(self, micro_batch: int) -> Tensor:
        return seeds_for(
            self.draws.seed,
            step=self.number,
            micro_batch=micro_batch,
            data_rank=self.draws.data_rank,
        )

    @cached_property
    def _clock(self) -> Clock:
        """Keeps the streams on which it stamps collectives over all recorded steps."""
        return clock_for(next(iter(self.buffers.values())).device.type)

    def record(self, batches: Sequence[Batch], label: str, rank: int) -> Timeline:
        """The same graphs, run by the recorder's interpreter."""
        recorder = Recorder(self.strands.op_graphs, self._clock.restarted())
        self._step(batches, recorder)
        return recorder.timeline(label, rank)
