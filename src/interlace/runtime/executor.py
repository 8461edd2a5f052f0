"""StrandExecutor: one optimizer step's micro-batches as F1, F2|B1, ..., FM|B(M-1), BM.

One thread issues the operators in plan order; there is no autograd engine, no hook and no second
thread. With one strand the same graphs run one after the other: F1, B1, F2, B2, ... Either way
micro-batch i's gradients are added before micro-batch i+1's, so the sums have the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interlace.errors import InputError
from interlace.graphs.dropout import no_dropout
from interlace.graphs.lower import Lowered, lower
from interlace.graphs.parts import CARRIED, Part, split
from interlace.graphs.strides import restrided
from interlace.graphs.trace import StrandGraph
from interlace.ir.graph import OpGraph
from interlace.ir.phases import (
    AGAIN,
    BACKWARD,
    BEFORE,
    FINAL,
    FIRST,
    FORWARD,
    GATHER,
    LAST,
    NEXT,
    REDUCE,
    end_strands,
    phases_of_step,
)
from interlace.ir.plan import Plan
from interlace.runtime.recorder import Recorder

Batch = tuple[Tensor, ...]
"""The inputs of one micro-batch; those of a language model are tokens and targets."""


def lower_plan(
    graphs: Mapping[str, StrandGraph], plan: Plan, *, late_waits: bool = True
) -> dict[str, Lowered]:
    """The executable graph of each phase of `plan`, also of those that follow from others;
    `late_waits` as of `lower`."""
    forward: StrandGraph | Part = graphs[FORWARD]
    head: dict[str, StrandGraph | Part] = {}
    if plan.ahead:
        head[NEXT], forward = split(graphs[FORWARD], plan.ahead)
    backward = {BACKWARD: graphs[BACKWARD]}
    start, end = end_strands(graphs)
    parts: dict[str, dict[str, StrandGraph | Part]] = {
        FORWARD: {**_some(graphs, GATHER), start: graphs[start], **head},
        "pair": {FORWARD: forward, **head, **backward},
        LAST: {FORWARD: forward, **backward},
        BACKWARD: {end: graphs[end], **_some(graphs, REDUCE)},
        AGAIN: {FORWARD: graphs[FORWARD]},
        BEFORE: {**backward},
    }
    barriers = {name: phase.barriers for name, phase in plan.phases.items()}
    return {
        name: lower(parts[name], order, late_waits=late_waits, barriers=barriers.get(name, ()))
        for name, order in plan.orders.items()
    }


def _some(graphs: Mapping[str, StrandGraph], name: str) -> dict[str, StrandGraph]:
    return {name: graphs[name]} if name in graphs else {}


def _batch_strides(forward: StrandGraph) -> dict[int, tuple[int, ...]]:
    """How the trace saw each tensor of a batch lie in memory, by index."""
    return {
        int(forward.bindings[node.name].target): tuple(node.meta["val"].stride())
        for node in forward.graph.find_nodes(op="placeholder")
        if forward.bindings[node.name].role == "batch"
    }


def _tangent(backward: StrandGraph, device: torch.device) -> Tensor:
    """The gradient of the loss with respect to itself, in the loss's type."""
    for node in backward.graph.find_nodes(op="placeholder"):
        if backward.bindings[node.name].role == "tangent":
            return torch.ones((), dtype=node.meta["val"].dtype, device=device)
    return torch.ones((), device=device)


