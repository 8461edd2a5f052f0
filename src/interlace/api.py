"""Interlaced training steps for your own module, in your own loop.

step = interlace.compile_step(module, loss_fn, example_inputs, mesh=mesh)
loss = step(micro_batches)          # gradients are in param.grad
optimizer.step()
optimizer.zero_grad()               # a step adds to param.grad, as autograd does
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from interlace.compiled import (
    Compilation,
    Constants,
    StartUpTimes,
    StepSettings,
    machine_of_plan,
)
from interlace.config import LinkConfig, OverlapConfig, ParallelConfig, PlanConfig
from interlace.decompose.rewrite.apply import Decompose
from interlace.errors import InputError
from interlace.garbage import no_collections
from interlace.graphs.fsdp_private import FullyShardedModule
from interlace.graphs.wide_sums import wide_sums
from interlace.hardware.cluster_costs import ClusterMachine
from interlace.measure.site_times import decompose_of
from interlace.parallel.data import DataLayout
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import PIPELINE_AXIS
from interlace.ranks.agree import check_contents, refused_together
from interlace.ranks.determinism import warn_of_other_bits
from interlace.runtime.batch_form import BatchForm
from interlace.runtime.binding import ModuleBinding
from interlace.runtime.candidates import Candidates, trace_candidates
from interlace.runtime.cuda_graph import GraphMemory, refuse_capture
from interlace.runtime.executor import Batch
from interlace.runtime.fsdp_gradients import GroupGradients
from interlace.runtime.fsdp_step import mesh_of_fully_shard, sharded_for_step
from interlace.runtime.gradients import ParameterGradients
from interlace.runtime.joint_end import WAIT_S
from interlace.runtime.memory_limit import constant_bytes, memory_limits
from interlace.runtime.mesh_axes import (
    axis_of_group,
    data_rank_of,
    rank_groups,
)
from interlace.runtime.module_tree import refuse_gradient_hooks
from interlace.runtime.replicated_module import ReplicatedModule
from interlace.runtime.same_module import ModuleAgreement
from interlace.runtime.split_places import agreed_split
from interlace.runtime.stage_link import StageLink
from interlace.runtime.step_inputs import check_example, check_loss, check_module, check_wrappers
from interlace.runtime.step_ranks import StepRanks
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.runtime.user_module import LossFunction, ModuleWithLoss, UserModule
from interlace.schedules.finder import Schedule, ScheduleFunction, find, of_strands
from interlace.schedules.stage import StageSchedule
from interlace.start_progress import at, told
from interlace.step import Draws, Step


@contextmanager
def _progress_told() -> Iterator[None]:
    """Says on the first rank of the job, now and then, what a slow call works on."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with told("compile_step") if is_first else nullcontext():
        yield


