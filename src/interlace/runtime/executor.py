"""StepExecutor: one optimizer step's micro-batches, action by action of a schedule.

One thread issues the operators in plan order; there is no autograd engine, no hook and no second
thread. In every schedule micro-batch i's gradients are added before micro-batch i+1's, so the sums
have the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from interlace.errors import InputError
from interlace.graphs.dropout import no_dropout
from interlace.graphs.lower import Lowered, lower
from interlace.graphs.parts import HANDED, LOSS, RESULT, GraphPart
from interlace.graphs.random_draws import refuse_evaluation
from interlace.graphs.strides import restrided
from interlace.graphs.trace import Binding
from interlace.ir.actions import (
    Action,
    Direction,
    Share,
    Strand,
    labels_of,
    strand,
    strands_of,
)
from interlace.ir.graph import OpGraph
from interlace.ir.plan import Plan
from interlace.runtime.recorder import Recorder
from interlace.schedules.finder import Schedule, find

Batch = tuple[Tensor, ...]
"""The inputs of one micro-batch; those of a language model are tokens and targets."""
NamedBatch = dict[str, Tensor]
"""The same by name, as the loaders of transformers and torchtitan give them."""
_BACKWARD_SHARES = (Share.WHOLE, Share.INPUT, Share.WEIGHT)
"""How a backward may be run."""
_NOBODY: frozenset[str] = frozenset()
"""Readers of a value that no strand is given."""


def lower_plan(
    parts: Mapping[str, GraphPart],
    plan: Plan,
    schedule: Schedule | None = None,
    *,
    late_waits: bool = True,
) -> dict[str, Lowered]:
    """The executable graph of each phase of the plan's schedule; `late_waits` as of `lower`."""
    schedule = schedule or find(plan.schedule)
    lowered = {}
    for phase in schedule.phases(parts, head=bool(plan.head)):
        planned = plan.needed(phase)
        strands = {each.label: _share(each, parts, plan.head) for each in strands_of(phase)}
        lowered[phase] = lower(
            strands, planned.order, late_waits=late_waits, barriers=planned.barriers
        )
    return lowered


def _share(strand: Strand, parts: Mapping[str, GraphPart], head: int) -> GraphPart:
    part = parts[strand.graph]
    if strand.share == Share.HEAD:
        return part.split(head)[0]
    return part.split(head)[1] if strand.share == Share.REST else part


def _inputs(parts: Mapping[str, GraphPart], role: str) -> Iterator[tuple[Binding, Any]]:
    """(binding, traced value) of the inputs of this role."""
    for part in parts.values():
        for node, binding in part.inputs.items():
            if binding.role == role:
                yield binding, node.meta["val"]


def _batch_strides(parts: Mapping[str, GraphPart]) -> dict[int, tuple[int, ...]]:
    """How the trace saw each tensor of a batch lie in memory, by index."""
    return {int(b.target): tuple(value.stride()) for b, value in _inputs(parts, "batch")}


def _tangent(parts: Mapping[str, GraphPart], device: torch.device) -> Tensor:
    """The gradient of the loss with respect to itself, in the loss's type."""
    dtypes = [value.dtype for _, value in _inputs(parts, "tangent")]
    return torch.ones((), dtype=dtypes[0] if dtypes else None, device=device)


