"""Over which ranks the values of a strand differ.

Weights that are cut over ranks make every value that is computed from them differ over those ranks,
and so do sums that are scattered and values that are exchanged. Gathering and summing up makes
values equal again. Groups are tuples of ranks: what an axis of a mesh is called plays no part, and
one axis may have process groups of several names.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate

from interlace.graphs.collectives import group_of, is_collective, known_row
from interlace.graphs.torch_private import process_group
from interlace.graphs.trace import StrandGraph
from interlace.ir.graph import Kind

GlobalRanks = tuple[int, ...]
Spread = frozenset[GlobalRanks]

UNCLEAR: GlobalRanks = ()
"""Stands for ranks among which values may be equal or not: what was cut over a group was made equal
over a part of that group."""


def spread_of(
    strand: StrandGraph,
    tensors: Mapping[str, Tensor],
    *,
    saved: Mapping[str, Spread] = MappingProxyType({}),
    unlike: Collection[fx.Node] = (),
) -> dict[fx.Node, Spread]:
    """The groups over which each value of a forward or a backward differs. `tensors` are the
    parameters and buffers of the module, by name; what is no DTensor is taken to be equal on all
    ranks. `saved` says the same of what a forward kept, and `unlike` are operators that differ from
    rank to rank."""
    found: dict[fx.Node, Spread] = {}
    for node in strand.graph.nodes:
        if node in unlike:
            found[node] = frozenset({UNCLEAR})
            continue
        if node.op == "placeholder":
            binding = strand.bindings[node.name]
            if binding.role in ("parameter", "buffer"):
                found[node] = _of_tensor(tensors.get(binding.target))
            else:
                found[node] = saved.get(binding.target, frozenset())
            continue
        spread = frozenset[GlobalRanks]().union(*(found[source] for source in node.all_input_nodes))
        if is_collective(node):
            spread = _behind(node, spread, ranks_of(group_of(node)))
        found[node] = spread
    return found


def part_of(spread: Spread, rank: int) -> int:
    """Which part of a value a rank holds: a number of its own for each of the ranks among which the
    value differs, equal for those with equal values. -1 if all have the same value."""
    if not spread:
        return -1
    part = 0
    for ranks in sorted(spread):
        part = part * len(ranks) + ranks.index(rank)
    return part


def ranks_of(group_name: str) -> GlobalRanks:
    """The global ranks of a process group."""
    return tuple(dist.get_process_group_ranks(process_group(group_name)))


def _of_tensor(tensor: Tensor | None) -> Spread:
    if not isinstance(tensor, DTensor):
        return frozenset()
    mesh = tensor.device_mesh
    return frozenset(
        ranks_of(mesh.get_group(axis).group_name)
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )


def _behind(collective: fx.Node, spread: Spread, ranks: GlobalRanks) -> Spread:
    """How the result of a collective over `ranks` differs, whose input differs as `spread` says."""
    if len(ranks) == 1:
        return spread
    if known_row(collective.target).kind not in (Kind.ALL_GATHER, Kind.ALL_REDUCE):
        return spread | {ranks}
    inside = set(ranks)
    left = {group for group in spread if not inside.issuperset(group)}
    unclear = {UNCLEAR for group in left if inside.issubset(group)}
    return frozenset(left | unclear)