@no_collections()
@_progress_told()
def compile_step(
    module: nn.Module,
    loss_fn: LossFunction,
    example_inputs: Any,
    *,
    mesh: DeviceMesh | None = None,
    strands: int = 2,
    schedule: str | ScheduleFunction = "",
    config: PlanConfig | None = None,
    overlap: OverlapConfig | None = None,
    per_rank: Collection[str] = (),
    split_at: Sequence[str] = (),
    stages: Sequence[DeviceMesh] = (),
    wait_s: float = WAIT_S,
    cuda_graph: bool = False,
) -> "Step":
    """A step of `module` whose micro-batches are interleaved in a planned order.

    `loss_fn(module, *batch)` calls the module and returns a scalar, or a tuple of it and of tensors
    for `step.results`; `example_inputs` is one batch, any tree of tensors, and all later ones have
    its form, shapes, dtypes and device. The module is on its device and laid out over ranks; `mesh`
    names the axes of its collectives. Gradients are averaged over an axis `dp_replicate`, whose
    ranks hold equal weights and see different data; modules under `fully_shard` or in
    `DistributedDataParallel` are taken too. `strands=1` runs the same graphs one micro-batch after
    the other. `schedule` takes the place of `strands`: `one_strand`, `two_strand`, `folded`, or a
    function of your own or its `"module:name"` (docs/concepts/schedules.md). An axis `pp` of `mesh`
    is a pipeline: its ranks run the chunks of such a schedule, each builds the whole module, and
    afterwards has gradients of its own stage. Chunks have equal shares of the arithmetic, or begin
    with the sub-modules that `split_at` names, without the first; `wait_s` bounds each wait for
    another rank. With `stages` in place of `mesh` each stage has a mesh of its own, and a rank
    builds the module in that of its stage (docs/concepts/stage-layouts.md). `config` says how the
    order is found, `overlap` whether collectives are cut into sends under partial matmuls. Masks of
    dropout follow from torch's seed at this call, step and micro-batch. `per_rank` names plain
    parameters and buffers of which each rank has its own. `cuda_graph` captures the kernels of a
    step once and replays them from then on (docs/guides/gpu.md).

    One strand and two give the same bits; on CUDA with deterministic kernels only, as
    docs/guides/gpu.md sets them. Else this call warns, and `step.nondeterminism` has the reasons.

    Collective on the ranks of `mesh`, or else of the default process group; hold `loss_parallel()`
    around it if the loss needs that. Raises InputError for what cannot be traced or run, by name.
    """
    check_module(module)
    config, overlap = config or PlanConfig(), overlap or OverlapConfig()
    replicas, module, mesh, per_rank = _unwrapped(module, mesh, stages, per_rank)
    ranks = StepRanks.of(mesh, stages, overlap)
    with refused_together(ranks.group):
        found = _schedule(schedule, strands, ranks)
        check_example(example := (form := BatchForm(example_inputs)).example)
        chunk = ModuleWithLoss(module, loss_fn, form)
        check_wrappers(module, fsdp=True)
        refuse_gradient_hooks(chunk)
        sharded = sharded_for_step(chunk, ranks, found)
        alike = ModuleAgreement(module, ranks.mesh, per_rank, ranks.group)
        dtype = _type_of_sums(module)
        data = ranks.data(chunk, dtype) if sharded is None else None
        link = ranks.link(chunk, example[0].device, wait_s)
        memory = _memory_of_graphs(example[0].device, link) if cuda_graph else None
        cluster = machine_of_plan(config, rank_groups(ranks.mesh))
    alike.check_software(loss_fn)
    trace = _trace(chunk, example, ranks.mesh, data, dtype, sharded)
    decompose = decompose_of(overlap, example[0].device, cluster)
    whole = (candidates := _candidates(trace, decompose, overlap, found, ranks, split_at)).whole
    with refused_together(ranks.group):
        binding = _bound(chunk, whole, example[0].device, sharded)
    alike.check_traced(whole)
    gradients = _gradients(chunk, whole, dtype, ranks)
    times = _times(config, example, gradients.constants, ranks.group, cluster, memory)
    compilation = Compilation(candidates, _settings(config, overlap, whole, data), times)
    own = UserModule(chunk, gradients, binding, form, alike, sharded, replicas)
    return _step(compilation, found, own, link, ranks, memory)


def clip_grad_norm_(step: Step, max_norm: float) -> Tensor:
    """Scale the gradients of a step so that the norm of all of them is at most `max_norm`; returns
    the norm before that, in float64.

    As `torch.nn.utils.clip_grad_norm_`, which in a pipeline sees the stage of one rank only. Here
    every stage counts, and a weight that several ranks hold counts once. Collective over the ranks
    of the pipeline, and over those that share a parameter."""
    tensors = step.tensors
    if not isinstance(tensors, UserModule):
        raise _not_compiled(step, "clip_grad_norm_")
    norm = tensors.norm(step.strands.handovers, step.link)
    held = tensors.gradients(step.strands.held_parameters)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in held:
        local(gradient).mul_(scale.to(local(gradient).dtype))
    return norm


