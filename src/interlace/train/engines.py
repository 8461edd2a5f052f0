"""The ways to run a step: two strands, one strand, plain eager autograd.

Each engine takes the micro-batches of a step and leaves the gradient of their mean loss in the
master weights, in the parameters' own layout. They differ in nothing else, so runs can be
compared bit by bit.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.parallel.meshes import axis_of_group
from interlace.parallel.tensor import finish_gradients, loss_context
from interlace.runtime.eager_recorder import EagerRecorder
from interlace.runtime.executor import Batch, local
from interlace.runtime.recorder import Recorder, clock_for
from interlace.runtime.strands import Strands
from interlace.train.weights import MasterWeights


class Engine(Protocol):
    """Runs the micro-batches of one step."""

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Loss of each micro-batch (scalars); gradients are in the masters afterwards."""
        ...

    def record(self, batches: Sequence[Batch], label: str, rank: int) -> Timeline:
        """The same step, recorded operator by operator."""
        ...

    @property
    def losses(self) -> list[Tensor]:
        """Losses of the last step, recorded or not."""
        ...


class EagerEngine:
    """What a user has today: PyTorch autograd on the DTensor module."""

    def __init__(self, weights: MasterWeights, mesh: DeviceMesh) -> None:
        self.weights = weights
        self.mesh = mesh
        self.losses: list[Tensor] = []
        self._sums = weights.buffers() if weights.separate else {}

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
        with loss_context(self.mesh), recorder or nullcontext():
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
            self.weights.set_gradients(self._sums, self._layouts)
        finish_gradients(self.weights.parameters)
        return self.losses

    def _add_up(self) -> None:
        """With separate masters: sum this micro-batch's gradients in float32."""
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
        recorder = EagerRecorder(axis_of_group(self.mesh), clock_for(batches[0][0].device.type))
        self._step(batches, recorder)
        return recorder.timeline(label, rank)


class StrandEngine:
    """Traced graphs in planned order."""

    def __init__(
        self,
        weights: MasterWeights,
        strands: Strands,
        plan: Plan,
        buffers: Mapping[str, Tensor],
    ) -> None:
        """A plan without a `pair` phase runs one strand. Engines may share `buffers`."""
        self.weights = weights
        self.strands = strands
        self.executor = strands.executor(plan, buffers)
        self.buffers = buffers
        self.losses: list[Tensor] = []

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """All micro-batches of a step."""
        return self._step(batches, None)

    def _step(self, batches: Sequence[Batch], recorder: Recorder | None) -> list[Tensor]:
        for buffer in self.buffers.values():
            buffer.zero_()
        self.losses = self.executor.step(batches, recorder)
        self.weights.set_gradients(self.buffers, self.strands.chunk.placements)
        finish_gradients(self.weights.parameters)
        return self.losses

    def record(self, batches: Sequence[Batch], label: str, rank: int) -> Timeline:
        """The same graphs, run by the recorder's interpreter."""
        device = next(iter(self.buffers.values())).device.type
        recorder = Recorder(self.strands.op_graphs, clock_for(device))
        self._step(batches, recorder)
        return recorder.timeline(label, rank)
