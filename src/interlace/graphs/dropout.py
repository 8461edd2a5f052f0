"""Dropout whose masks depend on numbers, not on what ran before.

PyTorch's dropout draws from one generator per device, so that a mask depends on the order of all
operators. Here each dropout gets its number in the graph, and draws from a generator of its own,
seeded by that number and by the micro-batch's seeds. So any order, and any recomputation, gives the
same mask.

The seed is an int64 tensor [1] on the CPU that comes behind the batch's own tensors. Ranks that
see the same data have the same one, so activations that are equal on them get equal masks. Where
each rank holds a part of an activation (`graphs.spread`), the number of the part is mixed in.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from interlace.errors import InputError
from interlace.experts.between_ranks import EXCHANGE
from interlace.graphs.collectives import group_of
from interlace.graphs.module_paths import module_path
from interlace.graphs.random_draws import can_be_seeded, draw_by_number, draws_values, hint_for
from interlace.graphs.spread import UNCLEAR, GlobalRanks, Spread, part_of, ranks_of, spread_of
from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph

aten = torch.ops.aten
OFF = -1
"""A seed with which nothing is dropped, for evaluation."""


def seeds_for(seed: int, *, step: int, micro_batch: int, data_rank: int = 0) -> Tensor:
    """The seed of one micro-batch on one rank. `data_rank` numbers the ranks that see other
    data (data and context parallel)."""
    return torch.tensor([_mix(seed, step, micro_batch, data_rank)], dtype=torch.int64)


def no_dropout() -> Tensor:
    """The seed with which nothing is dropped."""
    return torch.full((1,), OFF, dtype=torch.int64)


def _mix(*numbers: int) -> int:
    """A hash of 63 bits: seeds of neighbouring numbers share nothing."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@torch.library.custom_op("interlace::dropout", mutates_args=())
def dropout(
    x: Tensor, seeds: Tensor, number: int, part: int, probability: float
) -> tuple[Tensor, Tensor]:
    """(x with a share of its elements set to 0 and the others scaled up, mask of those that stay),
    as `aten.native_dropout` does. `part` says which part of a value `x` is; -1: the whole."""
    seed = int(seeds[0])
    if seed == OFF:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if part >= 0:
        seed = _mix(seed, part)
    generator = torch.Generator(x.device).manual_seed(_mix(seed, number))
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - probability, generator=generator)
    return x.mul(mask).mul_(1 / (1 - probability)), mask


@dropout.register_fake
def _(
    x: Tensor, seeds: Tensor, number: int, part: int, probability: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def takes_seeds(forward: StrandGraph) -> bool:
    """Whether a forward takes seeds behind its batch."""
    drops = any(n.target == torch.ops.interlace.dropout.default for n in forward.graph.nodes)
    return drops or draws_values(forward.graph)


def fix_dropout(
    chunk: ChunkGraphs,
    *,
    batch_inputs: int,
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> ChunkGraphs:
    """`chunk` with numbered dropout, and other random numbers drawn by number; one that draws
    nothing is left as it is. Changes its graphs.

    The seed is batch input number `batch_inputs`. `tensors` are the parameters and buffers of the
    module by name, whose layouts say of which values each rank holds a part. Raises InputError for
    other operators that draw random numbers.
    """
    random = [node for node in _calls(chunk) if _draws(node)]
    for node in random:
        if node.target != aten.native_dropout.default and not can_be_seeded(node):
            raise InputError(
                f"{node.target} in {module_path(node) or 'the model'} draws random numbers in a "
                "way that cannot be repeated",
                hint=hint_for(node),
            )
    if not random:
        return chunk
    graph, forward = chunk.forward.graph, chunk.forward
    spread = spread_of(forward, tensors)
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Ranks that deal experts to each other see other samples, and need other numbers anyway.
    dealt = {ranks_of(group_of(n)) for n in _calls(chunk) if n.target == EXCHANGE}
    parts = frozenset[GlobalRanks]().union(*spread.values()) - dealt
    seeds = _seeds_input(graph, random[0])
    forward.bindings[seeds.name] = Binding("batch", str(batch_inputs))
    for number, node in enumerate(random):
        if node.target != aten.native_dropout.default:
            _refuse_parts(node, parts)
            draw_by_number(node, seeds, _mix(number))
            continue
        x, probability, _ = node.args
        assert isinstance(x, fx.Node)
        if UNCLEAR in spread[x]:
            raise InputError(
                f"dropout in {module_path(node) or 'the model'} works on values that were cut over "
                "several axes and gathered over some of them: which ranks hold equal ones, and so "
                "need equal masks, is not known",
                hint="gather over one axis at a time, or set dropout to 0 there",
            )
        node.target = torch.ops.interlace.dropout.default
        node.args = (x, seeds, number, part_of(spread[x], rank), probability)
    forward.module.recompile()
    return chunk


def _refuse_parts(node: fx.Node, parts: Spread) -> None:
    """Raise InputError where ranks may hold parts of what is drawn: from its size alone nobody can
    say whether they need equal numbers."""
    if parts:
        raise InputError(
            f"{node.target} in {module_path(node) or 'the model'} draws random numbers, and ranks "
            "hold parts of weights: whether they need equal numbers is not known",
            hint="draw them outside, as one more tensor of each batch",
        )


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
    value: Any = like.meta["val"]
    with (value if isinstance(value, Tensor) else value[0]).fake_mode:  # type: ignore[union-attr]
        seeds.meta["val"] = torch.empty(1, dtype=torch.int64, device="cpu")
    return seeds
