"""Interlaced training steps for your own module, in your own loop.

step = interlace.compile_step(module, loss_fn, example_inputs, mesh=mesh)
loss = step(micro_batches)          # gradients are in param.grad
optimizer.step()
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from interlace.config import OverlapConfig, ParallelConfig, PlanConfig, RunConfig
from interlace.cost.profile import cached, machine_id
from interlace.decompose.listing import Listing
from interlace.errors import InputError
from interlace.graphs.dropout import seeds_for, takes_seeds
from interlace.ir.costs import CostTable
from interlace.ir.phases import FORWARD
from interlace.ir.plan import Plan, read
from interlace.ir.timeline import Timeline
from interlace.parallel.data import Axis, DataLayout, replicated_layout
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS
from interlace.runtime.agreement import check_agreement, environment_fields
from interlace.runtime.gradients import ParameterGradients
from interlace.runtime.passes import choose_passes, trace_candidates
from interlace.runtime.profile import profile_strands
from interlace.runtime.recorder import Recorder, clock_for
from interlace.runtime.strands import Strands, build_strands
from interlace.search.planner import make_plan
from interlace.train.memory import memory_limits
from interlace.train.session import cache_directory, decompose_of, link_label

Batch = tuple[Tensor, ...]
LossFunction = Callable[..., Tensor]


def compile_step(
    module: nn.Module,
    loss_fn: LossFunction,
    example_inputs: Batch,
    *,
    mesh: DeviceMesh | None = None,
    strands: int = 2,
    config: PlanConfig | None = None,
    overlap: OverlapConfig | None = None,
) -> "Step":
    """A step of `module` whose micro-batches are interleaved in a planned order.

    `loss_fn(module, *batch)` calls the module and returns a scalar; `example_inputs` is one batch,
    and all later ones have its shapes, dtypes and device. The module is on its device and laid out
    over ranks; `mesh` names the axes of its collectives. Gradients are averaged over an axis
    `dp_replicate`, whose ranks hold equal weights and see different data. `strands=1` runs the
    same graphs one micro-batch after the other. `config` says how the order is found, `overlap`
    whether collectives are cut into sends under partial matmuls (default: they are left whole).
    Masks of dropout follow from torch's seed at this call, and the step and micro-batch.

    Collective on the default process group, whose ranks must all run the same program; one process
    needs none. Hold `loss_parallel()` around the call if the loss needs it. Raises InputError for
    what cannot be traced, with the sub-module and the line, and for a mesh axis `dp_shard`.
    """
    config = config or PlanConfig()
    if strands not in (1, 2):
        raise InputError(f"strands = {strands!r} is neither 1 nor 2", hint="2 interleaves")
    _check_example(example_inputs)
    chunk = ModuleWithLoss(module, loss_fn)
    dtype = torch.float32
    if any(p.dtype == torch.float64 for p in module.parameters()):
        dtype = torch.float64
    _check_wrappers(module)
    data = _replicas(chunk, mesh, dtype)
    overlap = overlap or OverlapConfig()
    trace = partial(
        build_strands, chunk, example_inputs, axis_of_group(mesh), data=data, buffer_dtype=dtype
    )
    candidates = trace_candidates(
        lambda decompose: trace(decompose=decompose),
        decompose_of(overlap, example_inputs[0].device),
        overlap.passes,
        strands=strands,
    )
    whole = candidates.whole
    _check_loss(whole)
    check_agreement({**environment_fields(), "graph": whole.digest})
    gradients = ParameterGradients(
        chunk, whole.parameters, whole.placements, dtype, replicas=data is not None
    )
    traced, costs = whole, None
    plan = whole.sequential
    if strands == 2 and config.file:
        plan = read(Path(config.file))
        traced = candidates.made_for(plan)
    elif strands == 2:
        costs = _measured_costs(whole, example_inputs, gradients, config)
        limits = memory_limits(RunConfig(plan=config), chunk, data)
        if overlap.passes != "ends":
            traced = choose_passes(candidates, costs, limits)
        plan = make_plan(traced.op_graphs, costs, config.search, limits=limits)
    step = Step(traced, plan, costs, gradients, example_inputs, _replica(mesh))
    check_agreement({"plan": plan.digest})
    return step


class Step:
    """What `compile_step` returns."""

    plan: Plan
    """The order of operators, with the predicted times of each phase."""
    costs: CostTable | None
    """The measured times that the plan was made from; None if nothing was measured."""
    decomposed: Listing | None
    """Which collectives were cut into sends and which not, and why; None if none were to be.
    `print(step.decomposed.summary())`"""
    losses: list[Tensor]
    """Of the micro-batches of the last step."""

    def __init__(
        self,
        strands: Strands,
        plan: Plan,
        costs: CostTable | None,
        gradients: ParameterGradients,
        example: Batch,
        replica: int = 0,
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.decomposed = strands.listing
        self.losses = []
        self._strands = strands
        self._gradients = gradients
        self._example = example
        self._executor = strands.executor(plan, gradients.constants)
        self._number = 0
        self._replica = replica
        self._seed = torch.initial_seed()

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor:
        """The mean loss of these micro-batches. The gradient (over an axis `dp_replicate` its
        mean) is added to `param.grad`, or put there if that is None.

        `param.grad` may be a buffer of this step: after `zero_grad()` the next step writes to
        the same memory, so clone what is needed longer.
        """
        return self._run(micro_batches, None)

    def record(self, micro_batches: Sequence[Batch], label: str = "step") -> Timeline:
        """The same step, recorded operator by operator: what was hidden and what was exposed."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        recorder = Recorder(self._strands.op_graphs, clock_for(self._example[0].device.type))
        self._run(micro_batches, recorder)
        return recorder.timeline(label, rank)

    def _run(self, micro_batches: Sequence[Batch], recorder: Recorder | None) -> Tensor:
        _check_batches(micro_batches, self._example)
        self._gradients.begin()
        self._number += 1
        if takes_seeds(self._strands.graphs[FORWARD]):
            micro_batches = [
                (*batch, self._seeds(index)) for index, batch in enumerate(micro_batches)
            ]
        self.losses = self._executor.step(micro_batches, recorder)
        self._gradients.finish()
        return torch.stack(self.losses).mean()

    def _seeds(self, micro_batch: int) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return seeds_for(
            self._seed, step=self._number, micro_batch=micro_batch,
            data_rank=self._replica, tensor_rank=rank,
        )  # fmt: skip


