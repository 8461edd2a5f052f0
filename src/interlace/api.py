"""Interlaced training steps for your own module, in your own loop.

step = interlace.compile_step(module, loss_fn, example_inputs, mesh=mesh)
loss = step(micro_batches)          # gradients are in param.grad
optimizer.step()
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from interlace.compiled import Compilation, CompiledStep, Draws, StepSettings
from interlace.config import OverlapConfig, PlanConfig, RunConfig
from interlace.decompose.listing import Listing
from interlace.errors import InputError
from interlace.graphs.wide_sums import wide_sums
from interlace.ir.actions import Action
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.measure.site_times import decompose_of
from interlace.parallel.data import DataLayout
from interlace.ranks.agree import check_agreement, refused_together
from interlace.ranks.determinism import check_current, nondeterminism, warn_of_other_bits
from interlace.runtime.binding import ModuleBinding
from interlace.runtime.candidates import Candidates, trace_candidates
from interlace.runtime.gradients import ParameterGradients
from interlace.runtime.memory_limit import memory_limits
from interlace.runtime.mesh_axes import axis_of_group, data_rank_of, replicas_of
from interlace.runtime.module_tree import refuse_gradient_hooks
from interlace.runtime.recorder import Recorder
from interlace.runtime.same_module import ModuleAgreement
from interlace.runtime.step_inputs import check_batches, check_example, check_loss, check_wrappers
from interlace.runtime.traced_strands import build_strands
from interlace.schedules.finder import Schedule, ScheduleFunction, find
from interlace.search.limits import MemoryLimits

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
        found = _schedule(schedule, strands)
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
        binding = ModuleBinding(chunk, whole.reads, example_inputs[0].device)
    alike.check_traced(whole)
    gradients = ParameterGradients(
        chunk, whole.parameters, whole.placements, dtype, replicas=data is not None
    )
    limits = memory_limits(RunConfig(plan=config), chunk, data)
    settings = _settings(config, overlap, limits)
    compilation = Compilation(candidates, example_inputs, gradients.constants, settings)
    compiled = _compiled(compilation, found, gradients, data_rank_of(mesh, whole))
    costs = compilation.tables.get(compiled.strands.digest)
    step = Step(compiled, costs, gradients, binding, example_inputs, alike)
    check_agreement(compiled.digests)
    warn_of_other_bits(step.nondeterminism)
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
    nondeterminism: tuple[str, ...]
    """Why the bits of a step may differ from run to run, and so between one strand and two; empty
    if nothing is known that makes them differ, as on the CPU."""

    def __init__(
        self,
        compiled: CompiledStep,
        costs: CostTable | None,
        gradients: ParameterGradients,
        binding: ModuleBinding,
        example: Batch,
        alike: ModuleAgreement,
    ) -> None:
        self.plan = compiled.plan
        self.costs = costs
        self.decomposed = compiled.strands.listing
        self.losses = []
        self._compiled = compiled
        self._gradients = gradients
        self._binding = binding
        self._example = example
        self._number = 0
        self.nondeterminism = nondeterminism(example[0].device)
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
        return self._compiled.actions(micro_batches)

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
        recorder = self._compiled.recorder()
        self._run(micro_batches, recorder)
        return recorder.timeline(label, rank)

    def _run(self, micro_batches: Sequence[Batch], recorder: Recorder | None) -> Tensor:
        check_batches(micro_batches, self._example)
        if self._binding.check():
            strands = self._compiled.strands
            self._gradients.rebind(strands.module)
            constants = {**strands.buffers(), **self._gradients.constants}
            self._compiled.executor.rebind(constants)
        self._gradients.begin()
        self._number += 1
        self.losses = self._compiled.run(micro_batches, self._number, recorder)
        self._gradients.finish()
        return torch.stack(self.losses).mean()


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


def _schedule(schedule: str | ScheduleFunction, strands: int) -> Schedule:
    """The schedule that was asked for, whose actions can run."""
    if strands not in (1, 2):
        raise InputError(f"strands = {strands!r} is neither 1 nor 2", hint="2 interleaves")
    found = find(schedule or ("one_strand", "two_strand")[strands - 1])
    found.phases(found.graphs)
    return found


def _settings(config: PlanConfig, overlap: OverlapConfig, limits: MemoryLimits) -> StepSettings:
    say = logging.getLogger("interlace").warning
    return StepSettings(plan=config, overlap=overlap, limits=limits, link=RunConfig().link, say=say)


def _compiled(
    compilation: Compilation, schedule: Schedule, gradients: ParameterGradients, data_rank: int
) -> CompiledStep:
    """The step by this schedule: in traced order, by the user's own plan, or by measured times."""
    draws = Draws(seed=torch.initial_seed(), data_rank=data_rank)
    if schedule.name == "one_strand":
        strands = compilation.candidates.whole
        plan = strands.sequential
    else:
        given = compilation.given_plan()
        strands = compilation.chosen(given)
        plan = given or compilation.plan(strands, schedule)
        plan = compilation.checked(plan, strands)
    return CompiledStep(strands, plan, gradients.constants, schedule, draws)
