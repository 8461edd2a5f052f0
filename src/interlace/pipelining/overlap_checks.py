"""What PyTorch's pipeline runtime must be like to run traced stages inside, and what is refused."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS
from interlace.runtime.step_inputs import check_wrappers
from interlace.schedules.listed import ListedSchedule
from interlace.schedules.sends_receives import without_messages
from interlace.schedules.stage import StageSchedule
from interlace.schedules.torch_csv import from_csv

PASSES = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B")
"""Kinds of actions of PyTorch's runtime that run passes."""
_OF_SCHEDULE = (
    "register_custom_function", "pipeline_order_with_comms", "fwd_recv_ops", "bwd_recv_ops",
    "_step_microbatches", "_initialize_stages", "_check_inputs", "_internal_losses",
    "_maybe_compute_loss", "_comp_type_to_function_map", "_has_backward", "_loss_fn", "_stages",
    "_n_microbatches",
)  # fmt: skip
_OF_STAGE = (
    "submod", "stage_index", "num_stages", "dw_builder", "fwd_cache", "bwd_cache", "output_chunks",
    "args_recv_info", "grad_recv_info", "_stage_meta", "forward_one_chunk", "set_local_fwd_input",
    "set_local_bwd_input", "get_local_bwd_output",
)  # fmt: skip
"""What is read, called or set there beside public names; of torch 2.13 and 2.14."""


_REPLICAS = "leave it out, and average parameter.grad over replicas of the pipeline after the step"


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raise InputError for an axis over which `compile_step` would average or shard."""
    for number, name in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
        size = mesh.size(number) if mesh is not None else 1
        if name in (REPLICATE_AXIS, SHARD_AXIS) and size > 1:
            raise InputError(
                f"mesh has the axis {name} of {size} ranks, over which install_overlap exchanges "
                "nothing",
                hint=_REPLICAS,
            )


def check_schedule(schedule: Any) -> None:
    """Raise InputError unless this is a schedule on PyTorch's runtime, with a loss and stages that
    can be traced, as far as that is known before shapes are."""
    name = type(schedule).__name__
    _check_has(schedule, _OF_SCHEDULE, name)
    if schedule._loss_fn is None:
        raise InputError(
            f"{name} has no loss_fn, so it runs no backwards",
            hint="pass loss_fn to the schedule, or leave install_overlap out",
        )
    for kind in schedule._comp_type_to_function_map:
        if kind.name in PASSES:
            raise InputError(
                f"{name} has a custom function for {kind.name} already",
                hint="register one or the other; install_overlap takes all passes",
            )
    for stage in schedule._stages:
        _check_stage(stage)


def _check_stage(stage: Any) -> None:
    what = f"stage {getattr(stage, 'stage_index', '?')}"
    if not isinstance(stage, PipelineStage):
        raise InputError(
            f"{what} is a {type(stage).__name__}, not a PipelineStage",
            hint="build it by torch.distributed.pipelining.PipelineStage",
        )
    _check_has(stage, _OF_STAGE, "PipelineStage")
    if stage.dw_builder is not None:
        raise InputError(
            f"{what} has a dw_builder, which a traced backward does not call",
            hint="leave dw_builder out: gradients of weights are cut off in the graph",
        )
    try:
        check_wrappers(stage.submod)
    except InputError as error:
        raise InputError(f"{what}: {error.message}", hint=_REPLICAS) from error
    for name, tensor in (*stage.submod.named_parameters(), *stage.submod.named_buffers()):
        if isinstance(tensor, DTensor):
            raise InputError(
                f"{what}: {name!r} is a DTensor, which install_overlap cannot trace in a stage",
                hint="give the whole model to interlace.compile_step with a mesh axis pp, or "
                "write the collectives into the stage",
            )


def check_meta(stage: Any) -> None:
    """Raise InputError if activations or their gradients are DTensors, which is known when PyTorch
    has found their shapes."""
    meta = stage._stage_meta
    for kind in ("inputs", "outputs", "input_grads", "output_grads"):
        for number, each in enumerate(getattr(meta, kind) or ()):
            if hasattr(each, "placements"):
                raise InputError(
                    f"stage {stage.stage_index}: number {number} of its {kind} is a DTensor",
                    hint="hand plain tensors from stage to stage (to_local), or give the whole "
                    "model to interlace.compile_step",
                )


def _check_has(thing: Any, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise InputError(
            f"{what} of torch {torch.__version__} has no {', '.join(missing)}",
            hint="install_overlap takes a schedule on PyTorch's runtime, such as "
            "ScheduleDualPipeV or torch_schedule(...), of torch 2.13 or 2.14",
        )


def order_of(schedule: Any) -> StageSchedule:
    """The order that PyTorch runs, as a schedule of ours, which is proved when it is looked at.

    Raises InputError for one in which no rank runs two passes in one action."""
    lists = schedule.pipeline_order_with_comms
    rows = [",".join(map(str, lists[rank])) for rank in sorted(lists)]
    name = type(schedule).__name__
    found = without_messages(from_csv("\n".join(rows), name))
    if not any(len(action.slots) > 1 for own in found for action in own):
        raise InputError(
            f"{name} runs no two passes in one action (OVERLAP_F_B), so there is nothing to "
            "interleave",
            hint="take ScheduleDualPipeV, or torch_schedule(..., schedule='folded')",
        )
    listed = ListedSchedule(name, found)
    return TorchOrder(name, listed, ranks=len(rows), rank=int(schedule.rank))


class TorchOrder(StageSchedule):
    """A list whose steps always have all of its micro-batches."""

    def counts(self) -> tuple[int, ...]:
        """That number alone."""
        return (self.seen,)