class StepExecutor:
    """Runs the micro-batches of a step through traced graphs and accumulates gradients."""

    def __init__(
        self,
        parts: Mapping[str, GraphPart],
        plan: Plan,
        op_graphs: Mapping[str, OpGraph],
        constants: Mapping[tuple[str, str], Tensor],
        *,
        schedule: Schedule | None = None,
        data_ranks: float = 1,
    ) -> None:
        """`plan` has been validated; `schedule` is looked up by its name if it is not given.

        `constants` are what the graphs' inputs of roles `parameter`, `buffer`, `gradient`, `shard`
        and `shard_gradient` stand for; the gradients of the mean over the micro-batches of
        `data_ranks` ranks are added up in them.
        """
        self.parts = parts
        self.schedule = schedule or find(plan.schedule)
        self.lowered = lower_plan(parts, plan, self.schedule)
        self.op_graphs = op_graphs
        self._head = bool(plan.head)
        self._constants = dict(constants)
        self._data_ranks = data_ranks
        self._alone: dict[str, Lowered] = {}
        self._actions: dict[int, tuple[Action, ...]] = {}
        self._strides = _batch_strides(parts)
        self._tangent = _tangent(parts, next(iter(constants.values())).device)
        self.adds_up = False
        """Whether gradients are those of the sum of the losses, and not of their mean."""
        self.keeps_results = True
        """Whether a step or evaluation keeps what `loss_fn` gave beside the loss."""
        self.results: list[tuple[Tensor, ...]] = []
        """Of the last step or evaluation: by micro-batch, what it kept of that."""
        self.readers = _readers(parts)
        """The strands of a micro-batch that need each value that is handed over."""

    def rebind(self, constants: Mapping[tuple[str, str], Tensor]) -> None:
        """From now on graphs' inputs stand for these, which are like those before."""
        self._constants.update(constants)

    def step(self, batches: Sequence[Batch], recorder: Recorder | None = None) -> list[Tensor]:
        """Losses of all micro-batches; gradients of their mean are added to the buffers."""
        actions = self._step_actions(len(batches))
        self._tangent.fill_(self._weight(len(batches)))
        run = StepRun(self, [self._as_traced(batch) for batch in batches], recorder)
        with self.plain_operators():
            for action in actions:
                run.action(action)
        self.results = run.given()
        return [run.losses[number] for number in sorted(run.losses)]

    def _weight(self, count: int) -> float:
        """The gradient of what is differentiated with respect to the loss of a micro-batch."""
        return 1.0 / ((1 if self.adds_up else count) * self._data_ranks)

    def _step_actions(self, count: int) -> tuple[Action, ...]:
        if count not in self._actions:
            actions = self.schedule.actions(count, self.parts, head=self._head)
            for action in actions:
                if action.phase not in self.lowered:
                    raise InputError(
                        f"schedule {self.schedule.name!r} runs {action} in a step of {count} "
                        f"micro-batches, and the plan has no order for it",
                        hint="make the phases of a schedule the same for all numbers of "
                        "micro-batches",
                    )
            self._actions[count] = actions
        return self._actions[count]

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses of these micro-batches, forward only, with the weights as they are now. Raises
        InputError for a forward that draws random numbers beside dropout."""
        self._check_draws()
        gathers = labels_of(self.parts, Direction.FORWARD, Share.ONCE)
        forwards = labels_of(self.parts, Direction.FORWARD, Share.WHOLE)
        losses: list[Tensor] = []
        self.results = []
        with self.plain_operators():
            for name in gathers:
                StepRun(self, [], None).outputs(self.alone(name), {name: 0})
            for batch in batches:
                run = StepRun(self, [(*self._as_traced(batch), no_dropout())], None)
                for name in forwards:
                    run.run(self.alone(name), {name: 1})
                losses.append(run.losses[1])
                self.results += run.given()
        return losses

    def _check_draws(self) -> None:
        """On all ranks of a pipeline alike: a part knows the whole graph that it was cut from."""
        for part in self.parts.values():
            refuse_evaluation(part.strand.graph)

    def alone(self, name: str) -> Lowered:
        """The executable graph of a strand by itself, in the order in which it was traced."""
        if name not in self._alone:
            self._alone[name] = lower({name: self.parts[name]}, self.op_graphs[name].order)
        return self._alone[name]

    def _as_traced(self, batch: Batch) -> Batch:
        """The batch with the strides that were traced: a copy of what has others, nothing else."""
        wanted = self._strides
        return tuple(
            restrided(tensor, wanted[i]) if i in wanted else tensor
            for i, tensor in enumerate(batch)
        )

    @contextmanager
    def plain_operators(self) -> Iterator[None]:
        """Operators run as they stand in the graphs, which have autocast's conversions already."""
        with torch.no_grad(), torch.autocast(self._tangent.device.type, enabled=False):
            yield

    def constant(self, role: str, target: str) -> Any:
        """A parameter, buffer or gradient sum by name, or the tangent of the loss."""
        return self._tangent if role == "tangent" else self._constants[role, target]


