"""StrandExecutor: one optimizer step's micro-batches as F1, F2|B1, ..., FM|B(M-1), BM.

One thread issues the operators in plan order; there is no autograd engine, no hook and no second
thread. With one strand the same graphs run one after the other: F1, B1, F2, B2, ... Either way
micro-batch i's gradients are added before micro-batch i+1's, so the sums have the same bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.graphs.lower import Lowered, lower
from interlace.graphs.trace import ChunkGraphs, StrandGraph
from interlace.ir.graph import OpGraph
from interlace.ir.plan import PHASES
from interlace.runtime.recorder import Recorder

Batch = tuple[Tensor, Tensor]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached; shares memory with `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StrandExecutor:
    """Runs the micro-batches of a step through a traced chunk and accumulates gradients."""

    def __init__(
        self,
        module: nn.Module,
        chunk: ChunkGraphs,
        backward: StrandGraph,
        orders: Mapping[str, Sequence[str]],
        op_graphs: Mapping[str, OpGraph],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """`orders` has `forward` and `backward`, and `pair` to interleave two strands.

        `gradients` are the persistent local buffers, by parameter name, that `backward` adds to.
        """
        strands = {"forward": chunk.forward, "backward": backward}
        parts = {
            "forward": ("forward",),
            "pair": ("forward", "backward"),
            "backward": ("backward",),
        }
        self.lowered: dict[str, Lowered] = {
            phase: lower({name: strands[name] for name in parts[phase]}, orders[phase])
            for phase in PHASES
            if phase in orders
        }
        self.op_graphs = op_graphs
        self._saved = chunk.saved
        self._constants: dict[tuple[str, str], Any] = {
            ("gradient", name): buffer for name, buffer in gradients.items()
        }
        parameters = module.named_parameters(remove_duplicate=False)
        self._constants |= {("parameter", name): local(p) for name, p in parameters}
        self._constants |= {("buffer", name): local(b) for name, b in module.named_buffers()}
        self._tangent = torch.ones((), device=next(iter(gradients.values())).device)

    @property
    def interleaves(self) -> bool:
        """Whether two micro-batches share a graph."""
        return "pair" in self.lowered

    def step(self, batches: Sequence[Batch], recorder: Recorder | None = None) -> list[Tensor]:
        """Losses of all micro-batches; gradients of their mean are added to the buffers."""
        if self.interleaves and len(batches) < 2:
            raise InputError(
                f"two strands need at least two micro-batches per step, not {len(batches)}",
                hint="set train.micro_batches to 2 or more, or strands to 1",
            )
        self._tangent.fill_(1.0 / len(batches))
        losses: list[Tensor] = []
        with torch.no_grad():
            saved: dict[str, Tensor] = {}
            for index, batch in enumerate(batches, 1):
                if self.interleaves and index > 1:
                    outputs = self._run("pair", batch, saved, index, index - 1, recorder)
                else:
                    outputs = self._run("forward", batch, saved, index, 0, recorder)
                losses.append(outputs[0])
                saved = dict(zip(self._saved, outputs[1:], strict=True))
                del outputs
                if not self.interleaves or index == len(batches):
                    self._run("backward", batch, saved, 0, index, recorder)
        return losses

    def _run(
        self,
        phase: str,
        batch: Batch,
        saved: dict[str, Tensor],
        forward_index: int,
        backward_index: int,
        recorder: Recorder | None,
    ) -> Any:
        """Run one phase; `saved` is emptied, so that its values die at their last use."""
        lowered = self.lowered[phase]
        inputs = []
        for strand, binding in lowered.inputs:
            if binding.role == "batch" and strand == "forward":
                inputs.append(batch[int(binding.target)])
            elif binding.role == "saved":
                inputs.append(saved.pop(binding.target))
            elif binding.role == "tangent":
                inputs.append(self._tangent)
            else:
                inputs.append(self._constants[binding.role, binding.target])
        if recorder is None:
            return lowered.module(inputs)
        return recorder.run(lowered, inputs, {"forward": forward_index, "backward": backward_index})
