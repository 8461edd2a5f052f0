"""A step of PyTorch's pipeline runtime whose passes are traced graphs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError
from interlace.graphs.dropout import seeds_for
from interlace.graphs.strides import restrided
from interlace.graphs.torch_private import fake_tensor_mode
from interlace.ir.actions import Action, Direction, Share, Slot, Strand
from interlace.ir.plan import Plan
from interlace.pipelining.overlap_checks import check_meta
from interlace.pipelining.overlap_costs import stage_costs
from interlace.pipelining.overlap_run import OverlapRun, StageExecutor
from interlace.pipelining.overlap_values import StageCall, gradients_of, inputs_of, values_of
from interlace.pipelining.stage_chain import check_output
from interlace.pipelining.traced_stage import (
    SeededStage,
    StageInputs,
    TracedStage,
    trace_stage,
)
from interlace.ranks.agree import Content, check_contents, refused_together
from interlace.runtime.mesh_axes import axis_of_group, data_rank_of
from interlace.runtime.recorder import Clock, Recorder
from interlace.schedules.finder import sequential
from interlace.schedules.stage import StageSchedule
from interlace.schedules.torch_csv import MEANING
from interlace.search.planner import make_plan


@dataclass(kw_only=True)
class Compiled:
    """The stages of this rank, traced and planned."""

    plan: Plan
    executor: StageExecutor
    inputs: dict[int, StageInputs]
    """By stage."""
    container: type | None
    """In what the last stage gives its tensors; None for a tensor alone, or another rank's."""
    device: torch.device
    seed: int
    data_ranks: dict[int, int]
    """By stage, a number that tells its masks of dropout from others'."""
    step: int = 0
    """Of how many steps there was one."""

    def recorder(self, clock: Clock) -> Recorder:
        """One for a step."""
        return Recorder(dict(self.executor.op_graphs), clock)


class CompiledStages:
    """Traces and plans the stages of this rank when a first step shows what they are given."""

    def __init__(
        self,
        schedule: Any,
        order: StageSchedule,
        mesh: DeviceMesh | None,
        *,
        interleave: bool,
        search: str,
        repeats: int,
    ) -> None:
        self.compiled: Compiled | None = None
        self._schedule, self._order, self._mesh = schedule, order, mesh
        self._interleave, self._search, self._repeats = interleave, search, repeats

    def compile(self, values: dict[str, Any]) -> None:
        """Once, from the first micro-batch of a step: `values` are what PyTorch's function that
        runs its micro-batches is given. Collective on the default group."""
        if self.compiled is not None:
            return
        schedule = self._schedule
        calls = _calls(schedule, values)
        target = None if values.get("target_mbs") is None else values["target_mbs"][0]
        first = calls[0]
        # PyTorch finds the shapes of what stages hand over in its first step, which this begins.
        schedule._initialize_stages(
            tuple(first.args), dict(first.kwargs), target, values.get("loss_kwargs")
        )
        with refused_together():
            found = self._traced(first)
            container = self._container(first)
        stages = [stage for stage, _ in found]
        device = torch.device(schedule._stages[0].device)
        plan = self._planned(stages, device)
        for stage in stages:
            stage.free_examples()
        ranks = {s.index: data_rank_of(self._mesh, s.strands) for s in stages}
        total = schedule._stages[0].num_stages
        self.compiled = Compiled(
            plan=plan,
            executor=StageExecutor(stages, plan, self._order),
            inputs={stage.index: inputs for stage, inputs in found},
            container=container,
            device=device,
            seed=torch.initial_seed(),
            data_ranks={index: total * rank + index for index, rank in ranks.items()},
        )
        own = sorted(stage.index for stage in stages)
        content = Content(
            name="'plan'", digest=plan.digest.encode(), shown=repr(plan.digest), layout="plan",
            part=f"stages {own}",
        )  # fmt: skip
        check_contents([content])

    def _traced(self, first: StageCall) -> list[tuple[TracedStage, StageInputs]]:
        axes, halves = axis_of_group(self._mesh), self._order.cuts_backwards
        found = []
        for stage in self._schedule._stages:
            check_meta(stage)
            inputs = inputs_of(stage, _for_stage(stage, first))
            loss_fn = self._schedule._loss_fn if stage.is_last else None
            try:
                traced = trace_stage(
                    stage.submod, stage.stage_index, inputs, loss_fn, axes, halves=halves
                )
            except InputError as error:
                raise _of_stage(stage, error) from error
            found.append((traced, inputs))
        return found

    def _planned(self, stages: Sequence[TracedStage], device: torch.device) -> Plan:
        graphs = {label: graph for stage in stages for label, graph in stage.op_graphs.items()}
        if not self._interleave:
            return sequential(graphs, self._order)
        costs = stage_costs(stages, device.type, self._repeats)
        with refused_together():
            return make_plan(graphs, costs, self._search, schedule=self._order)

    def _container(self, first: StageCall) -> type | None:
        """By a forward of the last stage without numbers, if that is here."""
        for stage in self._schedule._stages:
            if stage.is_last:
                with fake_tensor_mode(holds_real=True), torch.no_grad():
                    meta = () if stage.is_first else stage._stage_meta.inputs
                    made = [torch.empty(m.shape, dtype=m.dtype, device=stage.device) for m in meta]
                    args = first.args if stage.is_first else made
                    return check_output(stage.submod(*args, **first.kwargs))
        return None