class ModuleWithLoss(nn.Module):
    """The module with its loss, which is traced as one."""

    def __init__(self, module: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        """A scalar, equal on all ranks of the mesh that share it."""
        loss = self.loss_fn(self.module, *batch)
        if isinstance(loss, DTensor):
            whole = [Replicate()] * loss.device_mesh.ndim
            return loss.redistribute(placements=whole).to_local()
        return loss


def axis_of_group(mesh: DeviceMesh | None) -> dict[str, str]:
    """Axis name by process-group name; axes without names are `axis0`, `axis1`, ..."""
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    return {mesh.get_group(index).group_name: name for index, name in enumerate(names)}


def _replicas(module: nn.Module, mesh: DeviceMesh | None, dtype: torch.dtype) -> DataLayout | None:
    """How gradients are summed over ranks that hold the same weights; None if there are none, or
    if parameters lie on that axis themselves and so say how their gradients add up."""
    names = (mesh.mesh_dim_names if mesh is not None else None) or ()
    on_axis = {
        name
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
        for name in parameter.device_mesh.mesh_dim_names or ()
    }
    sizes = {
        name: mesh.size(index)
        for index, name in enumerate(names)
        if mesh is not None and name not in on_axis
    }
    if sizes.get(SHARD_AXIS, 1) > 1:
        raise InputError(
            f"mesh has the axis {SHARD_AXIS} of {sizes[SHARD_AXIS]} ranks, and compile_step shards "
            "no weights",
            hint=f"name the axis {REPLICATE_AXIS} to average gradients over it; interlace train "
            "shards weights (parallel.data_shard)",
        )
    if mesh is None or sizes.get(REPLICATE_AXIS, 1) == 1:
        return None
    axis = Axis(str(mesh.get_group(REPLICATE_AXIS).group_name), sizes[REPLICATE_AXIS])
    return replicated_layout(module, axis, dtype, bucket_mib=ParallelConfig().bucket_mib)


def _replica(mesh: DeviceMesh | None) -> int:
    """Which of the ranks that see other data this one is."""
    if mesh is None or REPLICATE_AXIS not in (mesh.mesh_dim_names or ()):
        return 0
    return mesh.get_local_rank(REPLICATE_AXIS)


def _measured_costs(
    strands: Strands, example: Batch, gradients: ParameterGradients, config: PlanConfig
) -> CostTable:
    device = example[0].device.type
    machine = machine_id(device, link_label(RunConfig()))

    def measure() -> CostTable:
        batch: Any = example
        return profile_strands(
            strands, batch, device, gradients.constants,
            repeats=config.profile_repeats, machine=machine,
        )  # fmt: skip

    directory = cache_directory("costs") if config.cache else None
    return cached(directory, machine, strands.digest, measure)


def _check_wrappers(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if isinstance(each, (FSDPModule, DistributedDataParallel)):
            by = "fully_shard" if isinstance(each, FSDPModule) else "DistributedDataParallel"
            raise InputError(
                f"{name or 'the module'} is under {by}, which exchanges gradients by hooks of "
                "autograd, and a traced step has no autograd",
                hint=f"leave {by} out: a mesh axis {REPLICATE_AXIS} averages gradients, and "
                "interlace train shards weights (parallel.data_shard)",
            )


def _check_loss(strands: Strands) -> None:
    loss = strands.graphs[FORWARD].outputs[0].meta["val"]
    if loss.shape or not loss.is_floating_point():
        raise InputError(
            f"loss_fn gives {_described(loss)}, not one number",
            hint="return the mean of the losses",
        )
    if not strands.parameters:
        raise InputError(
            "the loss depends on no parameter that requires a gradient",
            hint="check loss_fn, requires_grad and torch.no_grad",
        )


def _check_example(example: Batch) -> None:
    if not isinstance(example, tuple) or not example:
        raise InputError(
            f"example_inputs is a {type(example).__name__}, not a tuple of tensors",
            hint="give one batch, as in (images, labels)",
        )
    for index, value in enumerate(example):
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.requires_grad:
            what = "a tensor that requires a gradient" if isinstance(value, Tensor) else ""
            raise InputError(
                f"example_inputs[{index}] is {what or type(value).__name__}, not a plain tensor",
                hint="pass tensors that need no gradient; other values belong into loss_fn or "
                "the module",
            )


def _check_batches(micro_batches: Sequence[Batch], example: Batch) -> None:
    if not micro_batches:
        raise InputError("there is no micro-batch", hint="pass a list of at least two")
    wanted = [_described(tensor) for tensor in example]
    for index, batch in enumerate(micro_batches):
        if not isinstance(batch, (tuple, list)):
            raise InputError(
                f"micro-batch {index} is a {type(batch).__name__}, not a tuple of tensors",
                hint="pass a list of batches, each as example_inputs was",
            )
        found = [_described(tensor) for tensor in batch]
        if found != wanted:
            raise InputError(
                f"micro-batch {index} is ({', '.join(found)}), and the step was compiled for "
                f"({', '.join(wanted)})",
                hint="make all micro-batches alike (drop_last=True), or compile another step",
            )


def _described(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"
