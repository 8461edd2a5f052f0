"""Session: one rank's model, data, weights, optimizer and engines, built from a RunConfig."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import deterministic

from interlace.config import Mode, OverlapConfig, RunConfig, modes_of, parse_rate
from interlace.cost.profile import cached, machine_id
from interlace.decompose.apply import Decompose
from interlace.decompose.choose import Request
from interlace.errors import InputError
from interlace.graphs.recompute import policy_of
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan, read
from interlace.lab import links
from interlace.parallel.context import local_positions
from interlace.parallel.data import data_layout
from interlace.parallel.meshes import REPLICATE_AXIS, SHARD_AXIS, Meshes, build_meshes
from interlace.parallel.tensor import loss_context
from interlace.rules import check, resolve_layout
from interlace.runtime.executor import Batch
from interlace.runtime.profile import profile_strands
from interlace.runtime.rival import inductor_plan
from interlace.runtime.site_times import MeasuredTimes
from interlace.runtime.strands import Strands as TracedStrands
from interlace.runtime.strands import build_strands
from interlace.search.planner import make_plan
from interlace.train.build import build_module, published_shape
from interlace.train.data import Batches, Dataset, open_dataset
from interlace.train.engines import Draws, EagerEngine, Engine, StrandEngine
from interlace.train.fully_sharded import FullyShardedEngine, sharded_twin
from interlace.train.memory import constant_bytes, memory_limits
from interlace.train.optimizer import build_optimizer, build_schedule
from interlace.train.weights import MasterWeights

PLAIN_MODES = frozenset[Mode]({"plain-1", "plain-2"})
"""Ways to run strands without `overlap.decompose`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cache_directory(name: str) -> Path:
    """`$XDG_CACHE_HOME/interlace/NAME`, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "interlace" / name


@contextmanager
def process_group(config: RunConfig) -> Iterator[dist.Store]:
    """The default process group of this job, and its store."""
    backend = "nccl" if device_type() == "cuda" else "gloo"
    if config.link.rate:
        if backend == "nccl":
            raise InputError(
                "link.rate emulates a link between CPU processes, and this machine has a GPU",
                hint="set CUDA_VISIBLE_DEVICES= to train on the CPU, or link.rate to empty",
            )
        rate = parse_rate(config.link.rate, "link.rate")
        backend = links.emulated_backend(rate, config.link.latency_us)
    if "RANK" not in os.environ:  # a single process needs no launcher
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=60))))
    dist.init_process_group(
        backend, store=dist.PrefixStore("default", store), rank=rank, world_size=world_size
    )
    try:
        yield store
    finally:
        dist.destroy_process_group()


def device_type() -> str:
    """`cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def link_label(config: RunConfig) -> str:
    """How the ranks are joined, for reports."""
    if config.link.rate:
        return links.describe(parse_rate(config.link.rate, "link.rate"), config.link.latency_us)
    lab_rate = os.environ.get("INTERLACE_LAB_RATE")
    return f"lab link {lab_rate}" if lab_rate else "real link"


@dataclass
class Session:
    """What training needs; engines share weights, graphs and gradient buffers."""

    config: RunConfig
    rank: int
    world_size: int
    device: torch.device
    meshes: Meshes
    dataset: Dataset
    weights: MasterWeights
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    strands: TracedStrands | None = None
    plain: TracedStrands | None = None
    """Graphs without decomposed collectives, where the comparison asks for them; may be `strands`
    themselves."""
    costs: CostTable | None = None
    plan: Plan | None = None
    """Of two strands, if there is one."""
    plain_costs: CostTable | None = None
    plans: dict[Mode, Plan] = field(default_factory=dict)
    engines: dict[Mode, Engine] = field(default_factory=dict)
    constants: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """What the graphs' inputs stand for, by (role, target): weights and gradient sums."""

    @property
    def constant_bytes(self) -> int:
        """What this rank holds during all of a step."""
        module, data = self.weights.module, self.weights.data
        return sum(constant_bytes(self.config, module, data).values())

    @property
    def engine(self) -> Engine:
        """The engine that the run asked for."""
        return self.engines[self.config.strands]

    def strands_of(self, mode: Mode) -> TracedStrands | None:
        """The graphs that a way to run strands works on."""
        return self.plain if mode in PLAIN_MODES else self.strands

    def costs_of(self, mode: Mode) -> CostTable | None:
        """The measured times of these graphs, if they were measured."""
        return self.plain_costs if mode in PLAIN_MODES else self.costs

    def batches(self, position: int = 0) -> Batches:
        """The micro-batches of this rank's share of the data, from that sample on."""
        return self.dataset.batches(
            self.config.train.micro_batch_size,
            position,
            shard=self.meshes.data_rank,
            num_shards=self.meshes.data_ranks,
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses of micro-batches on this rank, with the weights as they are now."""
        engine, data = self.engines.get(self.config.strands), self.weights.data
        if data is not None and data.gathers_each and isinstance(engine, StrandEngine):
            return engine.executor.evaluate(batches)
        self.weights.gather()
        module = self.weights.module.eval()
        try:
            with loss_context(self.meshes.tensor):
                return [module(*batch) for batch in batches]
        finally:
            module.train()

    def mean(self, loss: Tensor) -> float:
        """The mean over the ranks that see other tokens."""
        data = self.weights.data
        if data is None:
            return float(loss)
        total = loss.detach().clone()
        for name in (SHARD_AXIS, REPLICATE_AXIS):
            dist.all_reduce(total, group=self.meshes.weights.get_group(name))
        return float(total) / data.ranks

    def move(self, batch: tuple[Tensor, Tensor]) -> Batch:
        """What this rank sees of a batch, on its device."""
        if self.config.parallel.context > 1:
            mesh, method = self.meshes.context, self.config.parallel.context_method
            length = self.config.data.sequence_length
            own = local_positions(length, mesh.size(), mesh.get_local_rank(), method)
            batch = (batch[0][:, own], batch[1][:, own])
        tokens, targets = batch
        return tokens.to(self.device), targets.to(self.device)


def open_session(config: RunConfig) -> Session:
    """Build everything up to and including the plan. Collective; the process group exists."""
    check(config)
    config = published_shape(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = resolve_layout(config, world_size)
    _prepare_torch(config)
    device = _device()
    dataset = open_dataset(
        config.data,
        seed=config.train.seed,
        cache_dir=cache_directory("tokens"),
        divisor=config.parallel.tensor,
        vocab_size=config.model.vocab_size,
    )
    vocab_size = vocabulary(config, dataset.vocab_size)
    meshes = build_meshes(config.parallel, device.type)
    torch.manual_seed(config.train.seed)
    module = build_module(config, meshes, vocab_size, device)
    dtype, reduce_dtype = DTYPES[config.train.dtype], DTYPES[config.train.reduce_dtype]
    data = data_layout(module, config.parallel, meshes, reduce_dtype)
    twin = None
    if "eager" in modes_of(config) and data is not None and _can_fully_shard(config):
        twin = sharded_twin(module, meshes, dtype)
    weights = MasterWeights(module, dtype, data=data, meshes=meshes)
    optimizer = build_optimizer(weights.parameters, config.optimizer)
    schedule = build_schedule(optimizer, config.optimizer, config.train.steps)
    session = Session(
        config, rank, world_size, device, meshes, dataset, weights, optimizer, schedule
    )
    _build_engines(session, twin)
    return session


def vocabulary(config: RunConfig, tokens: int) -> int:
    """Rows of the embedding for a tokenizer of `tokens` tokens."""
    if config.model.vocab_size and config.model.vocab_size < tokens:
        raise InputError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's "
            f"{tokens} tokens",
            hint=f"set model.vocab_size to {tokens} or more, or to 0",
        )
    return config.model.vocab_size or tokens


def _prepare_torch(config: RunConfig) -> None:
    torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling every fresh tensor with NaN would cost a write of all activations.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _device() -> torch.device:
    if device_type() == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise InputError(
            f"local rank {index} has no GPU: this host has {torch.cuda.device_count()}",
            hint="start at most one rank per GPU",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _build_engines(session: Session, twin: nn.Module | None) -> None:
    config = session.config
    modes = modes_of(config)
    if "eager" in modes:
        session.engines["eager"] = _eager_engine(session, twin)
    if modes == {"eager"}:
        return
    example = session.move(next(session.batches()))
    data = session.weights.data
    session.strands = _strands(session, example, decompose_of(config.overlap, session.device))
    if session.strands.not_repeated and session.rank == 0:
        print(f"all layers are traced: {session.strands.not_repeated}", file=sys.stderr)
    if modes & PLAIN_MODES:
        decomposed = session.strands.listing is not None
        session.plain = _strands(session, example, None) if decomposed else session.strands
    session.constants = {**session.weights.constants(), **session.weights.buffers()}
    if (
        data is not None
        and data.gathers_each
        and not isinstance(session.engines.get("eager"), EagerEngine)
    ):
        session.weights.drop_whole()
    engines: dict[tuple[str, str], StrandEngine] = {}
    for mode in sorted(modes - {"eager"}):
        plan = _plan(session, mode, example)
        strands = session.strands_of(mode)
        assert strands is not None
        key = (strands.digest, plan.digest)
        if key not in engines:
            engines[key] = StrandEngine(
                session.weights, strands, plan, session.constants, _draws(session)
            )
        session.plans[mode] = plan
        session.engines[mode] = engines[key]
    session.plan = session.plans.get("2")


def _strands(session: Session, example: Batch, decompose: Decompose | None) -> TracedStrands:
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
        )


def decompose_of(overlap: OverlapConfig, device: torch.device) -> Decompose | None:
    """What `[overlap]` asks for, with times measured on this machine."""
    if overlap.decompose == "off":
        return None
    request = Request(variant=overlap.decompose, pieces=overlap.pieces)
    return Decompose(request=request, times=MeasuredTimes(device))


def _draws(session: Session) -> Draws:
    meshes = session.meshes
    data_rank = meshes.data_rank * meshes.context.size() + meshes.context.get_local_rank()
    return Draws(
        seed=session.config.train.seed,
        data_rank=data_rank,
        tensor_rank=meshes.tensor.get_local_rank(),
    )


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


def _plan(session: Session, mode: Mode, example: Batch) -> Plan:
    """The plan of a way to run strands."""
    config, strands = session.config, session.strands_of(mode)
    assert strands is not None
    if mode in ("1", "plain-1"):
        return strands.sequential
    if mode == "2" and config.plan.file:
        return _read_plan(config.plan.file, strands)
    costs = _costs(session, strands, example)
    if mode == "inductor":
        return inductor_plan(strands, costs)
    search = config.plan.search if mode in ("2", "plain-2") else mode
    for plan in session.plans.values():
        if (plan.search, plan.cost_digest) == (search, costs.digest):
            return plan
    limits = memory_limits(config, session.weights.module, session.weights.data)
    return make_plan(strands.op_graphs, costs, search, limits=limits)


def _costs(session: Session, strands: TracedStrands, example: Batch) -> CostTable:
    """Measured when they are first asked for."""
    if strands is session.strands:
        if session.costs is None:
            session.costs = _measured_costs(session, strands, example)
        if session.plain is strands:
            session.plain_costs = session.costs
        return session.costs
    if session.plain_costs is None:
        session.plain_costs = _measured_costs(session, strands, example)
    return session.plain_costs


def _read_plan(file: str, strands: TracedStrands) -> Plan:
    plan = read(Path(file))
    if plan.graph_digest != strands.digest:
        raise InputError(
            f"plan.file = {file!r} was made for graph {plan.graph_digest}, and this run has "
            f"graph {strands.digest}",
            hint="plan again for this model, layout and micro-batch size",
        )
    return plan


def _measured_costs(session: Session, strands: TracedStrands, example: Batch) -> CostTable:
    config, device = session.config, session.device.type
    machine = machine_id(device, link_label(config))
    return cached(
        cache_directory("costs") if config.plan.cache else None,
        machine,
        strands.digest,
        lambda: profile_strands(
            strands,
            example,
            device,
            session.constants,
            repeats=config.plan.profile_repeats,
            machine=machine,
        ),
    )