class OverlapStep:
    """The passes of one step, as PyTorch's runtime asks for them."""

    def __init__(
        self,
        schedule: Any,
        compiled: Compiled | None,
        values: dict[str, Any],
        recorder: Recorder | None = None,
    ) -> None:
        """Without `compiled` it is an evaluation, whose forwards are PyTorch's own."""
        self.counts: Counter[str] = Counter()
        self.recorder = recorder
        self._schedule = schedule
        self._compiled = compiled
        self._stages = {stage.stage_index: stage for stage in schedule._stages}
        self._calls = _calls(schedule, values)
        self._keeps = bool(values.get("return_outputs", True))
        self._loss_kwargs = values.get("loss_kwargs")
        if compiled is not None:
            compiled.step += 1
            compiled.executor.begin()
            self._pass = OverlapRun(compiled.executor, recorder)

    def run(self, action: Any, context: Any) -> None:
        """An action of PyTorch's with one pass or two; `context` is what it gives with it."""
        passes = action.sub_actions or (action,)
        if self._compiled is None:
            for each in passes:
                self._evaluate(each, context)
            return
        slots = tuple(_slot(each) for each in passes)
        for slot in slots:
            self._take_in(slot)
        found = Action(slots)
        self._pass.action(found)
        self.counts[found.phase] += 1
        for slot in slots:
            self._hand_on(slot)

    def _take_in(self, slot: Slot) -> None:
        """Wait for what a pass was sent, and give it to its graph."""
        index, number = _place(slot)
        stage, compiled = self._stages[index], self._compiled
        assert compiled is not None
        inputs = compiled.inputs[index]
        key = index, number - 1
        if slot.strand.direction == Direction.FORWARD:
            _wait(self._schedule.fwd_recv_ops.pop(key, ()))
            call = _for_stage(stage, self._calls[number - 1])
            if not stage.is_first:
                received = [each.buffer for each in stage.args_recv_info[number - 1]]
                call = StageCall(received, call.kwargs, call.target, call.loss_kwargs)
            given = values_of(index, inputs, call)
            if compiled.executor.stages[index].strands.takes_seeds:
                seeds = seeds_for(
                    compiled.seed, step=compiled.step, micro_batch=number,
                    data_rank=compiled.data_ranks[index],
                )  # fmt: skip
                given.batch = (*given.batch, seeds)
            self._pass.given[index, number] = given
        elif slot.strand.share != Share.WEIGHT:
            _wait(self._schedule.bwd_recv_ops.pop(key, ()))
            if not stage.is_last:
                received = [each.buffer for each in stage.grad_recv_info[number - 1]]
                self._pass.given[index, number].named |= gradients_of(inputs, received)

    def _hand_on(self, slot: Slot) -> None:
        """Leave in the stage what PyTorch sends on."""
        index, number = _place(slot)
        stage = self._stages[index]
        if slot.strand.direction == Direction.FORWARD:
            self._hand_forward(stage, number)
            return
        if slot.strand.share != Share.WEIGHT:
            stage.fwd_cache.pop(number - 1, None)
            self._hand_back(stage, number)
        if slot.strand.share != Share.INPUT:
            del self._pass.given[index, number]

    def _hand_forward(self, stage: Any, number: int) -> None:
        made = self._pass.taken(number)
        loss = self._pass.losses.pop(number)
        if stage.is_last:
            self._schedule._internal_losses.append(loss)
            if self._keeps:
                assert self._compiled is not None
                container = self._compiled.container
                stage.output_chunks.append(made[0] if container is None else container(made))
            return
        metas = stage._stage_meta.outputs
        output = tuple(restrided(t, meta.stride) for t, meta in zip(made, metas, strict=True))
        following = self._stages.get(stage.stage_index + 1)
        if following is None:
            stage.fwd_cache[number - 1] = output, []
        else:
            following.set_local_fwd_input(output, number - 1)

    def _hand_back(self, stage: Any, number: int) -> None:
        if stage.is_first:
            return
        assert self._compiled is not None
        found = self._pass.gradients(stage.stage_index, number)
        sources = self._compiled.inputs[stage.stage_index].args
        metas = stage._stage_meta.input_grads
        gradients = tuple(
            None if what not in found or meta is None else _like(found[what], meta)
            for (_, what), meta in zip(sources, metas, strict=True)
        )
        stage.bwd_cache[number - 1] = gradients
        before = self._stages.get(stage.stage_index - 1)
        if before is not None:
            before.set_local_bwd_input(stage.get_local_bwd_output(number - 1), number - 1)

    def _evaluate(self, action: Any, context: Any) -> None:
        """PyTorch's own forward; backwards have nothing to do."""
        stage, number = self._stages[action.stage_index], action.microbatch_index
        key = action.stage_index, number
        if MEANING[action.computation_type.value][0] == Direction.BACKWARD:
            _wait(self._schedule.bwd_recv_ops.pop(key, ()))
            return
        _wait(self._schedule.fwd_recv_ops.pop(key, ()))
        call = self._calls[number]
        output = stage.forward_one_chunk(
            number, call.args, dict(call.kwargs), save_forward_output=self._keeps
        )
        self._schedule._maybe_compute_loss(
            stage, output, context.target_mbs, number, self._loss_kwargs
        )
        following = self._stages.get(action.stage_index + 1)
        if following is not None:
            following.set_local_fwd_input(output, number)