class StrandExecutor:
    """Runs the micro-batches of a step through traced graphs and accumulates gradients."""

    def __init__(
        self,
        graphs: Mapping[str, StrandGraph],
        saved: Sequence[str],
        plan: Plan,
        op_graphs: Mapping[str, OpGraph],
        constants: Mapping[tuple[str, str], Tensor],
        *,
        data_ranks: int = 1,
    ) -> None:
        """`plan` has been validated; with a `pair` phase it interleaves two strands.

        `saved` names the forward's outputs after the loss. `constants` are what the graphs' inputs
        of roles `parameter`, `buffer`, `gradient`, `shard` and `shard_gradient` stand for; the
        gradients of the mean over the micro-batches of `data_ranks` ranks are added up in them.
        """
        self.graphs = graphs
        self.lowered = lower_plan(graphs, plan)
        self.op_graphs = op_graphs
        self.saved = tuple(saved)
        self._constants = dict(constants)
        self._data_ranks = data_ranks
        self._alone: dict[str, Lowered] = {}
        self._strides = _batch_strides(graphs[FORWARD])
        self._tangent = _tangent(graphs[BACKWARD], next(iter(constants.values())).device)

    def rebind(self, constants: Mapping[tuple[str, str], Tensor]) -> None:
        """From now on graphs' inputs stand for these, which are like those before."""
        self._constants.update(constants)

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
        self._tangent.fill_(1.0 / (count * self._data_ranks))
        run = StepRun(self, [self._as_traced(batch) for batch in batches], recorder)
        with self._plain_operators():
            for phase, forward, backward in phases_of_step(self.lowered, count):
                run.phase(phase, forward=forward, backward=backward)
        return run.losses

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses of these micro-batches, forward only, with the weights as they are now."""
        names = [name for name in (GATHER, FORWARD) if name in self.graphs]
        if not self._alone:
            for name in names:
                order = self.op_graphs[name].order
                self._alone[name] = lower({name: self.graphs[name]}, order)
        losses = []
        with self._plain_operators():
            if GATHER in self._alone:
                StepRun(self, [], None).outputs(self._alone[GATHER], {})
            for batch in batches:
                run = StepRun(self, [(*self._as_traced(batch), no_dropout())], None)
                losses.append(run.outputs(self._alone[FORWARD], {FORWARD: 1})[0])
        return losses

    def _as_traced(self, batch: Batch) -> Batch:
        """The batch with the strides that were traced: a copy of what has others, nothing else."""
        wanted = self._strides
        return tuple(
            restrided(tensor, wanted[i]) if i in wanted else tensor
            for i, tensor in enumerate(batch)
        )

    @contextmanager
    def _plain_operators(self) -> Iterator[None]:
        """Operators run as they stand in the graphs, which have autocast's conversions already."""
        with torch.no_grad(), torch.autocast(self._tangent.device.type, enabled=False):
            yield

    def constant(self, role: str, target: str) -> Any:
        """A parameter, buffer or gradient sum by name, or the tangent of the loss."""
        return self._tangent if role == "tangent" else self._constants[role, target]


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
        of = {
            GATHER: forward,
            FIRST: forward,
            FORWARD: forward,
            NEXT: forward + 1,
            BACKWARD: backward,
            FINAL: backward,
            REDUCE: backward,
        }
        self._take(lowered, self.outputs(lowered, of))

    def outputs(self, lowered: Lowered, of: Mapping[str, int]) -> Sequence[Any]:
        """Run a graph; `of` gives the micro-batch of each strand."""
        inputs = []
        for strand, binding in lowered.inputs:
            if binding.role == "batch":
                inputs.append(self.batches[of[strand] - 1][int(binding.target)])
            elif binding.role == "saved":
                inputs.append(self.saved.pop(binding.target))
            elif binding.role == CARRIED:
                inputs.append(self.carried.pop(binding.target))
            else:
                inputs.append(self.executor.constant(binding.role, binding.target))
        if self.recorder is None:
            return lowered.module(inputs)
        return self.recorder.run(lowered, inputs, of)

    def _take(self, lowered: Lowered, outputs: Sequence[Any]) -> None:
        made = list(zip(lowered.outputs, outputs, strict=True))
        finished = [value for (strand, _), value in made if strand in (FIRST, FORWARD)]
        if finished:
            self.losses.append(finished[0])
            self.saved = dict(zip(self.executor.saved, finished[1:], strict=True))
        self.carried = {name: value for (strand, name), value in made if strand == NEXT}
