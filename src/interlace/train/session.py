"""Session: one rank's model, data, weights, optimizer and engines, built from a RunConfig."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import deterministic

from interlace.config import Mode, RunConfig, check, check_world, modes_of, parse_rate
from interlace.cost.profile import cached, machine_id
from interlace.errors import InputError
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan, read
from interlace.lab import links
from interlace.models import model_file
from interlace.models.loss import NextTokenLoss
from interlace.parallel.meshes import axis_of_group, build_mesh
from interlace.parallel.tensor import apply_tensor_parallel, loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.profile import profile_strands
from interlace.runtime.rival import inductor_plan
from interlace.runtime.strands import Strands as TracedStrands
from interlace.runtime.strands import build_strands
from interlace.search.planner import make_plan
from interlace.train.data import Dataset, open_dataset
from interlace.train.engines import EagerEngine, Engine, StrandEngine
from interlace.train.memory import memory_limits
from interlace.train.optimizer import build_optimizer, build_schedule
from interlace.train.weights import MasterWeights

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
    mesh: DeviceMesh
    dataset: Dataset
    weights: MasterWeights
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    strands: TracedStrands | None = None
    costs: CostTable | None = None
    plan: Plan | None = None
    """Of two strands, if there is one."""
    plans: dict[Mode, Plan] = field(default_factory=dict)
    engines: dict[Mode, Engine] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The engine that the run asked for."""
        return self.engines[self.config.strands]

    def move(self, batch: tuple[Tensor, Tensor]) -> Batch:
        """A batch on this rank's device."""
        tokens, targets = batch
        return tokens.to(self.device), targets.to(self.device)


def open_session(config: RunConfig) -> Session:
    """Build everything up to and including the plan. Collective; the process group exists."""
    check(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_world(config, world_size)
    _prepare_torch(config)
    device = _device()
    dataset = open_dataset(
        config.data,
        seed=config.train.seed,
        cache_dir=cache_directory("tokens"),
        divisor=config.parallel.tensor,
    )
    vocab_size = vocabulary(config, dataset.vocab_size)
    mesh = build_mesh(config.parallel, device.type)
    files = model_file(config.model.architecture)
    torch.manual_seed(config.train.seed)
    model = files.build(config.model, vocab_size, config.data.sequence_length).to(device)
    apply_tensor_parallel(model, mesh, files.TENSOR_PLAN)
    weights = MasterWeights(NextTokenLoss(model), DTYPES[config.train.dtype])
    optimizer = build_optimizer(weights.parameters, config.optimizer)
    schedule = build_schedule(optimizer, config.optimizer, config.train.steps)
    session = Session(config, rank, world_size, device, mesh, dataset, weights, optimizer, schedule)
    _build_engines(session)
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


def _build_engines(session: Session) -> None:
    config = session.config
    modes = modes_of(config)
    if "eager" in modes:
        session.engines["eager"] = EagerEngine(session.weights, session.mesh)
    if modes == {"eager"}:
        return
    example = session.move(next(session.dataset.batches(config.train.micro_batch_size)))
    with loss_context(session.mesh):
        session.strands = build_strands(
            session.weights.module, example, axis_of_group(session.mesh)
        )
    buffers = session.weights.buffers()
    engines: dict[str, StrandEngine] = {}
    for mode in sorted(modes - {"eager"}):
        plan = _plan(session, mode, example)
        if plan.digest not in engines:
            engines[plan.digest] = StrandEngine(session.weights, session.strands, plan, buffers)
        session.plans[mode] = plan
        session.engines[mode] = engines[plan.digest]
    session.plan = session.plans.get("2")


def _plan(session: Session, mode: Mode, example: Batch) -> Plan:
    """The plan of a way to run strands."""
    config, strands = session.config, session.strands
    assert strands is not None
    if mode == "1":
        return strands.sequential
    if mode == "2" and config.plan.file:
        return _read_plan(config.plan.file, strands)
    if session.costs is None:
        session.costs = _measured_costs(config, strands, example, session.device.type)
    if mode == "inductor":
        return inductor_plan(strands, session.costs)
    search = config.plan.search if mode == "2" else mode
    for plan in session.plans.values():
        if (plan.search, plan.cost_digest) == (search, session.costs.digest):
            return plan
    limits = memory_limits(config, session.weights.module)
    return make_plan(strands.op_graphs, session.costs, search, limits=limits)


def _read_plan(file: str, strands: TracedStrands) -> Plan:
    plan = read(Path(file))
    if plan.graph_digest != strands.digest:
        raise InputError(
            f"plan.file = {file!r} was made for graph {plan.graph_digest}, and this run has "
            f"graph {strands.digest}",
            hint="plan again for this model, layout and micro-batch size",
        )
    return plan


def _measured_costs(
    config: RunConfig, strands: TracedStrands, example: Batch, device: str
) -> CostTable:
    machine = machine_id(device, link_label(config))
    repeats = config.plan.profile_repeats
    return cached(
        cache_directory("costs") if config.plan.cache else None,
        machine,
        strands.digest,
        lambda: profile_strands(strands, example, device, repeats=repeats, machine=machine),
    )
