"""Open a session: model, data, weights and optimizer, then graphs, costs, plans and runners."""

import sys
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn

from interlace.compiled import (
    Compilation,
    Constants,
    StartUpTimes,
    StepSettings,
    machine_of_plan,
)
from interlace.config import Mode, RunConfig
from interlace.data.batches import open_dataset
from interlace.decompose.rewrite.apply import Decompose
from interlace.errors import InputError
from interlace.graphs.recompute import policy_of
from interlace.graphs.wide_sums import wide_sums
from interlace.ir.plan import Plan
from interlace.measure.site_times import decompose_of
from interlace.parallel.data import data_layout, gathered_in_stage, shards_of
from interlace.parallel.expert import dealt_parameters
from interlace.parallel.meshes import StageGroups, axis_groups, build_meshes
from interlace.parallel.tensor import loss_context
from interlace.ranks.device import check_device, claim_device, limit_waits
from interlace.ranks.replicas import random_state
from interlace.run_files import cache_directory
from interlace.runtime.candidates import trace_candidates
from interlace.runtime.cuda_graph import GraphMemory, refuse_capture
from interlace.runtime.executor import Batch
from interlace.runtime.laid_out_link import LaidOutLink
from interlace.runtime.memory_limit import constant_bytes, memory_limits
from interlace.runtime.rival import inductor_plan
from interlace.runtime.split_places import agreed_split
from interlace.runtime.stage_link import DealtWeights, StageLink
from interlace.runtime.stage_meshes import StageMeshes
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.schedules.finder import Schedule, of_strands
from interlace.schedules.stage import StageSchedule
from interlace.start_progress import at
from interlace.step import Draws, Step
from interlace.train.built_model import build_module, vocabulary
from interlace.train.fully_sharded import FullyShardedRunner, sharded_twin
from interlace.train.optimizer import build_optimizer, build_schedule
from interlace.train.rank_job import RankJob, job_of_rank
from interlace.train.session import (
    DECOMPOSED_MODES,
    DTYPES,
    PLAIN_MODES,
    Session,
    Setup,
)
from interlace.train.step_runners import EagerRunner, StepRunner, planned_step
from interlace.train.weights import MasterWeights

_WAIT_S = 1800.0
"""Seconds that a rank of a pipeline waits for a message: those of gloo's groups in PyTorch. Ranks
that die or stall are found by the watchdog, long before."""
STAGES = 5
"""Of a start, as a bar counts them: data, model, trace, times, plan."""


def open_session(job: RankJob) -> Session:
    """Build everything up to and including the plan. Collective; the process group exists."""
    setup, twin = _open(job)
    runners, graphs = _runners(setup, twin)
    if setup.stages is not None:
        setup.weights.free_others()
    # Not before: the weights of a stage are known when the model has been cut.
    optimizer = build_optimizer(setup.weights.parameters, setup.config.optimizer)
    schedule = build_schedule(optimizer, setup.config.optimizer, setup.config.train.steps)
    return Session(
        **vars(setup),
        optimizer=optimizer,
        schedule=schedule,
        runners=runners,
        compiled=graphs,
    )


def open_graphs(config: RunConfig) -> tuple[Setup, Compilation, Constants]:
    """Graphs for two strands, of which nothing is planned or measured yet. Collective."""
    if config.parallel.pipeline > 1:
        raise InputError(
            f"parallel.pipeline = {config.parallel.pipeline}: the operators of a pipeline are "
            "not profiled",
            hint="profile the same model on one stage, --parallel.pipeline 1, and give the file to "
            "interlace plan of the pipeline; with fewer model.layers also --interpolate",
        )
    setup, _ = _open(job_of_rank(config))
    return setup, *_trace(setup, of_strands(2))


def _open(job: RankJob) -> tuple[Setup, nn.Module | None]:
    config = job.config
    if job.rank == 0 and job.note:
        print(job.note, file=sys.stderr, flush=True)
    torch.set_num_threads(config.train.threads)
    # Again, where the process group is not that of `ranks.process_group`.
    device = claim_device(deterministic=config.train.deterministic)
    check_device(device, deterministic=config.train.deterministic)
    if config.train.cuda_graph:
        refuse_capture({}, device, is_pipeline=False)
    at("reading the data")
    dataset = open_dataset(
        config.data,
        seed=config.train.seed,
        cache_dir=cache_directory("tokens"),
        divisor=job.vocabulary_divisor,
        vocab_size=config.model.vocab_size,
    )
    at("building the model")
    meshes = build_meshes(config.parallel, device.type, job.layouts)
    limit_waits(meshes.groups)
    vocab_size = vocabulary(config, dataset.vocab_size)
    torch.manual_seed(config.train.seed)
    module = build_module(config, meshes, vocab_size, device)
    drawn = random_state(device)
    dtype, reduce_dtype = DTYPES[config.train.dtype], DTYPES[config.train.reduce_dtype]
    data = None
    if meshes.stages is None:  # in a pipeline it is not the graphs that sum over replicas
        data = data_layout(module, config.parallel, meshes, reduce_dtype)
    twin = None
    if "eager" in config.modes and data is not None and _can_fully_shard(config):
        twin = sharded_twin(module, meshes, dtype)
    weights = MasterWeights(module, dtype, data=data, meshes=meshes)
    setup = Setup(
        job=job,
        device=device,
        meshes=meshes,
        dataset=dataset,
        vocab_size=vocab_size,
        weights=weights,
        drawn=drawn,
    )
    return setup, twin