def _readers(parts: Mapping[str, GraphPart]) -> dict[Binding, frozenset[str]]:
    """By value that is handed over: the strands of a micro-batch that read it. One that runs in
    the place of another at the end of a step counts as that one."""
    found: dict[Binding, set[str]] = {}
    for label, part in parts.items():
        for binding in part.inputs.values():
            if binding.role in HANDED:
                found.setdefault(binding, set()).add(_usual(label))
    return {binding: frozenset(labels) for binding, labels in found.items()}


def _usual(label: str) -> str:
    """The label of the strand that runs where it is not the end of a step."""
    found = strand(label)
    return replace(found, share=Share.WHOLE).label if found.share == Share.END else label


@lru_cache(maxsize=256)
def _done_by(label: str) -> frozenset[str]:
    """The readers that a strand is or makes needless: a backward runs whole or in halves."""
    found = strand(label)
    if found.direction == Direction.FORWARD:
        return frozenset({_usual(label)})
    whole, *halves = (replace(found, share=share).label for share in _BACKWARD_SHARES)
    is_half = found.share in (Share.INPUT, Share.WEIGHT)
    return frozenset({label, whole} if is_half else {_usual(label), *halves})


class StepRun:
    """The values that actions of one step hand to each other."""

    def __init__(
        self, executor: StepExecutor, batches: Sequence[Batch], recorder: Recorder | None
    ) -> None:
        self.executor = executor
        self.batches = batches
        self.recorder = recorder
        self.losses: dict[int, Tensor] = {}
        """By micro-batch, which counts from 1."""
        self._results: dict[int, list[Tensor]] = {}
        self.handed: dict[tuple[int, Binding], Any] = {}
        """What strands of a micro-batch hand to later ones."""
        self._left: dict[tuple[int, Binding], set[str]] = {}
        """Those that have still to read it."""

    def action(self, action: Action) -> None:
        """Run one action. Values leave the store with their last reader, so they die at their last
        use."""
        micro_batch = {slot.strand.label: slot.micro_batch for slot in action.slots}
        self.run(self.executor.lowered[action.phase], micro_batch)

    def run(self, lowered: Lowered, micro_batch: Mapping[str, int]) -> None:
        """Run a graph and keep what it hands over; `micro_batch` is that of each strand."""
        made = self.outputs(lowered, micro_batch)
        for (label, name), value in zip(lowered.outputs, made, strict=True):
            if name == LOSS:
                self.losses[micro_batch[label]] = value
            elif name.role == RESULT and self.executor.keeps_results:
                self._results.setdefault(micro_batch[label], []).append(value)
            elif name.role in HANDED:
                self.handed[micro_batch[label], name] = value

    def taken(self, micro_batch: int) -> tuple[Tensor, ...]:
        """The results of a micro-batch that just ran, which are not kept here any longer."""
        return tuple(self._results.pop(micro_batch))

    def given(self) -> list[tuple[Tensor, ...]]:
        """The results of all micro-batches that ran here, in order."""
        return [tuple(self._results[number]) for number in sorted(self._results)]

    def outputs(self, lowered: Lowered, micro_batch: Mapping[str, int]) -> Sequence[Any]:
        """What a graph returns; `micro_batch` is that of each strand."""
        inputs = [self.value(*each, micro_batch[each[0]]) for each in lowered.inputs]
        if self.recorder is None:
            return lowered.module(inputs)
        return self.recorder.run(lowered, inputs, micro_batch)

    def value(self, label: str, binding: Binding, micro_batch: int) -> Any:
        """What an input of a strand stands for on a micro-batch."""
        if binding.role == "batch":
            return self.batches[micro_batch - 1][int(binding.target)]
        if binding.role in HANDED:
            return self._take(label, binding, micro_batch)
        return self.executor.constant(binding.role, binding.target)

    def _take(self, label: str, binding: Binding, micro_batch: int) -> Any:
        """A value that was handed over; it leaves the store with the last that reads it, as
        schedules run gradients of weights when they like."""
        readers, key = self.executor.readers.get(binding, _NOBODY), (micro_batch, binding)
        if len(readers) > 1:
            left = self._left.setdefault(key, set(readers))
            left -= _done_by(label)
            if left:
                return self.handed[key]
            del self._left[key]
        return self.handed.pop(key)
