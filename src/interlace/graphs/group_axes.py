"""Which mesh axis each process group of a trace belongs to.

A group is found by its name, and otherwise by its ranks: torch gives a second, equal mesh groups of
new names, and a module keeps those of the mesh on which it was laid out.
"""

from collections.abc import Collection, Mapping

from torch import Tensor, fx

from interlace.errors import InputError
from interlace.graphs.collectives import group_of, is_collective, kind_of_collective, on_gloo
from interlace.graphs.spread import GlobalRanks, ranks_of
from interlace.graphs.torch_private import process_group
from interlace.ir.graph import Kind


def axes_of_groups(
    graphs: Collection[fx.Graph], axis_of_group: Mapping[str, str], others: Collection[str] = ()
) -> dict[str, str]:
    """`axis_of_group`, with the groups of all collectives of these graphs, and the groups `others`
    of weights. Raises InputError for one whose ranks are those of no axis."""
    found = dict(axis_of_group)
    by_ranks: dict[GlobalRanks, str] = {}
    nodes = [node for graph in graphs for node in graph.nodes if is_collective(node)]
    for node in nodes:
        _refuse_gloo_on_device(node)
    used = [(group_of(node), str(kind_of_collective(node.target, node.args))) for node in nodes]
    for group, what in (*used, *((each, "weights of fully_shard") for each in others)):
        if group in found:
            continue
        if not by_ranks:
            for name, axis in axis_of_group.items():
                by_ranks.setdefault(ranks_of(name), axis)
        if (ranks := ranks_of(group)) not in by_ranks:
            raise _on_no_axis(what, ranks, by_ranks)
        found[group] = by_ranks[ranks]
    return found


def _refuse_gloo_on_device(node: fx.Node) -> None:
    """Only sums are safe: torch 2.11 takes device memory for the host's in an all-gather over gloo,
    and the process ends in a segmentation fault."""
    value, kind = node.meta.get("val"), kind_of_collective(node.target, node.args)
    if not isinstance(value, Tensor) or value.device.type != "cuda" or kind is Kind.ALL_REDUCE:
        return
    if on_gloo("cuda", process_group(group_of(node))):
        raise InputError(
            f"gloo is to send what is in the memory of a GPU ({kind})",
            hint='init_process_group("cpu:gloo,cuda:nccl") takes NCCL for that',
        )


def _on_no_axis(kind: str, ranks: GlobalRanks, by_ranks: Mapping[GlobalRanks, str]) -> InputError:
    what = f"the module exchanges values between ranks {_listed(ranks)} ({kind}), "
    if not by_ranks:
        return InputError(
            f"{what}and no mesh is given",
            hint="give compile_step(mesh=...) the mesh on which the module was laid out",
        )
    axes = ", ".join(f"{axis} of ranks {_listed(on_it)}" for on_it, axis in by_ranks.items())
    return InputError(
        f"{what}which are those of no axis of the mesh: {axes}",
        hint="give compile_step(mesh=...) a mesh with all axes over which the module was laid out",
    )


def _listed(ranks: GlobalRanks) -> str:
    return ", ".join(map(str, ranks))