def stage_parameters(step: Step) -> dict[str, nn.Parameter]:
    """The parameters that this rank's stage of a pipeline reads or has gradients of, by name: what
    a rank has to save, and to load. Without a pipeline all of the module."""
    tensors = step.tensors
    if not isinstance(tensors, UserModule):
        raise _not_compiled(step, "stage_parameters")
    return tensors.parameters(step.strands.handovers)


def free_other_stages(step: Step) -> int:
    """Free the memory of the parameters that only other stages use; the number of bytes.

    They stay in the module with their shapes and have no memory, so nothing may read them any more:
    save `stage_parameters(step)`. Memory that torch did not allocate stays: of a file that
    safetensors has mapped, say, which the system takes back by itself when it needs it. Call it
    once, on all ranks, before optimizers and copies are made."""
    tensors = step.tensors
    if not isinstance(tensors, UserModule):
        raise _not_compiled(step, "free_other_stages")
    return tensors.free_all_but(stage_parameters(step))


def _unwrapped(
    module: nn.Module,
    mesh: DeviceMesh | None,
    stages: Sequence[DeviceMesh],
    per_rank: Collection[str],
) -> tuple[ReplicatedModule | None, nn.Module, DeviceMesh | None, Collection[str]]:
    """The wrapper of a module that has one, the module in it, the mesh that both say, and what
    ranks may have of their own."""
    if not isinstance(module, DistributedDataParallel):
        if mesh is None and not stages:
            mesh = mesh_of_fully_shard(module)
        return None, module, mesh, per_rank
    replicas = ReplicatedModule(module)
    replicas.take_buffers()
    return replicas, replicas.module, replicas.mesh(mesh, stages), replicas.per_rank(per_rank)


def _not_compiled(step: Step, name: str) -> InputError:
    return InputError(
        f"{name} takes a step of compile_step, not one of {type(step.tensors).__name__}",
        hint="interlace train keeps weights of its own",
    )


def _trace(
    chunk: nn.Module,
    example: Batch,
    mesh: DeviceMesh | None,
    data: DataLayout | None,
    dtype: torch.dtype,
    sharded: FullyShardedModule | None,
) -> Callable[[Decompose | None], Strands]:
    """Traces the module, with and without what is decomposed, each once."""
    if sharded is not None:
        example = sharded.fake_inputs(example)
    trace = partial(
        build_strands, chunk, example, axis_of_group(mesh), data=data, buffer_dtype=dtype,
        wide_sums=wide_sums(example[0].device), watch=True, repeat=True,
        groups=None if sharded is None else sharded.layout,
    )  # fmt: skip

    @cache
    def traced(decompose: Decompose | None) -> Strands:
        at("tracing the module")
        with nullcontext() if sharded is None else sharded.plain():
            return trace(decompose=decompose)

    return traced


def _bound(
    chunk: nn.Module, strands: Strands, device: torch.device, sharded: FullyShardedModule | None
) -> ModuleBinding:
    check_loss(strands.measured)
    assert strands.reads is not None
    as_traced = nullcontext if sharded is None else sharded.plain
    return ModuleBinding(chunk, strands.reads, device, as_traced)


def _gradients(
    chunk: nn.Module, strands: Strands, dtype: torch.dtype, ranks: StepRanks
) -> ParameterGradients:
    if strands.groups is not None:
        return GroupGradients(chunk, strands.held_parameters, strands.groups, dtype)
    return ParameterGradients(
        chunk, strands.held_parameters, strands.placements, dtype,
        replicas=ranks.has_replicas(chunk),
    )  # fmt: skip