def _trace(
    setup: Setup, schedule: Schedule, *, plain: bool = False, eager: StepRunner | None = None
) -> tuple[Compilation, Constants]:
    """The graphs among which the run chooses, and what stands for their inputs."""
    at("tracing the model")
    config, data, weights = setup.config, setup.weights.data, setup.weights
    example = setup.move(next(setup.batches()))
    gathered = gathered_in_stage(config.parallel, weights.module, setup.meshes)
    cluster = machine_of_plan(config.plan, axis_groups(config.parallel))
    decompose = decompose_of(config.overlap, setup.device, cluster)
    split_at = config.pipeline.split_at or schedule.split_at
    trace = cache(partial(_strands, setup, example))
    if config.pipeline.stages and isinstance(schedule, StageSchedule) and not split_at:
        split_at = agreed_split(lambda: trace(decompose), len(schedule.rank_of))
    candidates = trace_candidates(
        trace,
        decompose,
        config.overlap.passes,
        schedule=schedule,
        plain=plain,
        split_at=split_at,
        data=gathered,
    )
    reason = candidates.all.not_repeated
    if reason and setup.rank == 0:
        print(f"all layers are traced: {reason}", file=sys.stderr)
    _say_if_rounded(setup)
    held = candidates.whole.held
    if held is not None and setup.stages is not None:
        _refuse_bare_stages(candidates.whole)
        shards = shards_of(config.parallel)
        weights.keep(held, setup.stages.stage, setup.meshes, shards, gathered)
    constants = {**weights.constants(), **weights.buffers()}
    gathers = weights.shards is not None or (data is not None and data.gathers_each)
    if gathers and not isinstance(eager, EagerRunner):
        weights.drop_whole()
    constant = constant_bytes(config.parallel, config.train.dtype, weights.module, data, held)
    settings = StepSettings(
        plan=config.plan,
        overlap=config.overlap,
        limits=memory_limits(config.plan, constant),
    )
    times = StartUpTimes(
        example=example,
        constants=constants,
        plan=config.plan,
        link=config.link,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        group=setup.same_graphs,
        cluster=cluster,
        cuda_graph=config.train.cuda_graph,
    )
    return Compilation(candidates, settings, times), constants


def _refuse_bare_stages(strands: Strands) -> None:
    """Raise InputError, on all ranks alike, for a stage that an optimizer would find empty."""
    handovers = strands.handovers
    assert handovers is not None
    holding = {rank for name in strands.parameters for rank in handovers.holders(name)}
    bare = sorted(set(handovers.rank_of) - holding)
    if bare:
        raise InputError(
            f"stage {bare[0]} of the pipeline has no weights that are trained",
            hint="set parallel.pipeline to fewer stages, or pipeline.split_at so that each stage "
            "has a layer",
        )


def _say_if_rounded(setup: Setup) -> None:
    dtype = DTYPES[setup.config.train.dtype]
    is_narrow = dtype != torch.float32 and setup.device.type == "cuda"
    if is_narrow and setup.rank == 0 and dtype not in wide_sums(setup.device):
        print(
            f"gradients of matmuls are rounded to {setup.config.train.dtype} before they are "
            f"summed: torch {torch.__version__} cannot add them to float32 on this GPU",
            file=sys.stderr,
        )


def _runners(
    setup: Setup, twin: nn.Module | None
) -> tuple[dict[Mode, StepRunner], tuple[Compilation, Constants] | None]:
    """Every way to run a step that the run file asks for, and what plans of strands are made
    from."""
    if setup.stages is not None:
        return {setup.config.strands: _pipeline(setup, setup.stages)}, None
    modes = setup.config.modes
    runners: dict[Mode, StepRunner] = {}
    if "eager" in modes:
        runners["eager"] = _eager_runner(setup, twin)
    if modes == {"eager"}:
        return runners, None
    strands = 1 if setup.config.strands == "1" else 2
    compilation, constants = _trace(
        setup,
        of_strands(strands),
        plain=bool(modes & PLAIN_MODES),
        eager=runners.get("eager"),
    )
    # All plans first: one that is made measures times, which are those of steps without a search.
    plans = _plans(setup.config, compilation, sorted(modes - {"eager"}))
    made: dict[tuple[str, str, str], Step] = {}
    memory = GraphMemory() if setup.config.train.cuda_graph else None
    for mode, (graphs, plan) in plans.items():
        key = (graphs.digest, plan.search, plan.digest)
        if key not in made:
            costs, draws = compilation.tables.get(graphs.digest), _draws(setup)
            made[key] = planned_step(
                setup.weights, graphs, plan, constants, draws, costs, captured_in=memory
            )
        runners[mode] = made[key]
    return runners, (compilation, constants)


