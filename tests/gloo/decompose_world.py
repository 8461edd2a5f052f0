"""What the tests of decomposed graphs run inside a rank: small models in float64 or float32, their
graphs decomposed in some way, and steps of them in any plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interlace.config import ModelConfig, ParallelConfig, Recompute
from interlace.decompose.choose import Request, SiteTimes, SliceTimes, Way
from interlace.decompose.rewrite.apply import Decompose, decompose_chunk
from interlace.decompose.sites import Site
from interlace.graphs.recompute import RecomputePolicy, with_recompute
from interlace.graphs.torch_private import init_fake_world
from interlace.graphs.trace import ChunkGraphs, StrandGraph, trace_chunk
from interlace.ir.plan import Plan
from interlace.models import model_file
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import Meshes, build_meshes
from interlace.parallel.tensor import apply_tensor_parallel, loss_context
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import Strands, share
from interlace.search.memory import Alive, Liveness
from interlace.train.built_model import NextTokenLoss

VOCABULARY, SEQUENCE, MICRO_BATCHES = 64, 24, 3


def even_times(strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
    """Times at which every site gains by being decomposed, the more the more pieces it has."""
    assert strand.name == site.strand
    slices = {way: SliceTimes(compute_ns=100 // way[1], send_ns=80 // way[1]) for way in ways}
    return SiteTimes(plain_ns=site.ranks * 180, slices=slices)


def asked(variant: str, pieces: int = 1) -> Decompose:
    """A request with times that are the same everywhere."""
    return Decompose(request=Request(variant=variant, pieces=pieces), times=even_times)


@dataclass
class Model:
    """A laid-out module on this rank."""

    module: nn.Module
    meshes: Meshes
    dtype: torch.dtype

    @cached_property
    def traced(self) -> ChunkGraphs:
        """Its graphs as they were traced, which takes seconds."""
        with loss_context(self.meshes.tensor):
            return trace_chunk(self.module, batches()[0])

    def strands(self, decompose: Decompose | None, recompute: Recompute = "none") -> Strands:
        """What `build_strands` makes, of a copy of the traced graphs."""
        chunk = replace(
            self.traced, forward=copied(self.traced.forward), backward=copied(self.traced.backward)
        )
        chunk = with_recompute(chunk, RecomputePolicy(mode=recompute))
        axes, listing = self.meshes.axis_of_group, None
        if decompose is not None:
            chunk, listing = decompose_chunk(chunk, axes, decompose)
        return replace(share(self.module, chunk, axes, None, self.dtype), listing=listing)

    def step(self, strands: Strands, plan: Plan | None = None) -> dict[str, Tensor]:
        """Losses and gradient sums of one step, by name; without a plan in one strand."""
        constants = self.constants(strands)
        losses = strands.executor(plan or strands.sequential, constants).step(batches())
        sums = {name: value for (role, name), value in constants.items() if role == "gradient"}
        return {f"loss {i}": loss for i, loss in enumerate(losses)} | sums

    def constants(self, strands: Strands) -> dict[tuple[str, str], Tensor]:
        """Parameters, and gradient sums of zero."""
        parameters = {name: local(p) for name, p in self.module.named_parameters()}
        sums = {name: torch.zeros_like(parameters[name]) for name in strands.parameters}
        constants = {("parameter", name): value for name, value in parameters.items()}
        return constants | {("gradient", name): value for name, value in sums.items()}


def copied(strand: StrandGraph) -> StrandGraph:
    """The same graph once more."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(strand.graph, {}))
    module = fx.GraphModule(strand.module, graph)
    return StrandGraph(strand.name, module, dict(strand.bindings))


def build_llama(dtype: torch.dtype, ranks: int, **shape: Any) -> Model:
    """A small Llama of this package, tensor and sequence parallel."""
    return _build("llama", dtype, ranks, shape)


def imagined_llama() -> Iterator[Model]:
    """One of two imagined ranks; what they send arrives at once and holds anything."""
    init_fake_world(2)
    try:
        yield build_llama(torch.float64, 2, layers=1)
    finally:
        dist.destroy_process_group()


def build_gpt(dtype: torch.dtype, ranks: int) -> Model:
    """A small GPT: linear layers with biases."""
    return _build("gpt", dtype, ranks, {})


def _build(architecture: str, dtype: torch.dtype, ranks: int, shape: dict[str, Any]) -> Model:
    torch.manual_seed(5)
    config = ModelConfig(
        **{
            "architecture": architecture, "layers": 2, "width": 32, "heads": 4, "kv_heads": 4,
            "ffn_width": 64, **shape,
        }
    )  # fmt: skip
    file = model_file(architecture)
    meshes = build_meshes(ParallelConfig(tensor=ranks), "cpu")
    module = file.build(config, VOCABULARY, SEQUENCE).to(dtype)
    apply_tensor_parallel(module, meshes.tensor, file.TENSOR_PLAN)
    return Model(NextTokenLoss(module), meshes, dtype)


def build_hugging_face(folder: str, dtype: torch.dtype, ranks: int) -> Model:
    """The unmodified model of a folder with config.json, by its published plan."""
    from interlace.models.transformers_model import TransformersLoss, build
    from interlace.parallel.plans import apply_published_plan

    torch.manual_seed(5)
    meshes = build_meshes(ParallelConfig(tensor=ranks), "cpu")
    module = build(folder, vocab_size=VOCABULARY, sequence_length=SEQUENCE).to(dtype)
    apply_published_plan(module, meshes.tensor)
    return Model(TransformersLoss(module), meshes, dtype)


def batches() -> list[Batch]:
    """The micro-batches of a step: two samples each."""
    draw = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2, SEQUENCE + 1), generator=draw)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in text]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.found: list[int] = []
        """After each of the matmuls that write to memory that they are given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if func is torch.ops.aten.mm.out:
            self.found.append(sum(size for _, size in self.alive.values()))
        return result


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def live_bytes(model: Model, strands: Strands) -> list[tuple[int, int]]:
    """(counted, real) bytes alive at each matmul that writes to a buffer, forward and backward."""
    executor = strands.executor(strands.sequential, model.constants(strands))
    batch = batches()[:1]
    with LiveBytes() as live:
        executor.step(batch)
    counted = []
    for graph in (strands.op_graphs["forward"], strands.op_graphs["backward"]):
        alive = Alive(Liveness(graph))
        for number, op in enumerate(graph.operators):
            during = alive.issue(number)
            if op.target == "aten.mm.out":
                counted.append(during)
    return list(zip(counted, live.found, strict=True))


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any element, relative to the largest of its tensor. Tensors that
    hold rounding errors only (gradients of key biases are 0) count relative to the largest of all.
    """
    assert ours.keys() == theirs.keys()
    size = {name: float(value.abs().max()) for name, value in theirs.items()}
    largest = max(size.values())
    return max(
        float((ours[name] - theirs[name]).abs().max())
        / (size[name] if size[name] > 1e-12 * largest else largest)
        for name in ours
    )