def _candidates(
    trace: Callable[[Decompose | None], Strands],
    decompose: Decompose | None,
    overlap: OverlapConfig,
    schedule: Schedule,
    ranks: StepRanks,
    split_at: Sequence[str],
) -> Candidates:
    """Traces by a schedule, whose chunks begin where the user says, or else where the schedule was
    made for. Collective."""
    split_at = split_at or schedule.split_at
    if ranks.apart is not None and isinstance(schedule, StageSchedule) and not split_at:
        split_at = agreed_split(lambda: trace(decompose), len(schedule.rank_of))
    # Where times decide what is decomposed, ranks exchange them while they trace.
    with nullcontext() if overlap.decompose == "auto" else refused_together(ranks.group):
        return trace_candidates(
            trace, decompose, overlap.passes, schedule=schedule, split_at=split_at
        )


def _schedule(schedule: str | ScheduleFunction, strands: int, on: StepRanks) -> Schedule:
    """The schedule that was asked for, whose actions can run."""
    if strands not in (1, 2):
        raise InputError(f"strands = {strands!r} is neither 1 nor 2", hint="2 interleaves")
    if on.pipeline is None:
        found = find(schedule) if schedule else of_strands(strands)
    else:
        ranks, rank = on.pipeline
        if not schedule:
            what = "there are" if on.apart is not None else f"mesh has an axis {PIPELINE_AXIS} of"
            what += f" {ranks} {'stages' if on.apart is not None else 'ranks'}"
            raise InputError(
                f"{what}, and no schedule is named",
                hint="give compile_step(schedule=...): one_f_one_b, eager_one_f_one_b, "
                "interleaved, zb_h1, zb_h2, zb_v, dual_pipe_v, folded or eager_folded",
            )
        named = find(schedule)
        found = StageSchedule(named.name, named.function, ranks=ranks, rank=rank)
    found.phases(found.graphs)
    return found


def _type_of_sums(module: nn.Module) -> torch.dtype:
    has_double = any(p.dtype == torch.float64 for p in module.parameters())
    return torch.float64 if has_double else torch.float32


def _settings(
    config: PlanConfig, overlap: OverlapConfig, strands: Strands, data: DataLayout | None
) -> StepSettings:
    held = constant_bytes(ParallelConfig(), "float32", strands.module, data, strands.held)
    limits = memory_limits(config, held)
    return StepSettings(plan=config, overlap=overlap, limits=limits)


def _memory_of_graphs(device: torch.device, link: StageLink | None) -> GraphMemory:
    refuse_capture({}, device, is_pipeline=link is not None)
    return GraphMemory()


def _times(
    config: PlanConfig,
    example: Batch,
    constants: Constants,
    group: dist.ProcessGroup | None,
    cluster: ClusterMachine | None,
    captured_in: GraphMemory | None,
) -> StartUpTimes:
    say = logging.getLogger("interlace").warning
    return StartUpTimes(
        example=example, constants=constants, plan=config, link=LinkConfig(), say=say,
        group=group, cluster=cluster, cuda_graph=captured_in is not None,
    )  # fmt: skip


def _step(
    compilation: Compilation,
    schedule: Schedule,
    tensors: UserModule,
    link: StageLink | None,
    ranks: StepRanks,
    captured_in: GraphMemory | None,
) -> Step:
    """The step by this schedule: in traced order, by the user's own plan, or by measured times."""
    data_rank = data_rank_of(ranks.mesh, compilation.candidates.whole)
    draws = Draws(seed=torch.initial_seed(), data_rank=data_rank)
    if schedule == of_strands(1):
        strands = compilation.candidates.whole
        plan = strands.sequential
    else:
        strands, plan, schedule = compilation.scheduled(schedule)
    at("building the step")
    costs = compilation.tables.get(strands.digest)
    if link is not None and strands.handovers is not None:
        link.prepare(strands.handovers)
    step = Step(
        strands, plan, tensors, schedule=schedule, draws=draws, costs=costs, link=link,
        group=ranks.members, captured_in=captured_in,
    )  # fmt: skip
    check_contents(step.contents, group=ranks.members)
    warn_of_other_bits(step.nondeterminism)
    return step