def _pipeline(setup: Setup, groups: StageGroups) -> Step:
    """This rank's stage of a pipeline, by the schedule of the run file."""
    named, ranks = setup.job.schedule, setup.config.parallel.pipeline
    stage = StageSchedule(named.name, named.function, ranks=ranks, rank=groups.number)
    stage.phases(stage.graphs)
    compilation, constants = _trace(setup, stage)
    strands, plan, schedule = compilation.scheduled(stage)
    link = _link(setup, groups)
    assert strands.handovers is not None
    link.prepare(strands.handovers)
    costs, draws = compilation.tables.get(strands.digest), _draws(setup)
    return planned_step(
        setup.weights, strands, plan, constants, draws, costs, schedule=schedule, link=link
    )


def _link(setup: Setup, groups: StageGroups) -> StageLink:
    replicas = groups.replicas if groups.copies > 1 else None
    dealt = _dealt(setup.weights.module, groups.same_experts)
    around = [groups.stage, *setup.meshes.groups]
    if groups.apart:
        return LaidOutLink(
            StageMeshes.of(groups.apart), setup.device,
            replicas=replicas, around=around, wait_s=_WAIT_S,
        )  # fmt: skip
    assert groups.pipeline is not None
    return StageLink(
        groups.pipeline, setup.device,
        replicas=replicas, dealt=dealt, around=around, wait_s=_WAIT_S,
    )  # fmt: skip


def _dealt(module: nn.Module, same: dist.ProcessGroup | None) -> DealtWeights:
    """The weights of dealt experts; `same` are the ranks that hold those of this one."""
    has_others = same is not None and dist.get_world_size(same) > 1
    return DealtWeights(frozenset(dealt_parameters(module)), same if has_others else None)


def _plans(
    config: RunConfig, compilation: Compilation, modes: list[Mode]
) -> dict[Mode, tuple[Strands, Plan]]:
    """The graphs that each way to run strands works on, and its plan."""
    given = compilation.given_plan() if config.strands == "2" else None
    candidates, chosen = compilation.candidates, compilation.chosen(given)
    plans: dict[Mode, tuple[Strands, Plan]] = {}
    for mode in modes:
        graphs: Strands | None = chosen
        if mode in PLAIN_MODES:
            graphs = candidates.plain
        elif mode in DECOMPOSED_MODES:
            graphs = candidates.all
        assert graphs is not None
        made = [plan for _, plan in plans.values()]
        plans[mode] = graphs, _plan(config, compilation, mode, graphs, given, made)
    return plans


def _strands(setup: Setup, example: Batch, decompose: Decompose | None) -> Strands:
    config = setup.config
    with loss_context(setup.meshes.tensor):
        return build_strands(
            setup.weights.module,
            example,
            setup.meshes.axis_of_group,
            data=setup.weights.data,
            recompute=policy_of(config.train),
            repeat=config.model.source == "interlace",
            decompose=decompose,
            wide_sums=wide_sums(setup.device),
        )


def _draws(setup: Setup) -> Draws:
    meshes = setup.meshes
    data_rank = meshes.data_rank * meshes.context.size() + meshes.context.get_local_rank()
    return Draws(seed=setup.config.train.seed, data_rank=data_rank)


def _can_fully_shard(config: RunConfig) -> bool:
    parallel = config.parallel
    return (
        parallel.zero == 3
        and parallel.data_shard > 1
        and parallel.tensor == parallel.context == parallel.expert == 1
    )


def _eager_runner(setup: Setup, twin: nn.Module | None) -> StepRunner:
    """PyTorch's own `fully_shard` where it does the same; else autograd on whole weights."""
    if twin is None or setup.weights.data is None:
        return EagerRunner(setup.weights, setup.meshes)
    return FullyShardedRunner(setup.weights, twin, setup.weights.data)


def _plan(
    config: RunConfig,
    compilation: Compilation,
    mode: Mode,
    strands: Strands,
    given: Plan | None,
    made: Sequence[Plan],
) -> Plan:
    """The plan of a way to run strands; `given` is that of mode 2, if a file has it, and `made` are
    those of other ways."""
    if mode in ("1", "plain-1", "decomposed-1"):
        return strands.sequential
    if mode == "2" and given is not None:
        return compilation.checked(given, strands)
    costs = compilation.costs(strands)
    if mode == "inductor":
        return inductor_plan(strands, costs)
    search = config.plan.search if mode in ("2", "plain-2", "decomposed-2") else mode
    for plan in made:
        made_for = (plan.search, plan.cost_digest, plan.graph_digest)
        if made_for == (search, costs.digest, strands.digest):
            return plan
    return compilation.plan(strands, of_strands(2), search)
