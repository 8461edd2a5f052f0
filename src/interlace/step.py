"""A step of training: graphs in a planned order, and where their gradients go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.decompose.listing import Listing
from interlace.errors import InputError
from interlace.graphs.dropout import seeds_for
from interlace.ir.actions import Action
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.ranks.agree import Content
from interlace.ranks.determinism import nondeterminism
from interlace.runtime.cuda_graph import CapturedSteps, GraphMemory, refuse_capture
from interlace.runtime.eager_check import StepComparison, compare_with_eager
from interlace.runtime.executor import Batch, StepExecutor
from interlace.runtime.pipeline_executor import PipelineExecutor
from interlace.runtime.pipeline_record import PipelineRecord
from interlace.runtime.recorder import Clock, Recorder, clock_for
from interlace.runtime.stage_link import StageLink
from interlace.runtime.traced_strands import Strands
from interlace.runtime.user_module import UserModule
from interlace.schedules.finder import Schedule
from interlace.text import milliseconds, percent


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What masks of dropout depend on, beside step and micro-batch."""

    seed: int = 0
    data_rank: int = 0
    """Numbers the ranks that see other data."""


NO_DRAWS = Draws()
"""For graphs without dropout."""


class StepTensors(Protocol):
    """Weights that a step reads and sums that it adds gradients to: of a user's module
    (`api`), or of the trainer's float32 weights (`train.weights`)."""

    @property
    def constants(self) -> Mapping[tuple[str, str], Tensor]:
        """What the graphs' inputs stand for, by (role, target)."""
        ...

    def flat(self, batches: Sequence[Any]) -> Sequence[Batch]:
        """The tensors of each of these micro-batches, as users give them."""
        ...

    def refresh(self, batches: Sequence[Batch]) -> bool:
        """Check these micro-batches. Whether `constants` holds other tensors than before."""
        ...

    def begin(self, batches: Sequence[Batch]) -> bool:
        """Get ready for these micro-batches, which are checked. Whether `constants` holds other
        tensors than it did at the step before."""
        ...

    def finish(self) -> None:
        """Hand the gradients over to the parameters."""
        ...

    def check_ranks(self) -> None:
        """Raise PeerError for weights or buffers that have come to differ. Collective."""
        ...


