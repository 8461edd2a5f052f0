"""PipelineSchedule: stages of torch.distributed.pipelining on Interlace's runtime."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

from interlace.config import OverlapConfig, PlanConfig
from interlace.errors import InputError, RunError
from interlace.pipelining.chain_step import Call, ChainStep
from interlace.pipelining.chunk_numbers import found_for, refuse_other_stages
from interlace.pipelining.stage_exchange import Described, RankSide, packed
from interlace.ranks.agree import refused_together
from interlace.schedules.finder import ScheduleFunction
from interlace.step import Step

_ALONG_ROWS = (TensorChunkSpec(0),)
"""How targets are split."""


class PipelineSchedule:
    """Runs the stages of this rank by one of Interlace's schedules, behind the calls of PyTorch's.

    It takes the place of `ScheduleDualPipeV(stages, n_microbatches, loss_fn)`: `step` puts the
    gradients into `parameter.grad` of the stages' modules, and optimizers, checkpoints and the loop
    stay. Nothing runs through autograd: the first call traces all stages as one model and cuts its
    graph between them.
    """

    def __init__(
        self,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        schedule: str | ScheduleFunction,
        mesh: DeviceMesh | None = None,
        config: PlanConfig | None = None,
        overlap: OverlapConfig | None = None,
    ) -> None:
        """`stages` is the `PipelineStage` of this rank or a list of them, with the numbers that
        `schedule` puts here. Parameters up to `scale_grads` are PyTorch's: with it the gradients
        are those of the mean of the micro-batches' losses, else of their sum. Without `loss_fn`
        there are forwards only. `mesh` has an axis `pp`, the group of the stages (default: that
        alone), and may have `dp_replicate`; `config` and `overlap` are those of `compile_step`.

        Collective over the stages' group. Raises InputError for other stages than those of the
        schedule and for numbers of micro-batches that it cannot run."""
        self._stages: list[Any] = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        if not self._stages:
            raise InputError("there is no stage", hint="give the PipelineStage of this rank")
        self._group: Any = self._stages[0].group or dist.group.WORLD
        with refused_together(self._group):
            self._place(schedule, n_microbatches)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._has_backward = loss_fn is not None
        self._specs = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self._mesh = mesh
        self._settings = config, overlap
        self._chain: ChainStep | None = None

    def _place(self, schedule: str | ScheduleFunction, micro_batches: int) -> None:
        self.pp_group_size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)
        self._num_stages = int(self._stages[0].num_stages)
        found = found_for(schedule, self.pp_group_size, self._num_stages)
        own = [stage.stage_index for stage in self._stages]
        refuse_other_stages(found, own, self.pp_group_size, self.rank)
        found.of_ranks(self.pp_group_size, micro_batches)
        self._schedule = found

    @property
    def compiled(self) -> Step:
        """The step of `compile_step` behind this, after the first call: its actions, its plan, and
        `record_pipeline`. Raises RunError before."""
        if self._chain is None:
            raise RunError("nothing has been traced", hint="call step or eval once")
        return self._chain.step

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> None:
        """Refused with an InputError: a function would run in place of a planned graph."""
        raise InputError(
            f"a custom function for {getattr(computation_type, 'name', computation_type)} cannot "
            "run here: actions are graphs in a planned order, and no Python runs inside",
            hint="interlace.pipelining.torch_schedule gives PyTorch's runtime, which has custom "
            "functions, in the same order; install_overlap interleaves passes there",
        )

    def step(
        self,
        *args: Any,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forwards and backwards of a whole batch, which is cut into micro-batches along its rows.

        The rank of the first stage passes `args`, that of the last one `target` and, to get them,
        a list `losses`; `kwargs` go to all stages of a rank. Micro-batches that are cut already are
        passed as `arg_mbs`, `kwarg_mbs` and `target_mbs`. Returns the output of the last stage, on
        its rank, without gradients; elsewhere, or without `return_outputs`, None. Gradients are
        added to `parameter.grad`. All calls have the shapes and plain values of the first one.

        Collective over the pipeline; the first call, which traces, over the default group."""
        if self._has_backward and not torch.is_grad_enabled():
            raise RunError("step was called under torch.no_grad()", hint="call eval there")
        calls = self._calls(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        way = _Way(self._has_backward, return_outputs, losses, loss_kwargs or {})
        return self._run(calls, way)

    def eval(
        self,
        *args: Any,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forwards only, with nothing dropped, as `step` otherwise; gradients are left alone. It
        may be called under `no_grad` or `inference_mode`."""
        calls = self._calls(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(calls, _Way(False, return_outputs, losses, loss_kwargs or {}))

    def _calls(self, *given: Any) -> list[Call]:
        """What this rank passes for each micro-batch. In the first call ranks refuse together."""
        with refused_together(self._group) if self._chain is None else nullcontext():
            return self._split(*given)

    def _split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Tensor | None,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[dict[str, Any]] | None,
        target_mbs: Sequence[Tensor] | None,
    ) -> list[Call]:
        """(args, kwargs, target) of each micro-batch."""
        count = self._n_microbatches
        parts: list[Any] = [[()] * count, [{}] * count]
        if args or kwargs:
            parts = list(split_args_kwargs_into_chunks(args, kwargs, count, *self._specs))
        targets: Sequence[tuple[Tensor, ...]] = [()] * count
        if target is not None:
            targets, _ = split_args_kwargs_into_chunks((target,), {}, count, _ALONG_ROWS)
        given = [arg_mbs or parts[0], kwarg_mbs or parts[1], targets]
        if target_mbs is not None:
            given[2] = [(each,) for each in target_mbs]
        for part, name in zip(given, ("args", "kwargs", "target"), strict=True):
            if len(part) != count:
                raise InputError(
                    f"{name} give {len(part)} micro-batches, and the schedule has {count}",
                    hint="pass a batch of as many rows, or more",
                )
        return list(zip(*given, strict=True))

    def _run(self, calls: list[Call], way: "_Way") -> Any:
        """The merged output, on the rank of the last stage."""
        for stage in self._stages:
            stage.has_backward = way.backward
        if self._chain is None:
            self._chain = self._compiled(calls, way.loss_kwargs)
        losses, outputs = self._chain.run(
            calls, way.loss_kwargs, backward=way.backward, keep_outputs=way.keep_outputs
        )
        if not self._chain.is_last:
            return None
        if way.losses is not None and self._loss_fn is not None:
            way.losses[:] = losses
        return merge_chunks(outputs, self._output_merge_spec) if way.keep_outputs else None

    def _compiled(self, calls: list[Call], loss_kwargs: dict[str, Any]) -> ChainStep:
        """Of the first call."""
        args, kwargs, target = calls[0]
        stages = sorted(self._stages, key=lambda stage: int(stage.stage_index))
        with refused_together(self._group):
            _refuse_unequal(calls)
            is_first, is_last = stages[0].is_first, stages[-1].is_last
            if is_last and self._loss_fn is not None and not target:
                raise InputError(
                    "the rank of the last stage passed no target, and there is a loss_fn",
                    hint="pass target=, to eval as well",
                )
            side = RankSide(
                stages=tuple(stage.stage_index for stage in stages),
                modules=packed([stage.submod for stage in stages]),
                args=tuple(map(Described.of, args)) if is_first else (),
                kwargs={name: Described.of(each) for name, each in kwargs.items()},
                target=tuple(map(Described.of, target)) if is_last and self._loss_fn else (),
                loss_kwargs={n: Described.of(each) for n, each in loss_kwargs.items()},
            )
        device = torch.device(stages[0].device)
        mesh = self._mesh or DeviceMesh.from_group(
            self._group, device.type, mesh_dim_names=("pp",)
        )  # fmt: skip
        config, overlap = self._settings
        modules = {stage.stage_index: stage.submod for stage in stages}
        with torch.inference_mode(mode=False), torch.enable_grad():
            found = ChainStep(
                side, modules, self._loss_fn, device, mesh, schedule=self._schedule, config=config,
                overlap=overlap,
            )  # fmt: skip
        found.step.executor.adds_up = not self.scale_grads
        return found


@dataclass(frozen=True)
class _Way:
    """How a call is to be run, and what of it is wanted."""

    backward: bool
    keep_outputs: bool
    losses: list[Tensor] | None
    loss_kwargs: dict[str, Any]


def _refuse_unequal(calls: list[Call]) -> None:
    """Raise InputError unless all micro-batches have one shape."""
    shapes = [
        [tuple(each.shape) for each in (*args, *kwargs.values(), *target)
         if isinstance(each, Tensor)]
        for args, kwargs, target in calls
    ]  # fmt: skip
    for number, found in enumerate(shapes):
        if found != shapes[0]:
            raise InputError(
                f"micro-batch {number} has tensors of shapes {found}, and micro-batch 0 of "
                f"{shapes[0]}",
                hint="make the rows of a batch divisible by n_microbatches",
            )