def _of_stage(stage: Any, error: InputError) -> InputError:
    """The error in terms of the user's stage."""
    what = f"stage {stage.stage_index} ({type(stage.submod).__name__})"
    own = f"{SeededStage.__name__} "
    text = error.message
    message = f"{what} {text.removeprefix(own)}" if text.startswith(own) else f"{what}: {text}"
    return InputError(message, hint=error.hint)


def _calls(schedule: Any, values: dict[str, Any]) -> list[StageCall]:
    """What this rank passes for each micro-batch."""
    targets, losses = values.get("target_mbs"), values.get("losses")
    args, kwargs = schedule._check_inputs(
        values.get("arg_mbs"), values.get("kwarg_mbs"), targets, losses
    )
    named = values.get("loss_kwargs") or {}
    return [
        StageCall(args[k], kwargs[k], () if targets is None else (targets[k],), named)
        for k in range(len(args))
    ]


def _for_stage(stage: Any, call: StageCall) -> StageCall:
    """Arguments go to the first stage, targets to the last."""
    return StageCall(
        call.args if stage.is_first else (),
        call.kwargs,
        call.target if stage.is_last else (),
        call.loss_kwargs if stage.is_last else {},
    )


def _slot(action: Any) -> Slot:
    direction, share = MEANING[action.computation_type.value]
    strand = Strand(direction, action.stage_index, share)
    return Slot(strand, action.microbatch_index + 1)


def _place(slot: Slot) -> tuple[int, int]:
    """The stage of a slot, and its micro-batch."""
    return slot.strand.chunk or 0, slot.micro_batch


def _like(gradient: Tensor, meta: Any) -> Tensor:
    return restrided(gradient.to(meta.dtype), meta.stride)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
