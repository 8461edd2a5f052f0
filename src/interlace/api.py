"""Interlaced training steps for your own module, in your own loop.

step = interlace.compile_step(module, loss_fn, example_inputs, mesh=mesh)
loss = step(micro_batches)          # gradients are in param.grad
optimizer.step()
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from interlace.config import OverlapConfig, PlanConfig, RunConfig
from interlace.decompose.listing import Listing
from interlace.errors import InputError
from interlace.graphs.dropout import seeds_for
from interlace.graphs.wide_sums import wide_sums
from interlace.ir.actions import Action
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan, read
from interlace.ir.timeline import Timeline
from interlace.measure.cache import cached
from interlace.measure.machine import machine_id
from interlace.measure.start_up import profile_strands
from interlace.parallel.data import DataLayout
from interlace.ranks.agree import check_agreement, refused_together
from interlace.ranks.determinism import check_current, nondeterminism, warn_of_other_bits
from interlace.runtime.binding import Binding
from interlace.runtime.gradients import ParameterGradients
from interlace.runtime.mesh_axes import axis_of_group, data_rank_of, replicas_of
from interlace.runtime.module_tree import refuse_gradient_hooks
from interlace.runtime.passes import Candidates, choose_passes, trace_candidates
from interlace.runtime.recorder import Recorder, clock_for
from interlace.runtime.same_module import ModuleAgreement
from interlace.runtime.step_inputs import check_batches, check_example, check_loss, check_wrappers
from interlace.runtime.strands import Strands, build_strands
from interlace.schedules.finder import Schedule, ScheduleFunction, find
from interlace.search.limits import MemoryLimits
from interlace.search.planner import make_plan
from interlace.train.memory_limit import memory_limits
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
    schedule: str | ScheduleFunction = "",
    config: PlanConfig | None = None,
    overlap: OverlapConfig | None = None,
    per_rank: Collection[str] = (),
) -> "Step":
    """A step of `module` whose micro-batches are interleaved in a planned order.

    `loss_fn(module, *batch)` calls the module and returns a scalar; `example_inputs` is one batch,
    and all later ones have its shapes, dtypes and device. The module is on its device and laid out
    over ranks; `mesh` names the axes of its collectives. Gradients are averaged over an axis
    `dp_replicate`, whose ranks hold equal weights and see different data. `strands=1` runs the
    same graphs one micro-batch after the other. `schedule` takes the place of `strands`:
    `one_strand`, `two_strand`, `folded`, or a function of your own (docs/concepts/schedules.md),
    itself or as `"module:function"`. `config` says how the order is found, `overlap` whether
    collectives are cut into sends under partial matmuls (default: they are left whole).
    Masks of dropout follow from torch's seed at this call, and the step and micro-batch.
    `per_rank` names plain parameters and buffers (patterns, as `"experts.*"`) of which each rank
    holds its own; all others must be equal on all ranks of `mesh`, as `Step.check_ranks` says.

    One strand and two give the same bits; on CUDA only with deterministic kernels: set
    CUBLAS_WORKSPACE_CONFIG to `:4096:8` and call `torch.use_deterministic_algorithms(True)` before
    `init_process_group`. Else this call warns, and `step.nondeterminism` has the reasons.

    Collective on the default process group, whose ranks must all run the same program; one process
    needs none. Hold `loss_parallel()` around the call if the loss needs it. Raises InputError for
    what cannot be traced, with the sub-module and the line, for a mesh axis `dp_shard`, and for
    inputs on a GPU that is not the current one.
    """
    config, overlap = config or PlanConfig(), overlap or OverlapConfig()
    chunk = ModuleWithLoss(module, loss_fn)
    with refused_together():
        if strands not in (1, 2):
            raise InputError(f"strands = {strands!r} is neither 1 nor 2", hint="2 interleaves")
        found = find(schedule or ("one_strand", "two_strand")[strands - 1])
        check_example(example_inputs)
        check_current(example_inputs[0].device)
        check_wrappers(module)
        refuse_gradient_hooks(chunk)
        alike = ModuleAgreement(module, mesh, per_rank)
    alike.check_software(loss_fn)
    has_double = any(p.dtype == torch.float64 for p in module.parameters())
    dtype = torch.float64 if has_double else torch.float32
    # Where times decide what is decomposed, ranks exchange them while they trace.
    with nullcontext() if overlap.decompose == "auto" else refused_together():
        data = replicas_of(chunk, mesh, dtype)
        candidates = _traced(chunk, example_inputs, mesh, data, dtype, overlap, found)
        whole = candidates.whole
        check_loss(whole)
        assert whole.reads is not None
        binding = Binding(chunk, whole.reads, example_inputs[0].device)
    alike.check_traced(whole)
    gradients = ParameterGradients(
        chunk, whole.parameters, whole.placements, dtype, replicas=data is not None
    )
    if found.name == "one_strand":
        planned = Planned(whole, whole.sequential, None, found)
    else:
        limits = memory_limits(RunConfig(plan=config), chunk, data)
        planned = _planned(candidates, example_inputs, gradients, config, overlap, limits, found)
    data_rank = data_rank_of(mesh, planned.strands)
    step = Step(planned, gradients, binding, example_inputs, data_rank, alike)
    check_agreement({"plan": step.plan.digest, "schedule": step.schedule_digest})
    warn_of_other_bits(step.nondeterminism)
    return step


class Planned(NamedTuple):
    """Graphs, the order in which they run, and the measured times behind it."""

    strands: Strands
    plan: Plan
    costs: CostTable | None
    schedule: Schedule


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
    nondeterminism: tuple[str, ...]
    """Why the bits of a step may differ from run to run, and so between one strand and two; empty
    if nothing is known that makes them differ, as on the CPU."""

    def __init__(
        self,
        planned: Planned,
        gradients: ParameterGradients,
        binding: Binding,
        example: Batch,
        data_rank: int,
        alike: ModuleAgreement,
    ) -> None:
        strands, self.plan, self.costs, self._schedule = planned
        self.decomposed = strands.listing
        self.losses = []
        self._strands = strands
        self._gradients = gradients
        self._binding = binding
        self._example = example
        self._executor = strands.executor(self.plan, gradients.constants, self._schedule)
        self._clock = clock_for(example[0].device.type)
        self._number = 0
        self._data_rank = data_rank
        self.nondeterminism = nondeterminism(example[0].device)
        self._seed = torch.initial_seed()
        self._alike = alike

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor:
        """The mean loss of these micro-batches. The gradient (over an axis `dp_replicate` its
        mean) is added to `param.grad`, or put there if that is None.

        `param.grad` may be a buffer of this step: after `zero_grad()` the next step writes to
        the same memory, so clone what is needed longer.
        """
        return self._run(micro_batches, None)

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """What this rank runs in a step of so many micro-batches, action by action; `print` shows
        which forward and backward each of them puts together."""
        return self._schedule.actions(micro_batches, self._strands.parts, head=bool(self.plan.head))

    @property
    def schedule_digest(self) -> str:
        """A hash of the actions, equal on all ranks."""
        return self._schedule.digest(self._strands.parts, head=bool(self.plan.head))

    def check_ranks(self) -> None:
        """Raise PeerError, naming weight and ranks, if parameters or buffers have come to differ
        between ranks that must hold the same: plain ones over all ranks of the mesh (without one,
        of the default group) unless `per_rank` named them, DTensors as they are laid out.

        Done once by `compile_step`; do it before you save a checkpoint. Collective on the default
        process group; about 1 s per GB of replicated weights on a CPU core.
        """
        self._alike.check()

    def record(self, micro_batches: Sequence[Batch], label: str = "step") -> Timeline:
        """The same step, recorded operator by operator: what was hidden and what was exposed."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        recorder = Recorder(self._strands.op_graphs, self._clock.restarted())
        self._run(micro_batches, recorder)
        return recorder.timeline(label, rank)

    def _run(self, micro_batches: Sequence[Batch], recorder: Recorder | None) -> Tensor:
        check_batches(micro_batches, self._example)
        if self._binding.check():
            self._gradients.rebind(self._strands.module)
            self._executor.rebind({**self._strands.buffers(), **self._gradients.constants})
        self._gradients.begin()
        self._number += 1
        if self._strands.takes_seeds:
            micro_batches = [
                (*batch, self._seeds(index)) for index, batch in enumerate(micro_batches)
            ]
        self.losses = self._executor.step(micro_batches, recorder)
        self._gradients.finish()
        return torch.stack(self.losses).mean()

    def _seeds(self, micro_batch: int) -> Tensor:
        return seeds_for(
            self._seed, step=self._number, micro_batch=micro_batch, data_rank=self._data_rank
        )


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


