"""Dropout whose masks depend on numbers, not on what ran before.

PyTorch's dropout draws from one generator per device, so that a mask depends on the order of all
operators. Here each dropout gets its number in the graph, and draws from a generator of its own,
seeded by that number and by the micro-batch's seeds. So any order, and any recomputation, gives the
same mask.

Seeds are an int64 tensor [2] on the CPU that comes behind the batch's own tensors: one seed that
tensor-parallel ranks share, for activations that are equal on them, and one of the rank's own, for
activations of which each holds a part.
"""

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from interlace.errors import InputError
from interlace.graphs.collectives import ISSUE, group_of, is_collective
from interlace.graphs.module_paths import module_path
from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph
from interlace.ir.graph import Kind

aten = torch.ops.aten
OFF = -1
"""A seed with which nothing is dropped, for evaluation."""


def seeds_for(
    seed: int, *, step: int, micro_batch: int, data_rank: int = 0, tensor_rank: int = 0
) -> Tensor:
    """The seeds of one micro-batch on one rank. `data_rank` numbers the ranks that see other
    tokens (data and context parallel), `tensor_rank` those that share them."""
    shared = _mix(seed, step, micro_batch, data_rank)
    return torch.tensor([shared, _mix(shared, tensor_rank)], dtype=torch.int64)


def no_dropout() -> Tensor:
    """Seeds with which nothing is dropped."""
    return torch.full((2,), OFF, dtype=torch.int64)


def _mix(*numbers: int) -> int:
    """A hash of 63 bits: seeds of neighbouring numbers share nothing."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@torch.library.custom_op("interlace::dropout", mutates_args=())
def dropout(
    x: Tensor, seeds: Tensor, number: int, own: bool, probability: float
) -> tuple[Tensor, Tensor]:
    """(x with a share of its elements set to 0 and the others scaled up, mask of those that stay),
    as `aten.native_dropout` does. `own` takes the rank's own seed."""
    seed = int(seeds[int(own)])
    if seed == OFF:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    generator = torch.Generator(x.device).manual_seed(_mix(seed, number))
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - probability, generator=generator)
    return x.mul(mask).mul_(1 / (1 - probability)), mask


@dropout.register_fake
def _(
    x: Tensor, seeds: Tensor, number: int, own: bool, probability: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def takes_seeds(forward: StrandGraph) -> bool:
    """Whether a forward takes seeds behind its batch."""
    return any(n.target == torch.ops.interlace.dropout.default for n in forward.graph.nodes)


def fix_dropout(
    chunk: ChunkGraphs, *, batch_inputs: int, tensor_groups: Collection[str] = ()
) -> ChunkGraphs:
    """`chunk` with numbered dropout; one without dropout is left as it is. Changes its graphs.

    The seeds are batch input number `batch_inputs`. `tensor_groups` names the process groups of
    tensor-parallel ranks. Raises InputError for other operators that draw random numbers.
    """
    random = [node for node in _calls(chunk) if _draws(node)]
    for node in random:
        if node.target != aten.native_dropout.default:
            raise InputError(
                f"{node.target} in {module_path(node) or 'the model'} draws random numbers in a "
                "way that cannot be repeated",
                hint="use dropout outside of fused attention only (attention_dropout = 0), or "
                "strands = eager",
            )
    if not random:
        return chunk
    graph, forward = chunk.forward.graph, chunk.forward
    parts = _split_over(chunk, frozenset(tensor_groups))
    seeds = _seeds_input(graph, random[0])
    forward.bindings[seeds.name] = Binding("batch", str(batch_inputs))
    for number, node in enumerate(random):
        x, probability, _ = node.args
        node.target = torch.ops.interlace.dropout.default
        node.args = (x, seeds, number, x in parts, probability)
    forward.module.recompile()
    return chunk


def _calls(chunk: ChunkGraphs) -> list[fx.Node]:
    return [node for node in chunk.forward.graph.nodes if node.op == "call_function"]


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention does so only for dropout of its own."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0)
    return bool(given)


def _seeds_input(graph: fx.Graph, like: fx.Node) -> fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        seeds = graph.placeholder("seeds")
    with like.args[0].meta["val"].fake_mode:  # type: ignore[union-attr]
        seeds.meta["val"] = torch.empty(2, dtype=torch.int64, device="cpu")
    return seeds


def _split_over(chunk: ChunkGraphs, groups: frozenset[str]) -> set[fx.Node]:
    """Nodes of the forward of whose values each tensor-parallel rank holds another part.

    It begins with split weights, and with scattered sums; gathering and summing up ends it.
    """
    found: set[fx.Node] = set()
    for node in chunk.forward.graph.nodes:
        if node.op == "placeholder":
            if _is_split_weight(chunk, chunk.forward.bindings[node.name]):
                found.add(node)
        elif is_collective(node) and group_of(node) in groups:
            _, kind = ISSUE[node.target]  # type: ignore[index]
            if kind not in (Kind.ALL_GATHER, Kind.ALL_REDUCE):
                found.add(node)
        elif not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_split_weight(chunk: ChunkGraphs, binding: Binding) -> bool:
    layout = chunk.placements.get(binding.target) if binding.role == "parameter" else None
    return any(isinstance(placement, Shard) for placement in layout or ())
