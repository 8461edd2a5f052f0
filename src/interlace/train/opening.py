"""Open a session: model, data, weights and optimizer, then graphs, costs, plans and engines."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from interlace.compiled import Compilation, Draws, StepSettings
from interlace.config import Mode, RunConfig, modes_of
from interlace.data.batches import open_dataset
from interlace.decompose.rewrite.apply import Decompose
from interlace.graphs.recompute import policy_of
from interlace.graphs.wide_sums import wide_sums
from interlace.ir.plan import Plan
from interlace.measure.site_times import decompose_of
from interlace.parallel.data import data_layout
from interlace.parallel.meshes import build_meshes
from interlace.parallel.tensor import loss_context
from interlace.ranks.device import check_device, claim_device, limit_waits
from interlace.ranks.replicas import random_state
from interlace.rules import check, resolve_layout
from interlace.run_files import cache_directory
from interlace.runtime.candidates import trace_candidates
from interlace.runtime.executor import Batch
from interlace.runtime.memory_limit import memory_limits
from interlace.runtime.rival import inductor_plan
from interlace.runtime.traced_strands import Strands, build_strands
from interlace.schedules.finder import find
from interlace.train.built_model import build_module, overridden_shape, published_shape
from interlace.train.engines import EagerEngine, Engine, StrandEngine
from interlace.train.fully_sharded import FullyShardedEngine, sharded_twin
from interlace.train.optimizer import build_optimizer, build_schedule
from interlace.train.session import (
    DTYPES,
    PLAIN_MODES,
    Session,
    vocabulary,
)
from interlace.train.weights import MasterWeights

SCHEDULES = {1: find("one_strand"), 2: find("two_strand")}
"""By number of strands."""


def open_session(config: RunConfig) -> Session:
    """Build everything up to and including the plan. Collective; the process group exists."""
    session, twin = _open(config)
    _build_engines(session, twin)
    return session


def open_graphs(config: RunConfig) -> Session:
    """A session with graphs for two strands, but no plan and no engines. Collective."""
    session, _ = _open(config)
    _trace(session, session.move(next(session.batches())), strands=2)
    return session


def _open(config: RunConfig) -> tuple[Session, nn.Module | None]:
    check(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    given, config = config, published_shape(config)
    if rank == 0 and (overridden := overridden_shape(given, config)):
        print(overridden, file=sys.stderr, flush=True)
    config = resolve_layout(config, world_size)
    torch.set_num_threads(config.train.threads)
    device = claim_device(config)  # again, where the process group is not `session`'s
    check_device(config, device)
    dataset = open_dataset(
        config.data,
        seed=config.train.seed,
        cache_dir=cache_directory("tokens"),
        divisor=config.parallel.tensor,
        vocab_size=config.model.vocab_size,
    )
    vocab_size = vocabulary(config, dataset.vocab_size)
    meshes = build_meshes(config.parallel, device.type)
    limit_waits((meshes.layout, meshes.weights))
    torch.manual_seed(config.train.seed)
    module = build_module(config, meshes, vocab_size, device)
    drawn = random_state(device)
    dtype, reduce_dtype = DTYPES[config.train.dtype], DTYPES[config.train.reduce_dtype]
    data = data_layout(module, config.parallel, meshes, reduce_dtype)
    twin = None
    if "eager" in modes_of(config) and data is not None and _can_fully_shard(config):
        twin = sharded_twin(module, meshes, dtype)
    weights = MasterWeights(module, dtype, data=data, meshes=meshes)
    optimizer = build_optimizer(weights.parameters, config.optimizer)
    schedule = build_schedule(optimizer, config.optimizer, config.train.steps)
    session = Session(
        config, rank, world_size, device, meshes, dataset, weights, optimizer, schedule, drawn
    )
    return session, twin


def _trace(session: Session, example: Batch, *, strands: int, plain: bool = False) -> None:
    """The graphs among which the run chooses, and what stands for their inputs."""
    config, data, weights = session.config, session.weights.data, session.weights
    candidates = trace_candidates(
        lambda decompose: _strands(session, example, decompose),
        decompose_of(config.overlap, session.device),
        config.overlap.passes,
        schedule=SCHEDULES[strands],
        plain=plain,
    )
    reason = candidates.all.not_repeated
    if reason and session.rank == 0:
        print(f"all layers are traced: {reason}", file=sys.stderr)
    _say_if_rounded(session)
    session.constants = {**weights.constants(), **weights.buffers()}
    whole = isinstance(session.engines.get("eager"), EagerEngine)
    if data is not None and data.gathers_each and not whole:
        weights.drop_whole()
    settings = StepSettings(
        plan=config.plan,
        overlap=config.overlap,
        limits=memory_limits(config, weights.module, data),
        link=config.link,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    session.compilation = Compilation(candidates, example, session.constants, settings)


def _say_if_rounded(session: Session) -> None:
    dtype = DTYPES[session.config.train.dtype]
    is_narrow = dtype != torch.float32 and session.device.type == "cuda"
    if is_narrow and session.rank == 0 and dtype not in wide_sums(session.device):
        print(
            f"gradients of matmuls are rounded to {session.config.train.dtype} before they are "
            f"summed: torch {torch.__version__} cannot add them to float32 on this GPU",
            file=sys.stderr,
        )


def _build_engines(session: Session, twin: nn.Module | None) -> None:
    modes = modes_of(session.config)
    if "eager" in modes:
        session.engines["eager"] = _eager_engine(session, twin)
    if modes == {"eager"}:
        return
    example = session.move(next(session.batches()))
    strands = 1 if session.config.strands == "1" else 2
    _trace(session, example, strands=strands, plain=bool(modes & PLAIN_MODES))
    compilation = session.compilation
    assert compilation is not None
    given = compilation.given_plan() if session.config.strands == "2" else None
    session.strands = compilation.chosen(given)
    engines: dict[tuple[str, str], StrandEngine] = {}
    for mode in sorted(modes - {"eager"}):
        plan = _plan(session, compilation, mode, given)
        graphs = session.strands_of(mode)
        assert graphs is not None
        key = (graphs.digest, plan.digest)
        if key not in engines:
            engines[key] = StrandEngine(
                session.weights, graphs, plan, session.constants, _draws(session)
            )
        session.plans[mode] = plan
        session.engines[mode] = engines[key]


def _strands(session: Session, example: Batch, decompose: Decompose | None) -> Strands:
    config = session.config
    with loss_context(session.meshes.tensor):
        return build_strands(
            session.weights.module,
            example,
            session.meshes.axis_of_group,
            data=session.weights.data,
            recompute=policy_of(config.train),
            repeat=config.model.source == "interlace",
            decompose=decompose,
            wide_sums=wide_sums(session.device),
        )


def _draws(session: Session) -> Draws:
    meshes = session.meshes
    data_rank = meshes.data_rank * meshes.context.size() + meshes.context.get_local_rank()
    return Draws(seed=session.config.train.seed, data_rank=data_rank)


def _can_fully_shard(config: RunConfig) -> bool:
    parallel = config.parallel
    return (
        parallel.zero == 3 and parallel.data_shard > 1 and parallel.tensor == parallel.context == 1
    )


def _eager_engine(session: Session, twin: nn.Module | None) -> Engine:
    """PyTorch's own `fully_shard` where it does the same; else autograd on whole weights."""
    if twin is None or session.weights.data is None:
        return EagerEngine(session.weights, session.meshes)
    return FullyShardedEngine(session.weights, twin, session.weights.data)


def _plan(session: Session, compilation: Compilation, mode: Mode, given: Plan | None) -> Plan:
    """The plan of a way to run strands; `given` is that of mode 2, if a file has it."""
    strands = session.strands_of(mode)
    assert strands is not None
    if mode in ("1", "plain-1", "decomposed-1"):
        return strands.sequential
    if mode == "2" and given is not None:
        return compilation.checked(given, strands)
    costs = compilation.costs(strands)
    if mode == "inductor":
        return inductor_plan(strands, costs)
    search = session.config.plan.search if mode in ("2", "plain-2", "decomposed-2") else mode
    for plan in session.plans.values():
        made_for = (plan.search, plan.cost_digest, plan.graph_digest)
        if made_for == (search, costs.digest, strands.digest):
            return plan
    return compilation.plan(strands, SCHEDULES[2], search)