def _traced(
    chunk: nn.Module,
    example: Batch,
    mesh: DeviceMesh | None,
    data: DataLayout | None,
    dtype: torch.dtype,
    overlap: OverlapConfig,
    schedule: Schedule,
) -> Candidates:
    device = example[0].device
    trace = partial(
        build_strands, chunk, example, axis_of_group(mesh), data=data, buffer_dtype=dtype,
        wide_sums=wide_sums(device), watch=True,
    )  # fmt: skip
    return trace_candidates(
        lambda decompose: trace(decompose=decompose),
        decompose_of(overlap, device),
        overlap.passes,
        schedule=schedule,
    )


def _planned(
    candidates: Candidates,
    example: Batch,
    gradients: ParameterGradients,
    config: PlanConfig,
    overlap: OverlapConfig,
    limits: MemoryLimits,
    schedule: Schedule,
) -> Planned:
    """The plan of this schedule: the user's own, or one by measured times."""
    if config.file:
        plan = read(Path(config.file))
        return Planned(candidates.made_for(plan), plan, None, schedule)
    costs = _measured_costs(candidates.whole, example, gradients, config)
    traced = candidates.whole
    if overlap.passes != "ends":
        traced = choose_passes(candidates, costs, limits)
    plan = make_plan(traced.op_graphs, costs, config.search, limits=limits, schedule=schedule)
    return Planned(traced, plan, costs, schedule)


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
    say = logging.getLogger("interlace").warning
    return cached(directory, machine, strands.digest, measure, say=say)