class Step:
    """What `compile_step` returns, and what `interlace train` runs."""

    plan: Plan
    """The order of operators, with the predicted times of each phase."""
    costs: CostTable | None
    """The measured times that the plan was made from; None if nothing was measured."""
    decomposed: Listing | None
    """Which collectives were cut into sends and which not, and why; None if none were to be.
    `print(step.decomposed.summary())`"""
    losses: list[Tensor]
    """Of the micro-batches of the last step."""
    evaluated: list[Tensor]
    """Losses of the micro-batches of the last evaluation."""
    number: int
    """Which step of training comes next, counted from 1; masks of dropout depend on it."""
    nondeterminism: tuple[str, ...]
    """Why the bits of a step may differ from run to run, and so between one strand and two; empty
    if nothing is known that makes them differ, as on the CPU."""

    def __init__(
        self,
        strands: Strands,
        plan: Plan,
        tensors: StepTensors,
        *,
        schedule: Schedule | None = None,
        draws: Draws = NO_DRAWS,
        costs: CostTable | None = None,
        link: StageLink | None = None,
        group: dist.ProcessGroup | None = None,
        captured_in: GraphMemory | None = None,
    ) -> None:
        """`schedule` is looked up by the plan's name if it is not given; `link` leads to the other
        ranks of a pipeline, and `group` has the ranks of the step, if they are not all. With
        `captured_in` steps are CUDA graphs, in that memory. Raises InputError for a plan that
        cannot run, and for a step that cannot be captured."""
        self.strands = strands
        self.plan = plan
        self.costs = costs
        self.decomposed = strands.listing
        self.losses = []
        self.evaluated = []
        self.number = 1
        self.draws = draws
        self.executor: StepExecutor = strands.executor(plan, tensors.constants, schedule, link)
        self.tensors = tensors
        self.link = link
        self._group = group
        self._recorded: Timeline | None = None
        self._device = next(iter(tensors.constants.values())).device
        self.nondeterminism = nondeterminism(self._device)
        self._captured: CapturedSteps | None = None
        if captured_in is not None:
            refuse_capture(strands.graphs, self._device, is_pipeline=link is not None)
            self._captured = CapturedSteps(self.executor, captured_in)

    def __repr__(self) -> str:
        """Its schedule, its graphs, what the plan expects of each phase, and what the last recorded
        step took and hid."""
        graphs = self.strands.op_graphs.values()
        lanes = sorted({op.lane for graph in graphs for op in graph.collectives})
        count = sum(len(graph.operators) for graph in graphs)
        sent = sum(len(graph.collectives) for graph in graphs)
        text = f"Step(schedule {self.plan.schedule}, {count} operators"
        text += f", {sent} collectives over {', '.join(lanes)}" if lanes else ", no collectives"
        return f"{text}, {self._planned()}{self._measured()})"

    def _planned(self) -> str:
        planned = {name: each for name, each in self.plan.phases.items() if each.predicted_ns}
        if not planned:
            return "in traced order"
        phases = ", ".join(
            f"{name} {milliseconds(each.predicted_ns)} ms with {milliseconds(each.exposed_ns)} "
            "exposed"
            for name, each in planned.items()
        )
        return f"planned by {self.plan.search}: {phases}"

    def _measured(self) -> str:
        if (last := self._recorded) is None:
            return ""
        hidden = f", {percent(last.hidden_fraction())} hidden" if last.communication_ns() else ""
        took, waits = milliseconds(last.length_ns), milliseconds(last.exposed_ns())
        return f"; recorded: {took} ms with {waits} exposed{hidden}"

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        """The mean loss of these micro-batches. The gradient (over an axis `dp_replicate` its
        mean) is added to `param.grad`, or put there if that is None.

        `param.grad` may be a buffer of this step: after `zero_grad()` the next step writes to
        the same memory, so clone what is needed longer.
        """
        return self._run(self.tensors.flat(micro_batches), None)

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """Their mean loss with the weights as they are now, on all ranks: forward only, nothing
        dropped, gradients left alone. Over data-parallel ranks it is that of each rank's own.
        Collective, as a step is."""
        batches = self.tensors.flat(micro_batches)
        with torch.enable_grad():  # a caller's no_grad() changes nothing about a forward
            replaced = self.tensors.refresh(batches)
        if replaced:
            self._rebind()
        self._look(batches)
        self.evaluated = self.executor.evaluate(batches)
        return torch.stack(self.evaluated).mean()

    @property
    def results(self) -> list[tuple[Tensor, ...]]:
        """What `loss_fn` gave beside the loss, for each micro-batch of the last step or
        evaluation, without gradients. In a pipeline the rank of the last chunk has them, and the
        others have an empty list."""
        return self.executor.results

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """What this rank runs in a step of so many micro-batches, action by action; `print` shows
        which forward and backward each of them puts together."""
        parts = self.strands.parts
        return self.executor.schedule.actions(micro_batches, parts, head=bool(self.plan.head))

    def check_ranks(self) -> None:
        """Raise PeerError, naming weight and ranks, if parameters or buffers have come to differ
        between ranks that must hold the same: plain ones over all ranks of the mesh (without one,
        of the default group) unless `per_rank` named them, DTensors as they are laid out.

        Done once by `compile_step`; do it before you save a checkpoint. Collective, as
        `compile_step` is; about 1 s per GB of replicated weights on a CPU core.
        """
        self.tensors.check_ranks()

    def record(self, micro_batches: Sequence[Any], label: str = "step") -> Timeline:
        """The same step, recorded operator by operator: what was hidden and what was exposed."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        recorder = Recorder(self.strands.op_graphs, self._clock.restarted())
        self._run(self.tensors.flat(micro_batches), recorder)
        self._recorded = recorder.timeline(label, rank)
        return self._recorded

    def compare(self, micro_batches: Sequence[Any], *, repeats: int = 3) -> StepComparison:
        """This step against plain autograd on the same module and micro-batches: losses, every
        gradient by name, and times of `repeats` steps of both in turn. `print(found.summary())`

        Parameters, gradients and buffers stay as they are. Collective, as a step is; call it under
        the contexts (autocast, `loss_parallel`) under which the step was compiled. Raises
        InputError for steps that draw random numbers, which are not PyTorch's, for stages of a
        pipeline, of which a rank has its own weights only, and for a run of `interlace train`."""
        tensors, handovers = self.tensors, self.strands.handovers
        if not isinstance(tensors, UserModule):
            raise InputError(
                "compare takes a step of compile_step",
                hint="interlace train compares with eager steps by compare.steps",
            )
        if handovers is not None and not handovers.is_alone:
            raise InputError(
                "a rank of a pipeline has the newest weights of its own stage only",
                hint="compile the same module without the axis pp, and compare that",
            )
        if self.strands.takes_seeds:
            raise InputError(
                "the step draws random numbers, as for dropout, and eager PyTorch draws others",
                hint="compile the module with dropout 0 and without noise, and compare that",
            )
        batches = tensors.flat(micro_batches)
        tensors.refresh(batches)
        number = self.number

        def losses() -> list[Tensor]:
            self._run(batches, None)
            return self.losses

        try:
            return compare_with_eager(
                tensors.chunk, losses, batches, data=self.strands.data, repeats=repeats
            )
        finally:
            self.number = number

    def share_sums(self, other: "Step") -> None:
        """Keep sums of gradients in the memory of another step of `compile_step` on the same
        module; the two run in turn. Under `fully_shard` each keeps its own."""
        if isinstance(self.tensors, UserModule) and isinstance(other.tensors, UserModule):
            self.tensors.share_sums(other.tensors)
            self._rebind()
            if self._captured is not None and other.captured_in is not None:
                self._captured.memory = other.captured_in

    def record_pipeline(self, micro_batches: Sequence[Any]) -> PipelineRecord:
        """The same step of a pipeline, with the times of the actions of all ranks, and the step
        that the simulator makes of them. Collective over the pipeline.

        Raises InputError for a step that is none of a pipeline."""
        executor = self.executor
        if not isinstance(executor, PipelineExecutor):
            raise InputError(
                "this step is none of a pipeline, and only one rank runs it",
                hint="record() gives the timeline of this rank",
            )
        given = self.tensors.flat(micro_batches)
        with executor.watched() as watch:
            self.losses = executor.step(self._begin(given))
            self.tensors.finish()
        return executor.record(watch, len(given))

    @property
    def digests(self) -> dict[str, str]:
        """What all ranks must have alike: the order of operators, and that of actions."""
        schedule, head = self.executor.schedule, bool(self.plan.head)
        return {
            "plan": self.plan.digest,
            "schedule": schedule.digest(self.strands.parts, head=head),
        }

    @property
    def contents(self) -> list[Content]:
        """The same for ranks of which some run other stages of a model."""
        handovers = self.strands.handovers
        stage = "" if handovers is None else f"stage {handovers.rank}"
        part = {"plan": stage, "schedule": ""}
        return [
            Content(
                name=repr(name), digest=text.encode(), shown=repr(text), layout=name,
                part=part[name],
            )
            for name, text in self.digests.items()
        ]  # fmt: skip

    def seeds(self, micro_batch: int) -> Tensor:
        """Seeds of the masks that a micro-batch of the next step gets, counted from 0."""
        draws = self.draws
        return seeds_for(
            draws.seed, step=self.number, micro_batch=micro_batch, data_rank=draws.data_rank
        )

    def _run(self, micro_batches: Sequence[Batch], recorder: Recorder | None) -> Tensor:
        batches = self._begin(micro_batches)
        if self._captured is None:
            self.losses = self.executor.step(batches, recorder)
        elif recorder is None:
            self.losses = self._captured.step(batches)
        else:
            self.losses = self._captured.record(batches, recorder)
        self.tensors.finish()
        return torch.stack(self.losses).mean()

    def _begin(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches with the seeds of their masks."""
        if self.tensors.begin(micro_batches):
            self._rebind()
        self._look(micro_batches)
        batches = micro_batches
        if self.strands.takes_seeds:
            batches = [(*batch, self.seeds(index)) for index, batch in enumerate(batches)]
        self.number += 1
        return batches

    def _look(self, batches: Sequence[Batch]) -> None:
        """Before the first step: whether stages were given the same samples, where that is to be
        checked."""
        if self.link is not None:
            self.link.first_look(batches)

    def _rebind(self) -> None:
        self.executor.rebind({**self.strands.buffers(), **self.tensors.constants})
        if self._captured is not None:
            self._captured.forget()

    @property
    def captured_in(self) -> GraphMemory | None:
        """The memory of its CUDA graphs; None if it runs operator by operator."""
        return None if self._captured is None else self._captured.memory

    @cached_property
    def _clock(self) -> Clock:
        """Keeps the streams on which it stamps collectives over all recorded steps."""
        return clock_for(self._device.type, self._group)
