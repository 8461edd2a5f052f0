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
from interlace.graphs.parts import CARRIED, Part, split
from interlace.graphs.trace import ChunkGraphs, StrandGraph
from interlace.ir.graph import OpGraph
from interlace.ir.phases import BACKWARD, FORWARD, LAST, NEXT, without_head
from interlace.ir.plan import Plan
from interlace.runtime.recorder import Recorder

Batch = tuple[Tensor, Tensor]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached; shares memory with `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lower_plan(chunk: ChunkGraphs, backward: StrandGraph, plan: Plan) -> dict[str, Lowered]:
    """The executable graph of each phase of `plan`; those of one strand if it has no `pair`."""
    forward: StrandGraph | Part = chunk.forward
    parts: dict[str, dict[str, StrandGraph | Part]] = {
        FORWARD: {FORWARD: chunk.forward},
        BACKWARD: {BACKWARD: backward},
    }
    if "pair" in plan.phases:
        head: dict[str, StrandGraph | Part] = {}
        if plan.ahead:
            head[NEXT], forward = split(chunk.forward, plan.ahead)
        parts[FORWARD] |= head
        parts["pair"] = {FORWARD: forward, **head, BACKWARD: backward}
    lowered = {
        name: lower(parts[name], phase.order, barriers=phase.barriers)
        for name, phase in plan.phases.items()
    }
    if plan.ahead:
        rest = without_head(plan.phases["pair"].order)
        lowered[LAST] = lower({FORWARD: forward, BACKWARD: backward}, rest)
    return lowered


class StrandExecutor:
    """Runs the micro-batches of a step through a traced chunk and accumulates gradients."""

    def __init__(
        self,
        module: nn.Module,
        chunk: ChunkGraphs,
        backward: StrandGraph,
        plan: Plan,
        op_graphs: Mapping[str, OpGraph],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """`plan` has been validated; with a `pair` phase it interleaves two strands.

        `gradients` are the persistent local buffers, by parameter name, that `backward` adds to.
        """
        self.lowered = lower_plan(chunk, backward, plan)
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
        count = len(batches)
        if self.interleaves and count < 2:
            raise InputError(
                f"two strands need at least two micro-batches per step, not {count}",
                hint="set train.micro_batches to 2 or more, or strands to 1",
            )
        self._tangent.fill_(1.0 / count)
        run = StepRun(self, batches, recorder)
        with torch.no_grad():
            for index in range(1, count + 1):
                if not self.interleaves or index == 1:
                    run.phase(FORWARD, forward=index)
                else:
                    last = LAST if index == count and LAST in self.lowered else "pair"
                    run.phase(last, forward=index, backward=index - 1)
                if not self.interleaves or index == count:
                    run.phase(BACKWARD, backward=index)
        return run.losses

    def constant(self, role: str, target: str) -> Any:
        """A parameter, buffer or gradient sum by name, or the tangent of the loss."""
        return self._tangent if role == "tangent" else self._constants[role, target]

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the forward's outputs after the loss."""
        return self._saved


class StepRun:
    """The values that phases of one step hand to each other."""

    def __init__(
        self, executor: StrandExecutor, batches: Sequence[Batch], recorder: Recorder | None
    ) -> None:
        self.executor = executor
        self.batches = batches
        self.recorder = recorder
        self.losses: list[Tensor] = []
        self.saved: dict[str, Any] = {}
        self.carried: dict[str, Any] = {}

    def phase(self, name: str, *, forward: int = 0, backward: int = 0) -> None:
        """Run one phase; `saved` and `carried` are emptied first, so that values die at their
        last use. `forward` and `backward` are the 1-based micro-batches of the strands."""
        lowered = self.executor.lowered[name]
        of = {FORWARD: forward, NEXT: forward + 1, BACKWARD: backward}
        inputs = []
        for strand, binding in lowered.inputs:
            if binding.role == "batch" and strand != BACKWARD:
                inputs.append(self.batches[of[strand] - 1][int(binding.target)])
            elif binding.role == "saved":
                inputs.append(self.saved.pop(binding.target))
            elif binding.role == CARRIED:
                inputs.append(self.carried.pop(binding.target))
            else:
                inputs.append(self.executor.constant(binding.role, binding.target))
        if self.recorder is None:
            outputs = lowered.module(inputs)
        else:
            outputs = self.recorder.run(lowered, inputs, of)
        self._take(lowered, outputs)

    def _take(self, lowered: Lowered, outputs: Sequence[Any]) -> None:
        made = list(zip(lowered.outputs, outputs, strict=True))
        finished = [value for (strand, _), value in made if strand == FORWARD]
        if finished:
            self.losses.append(finished[0])
            self.saved = dict(zip(self.executor.saved, finished[1:], strict=True))
        self.carried = {name: value for (strand, name), value in made if strand == NEXT}
