"""Which values the backward computes again instead of keeping them.

    none       nothing is computed again
    attention  attention, and what leads from its projections to it and from it to the next matmul
    layer      everything inside a block; its input is kept, and what its ranks summed up
    budget     what costs least (PyTorch's min-cut partitioner) so that one micro-batch keeps no
               more than a number of bytes; what `layer` keeps of blocks is always kept

Sums over ranks (reduce-scatter, all-reduce) are never made again: their result is as small as a
block's input, and without them a backward has fewer collectives to hide. All-gathers are: kept,
each would take as many bytes as the inputs of all ranks. `layer` keeps what is outside of the
blocks (embedding, head, loss). Which experts a token goes to is kept in every mode: a few numbers a
token, without which a backward would have to count again, and a tie that falls the other way would
disagree with the rows that were kept.
"""

from dataclasses import dataclass

import torch
from torch import fx

from interlace.config import Recompute, TrainConfig
from interlace.errors import InputError
from interlace.experts.between_ranks import COUNTS
from interlace.experts.merged_sends import SENDS
from interlace.experts.rows_by_expert import ORDER
from interlace.graphs.budget import MIB, solve_budget
from interlace.graphs.collectives import is_collective, is_wait
from interlace.graphs.module_paths import blocks_of, is_sum, kind_of
from interlace.graphs.remake import kept_bytes, looked_at, remake
from interlace.graphs.trace import ChunkGraphs
from interlace.ir.graph import Kind

aten = torch.ops.aten
_HEAVY = frozenset({Kind.MATMUL, Kind.EMBEDDING, Kind.ATTENTION})
"""Kinds that are not computed again with the attention beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePolicy:
    """What to compute again."""

    mode: Recompute = "none"
    budget_bytes: int = 0
    """With `budget`: what one micro-batch may keep for its backward."""


KEEP_ALL = RecomputePolicy()
"""The policy that computes nothing again."""


def policy_of(train: TrainConfig) -> RecomputePolicy:
    """The policy that a run file asks for."""
    return RecomputePolicy(mode=train.recompute, budget_bytes=int(train.recompute_mib * MIB))


def with_recompute(chunk: ChunkGraphs, policy: RecomputePolicy) -> ChunkGraphs:
    """`chunk` with the backward that `policy` asks for. Changes its graphs.

    Raises InputError if the model has no blocks or no attention, or if a budget is too small.
    """
    if policy.mode == "none":
        return chunk
    routing = routing_nodes(chunk.forward.graph)
    if policy.mode == "attention":
        inside = attention_nodes(chunk.forward.graph) - routing
        return remake(chunk, inside.__contains__)
    inside = block_nodes(chunk) - routing
    if policy.mode == "layer" or kept_bytes(chunk) <= policy.budget_bytes:
        return remake(chunk, inside.__contains__) if policy.mode == "layer" else chunk
    return remake(chunk, solve_budget(chunk, inside, policy.budget_bytes).__contains__)


def block_nodes(chunk: ChunkGraphs) -> set[fx.Node]:
    """Nodes of the forward that `layer` computes again: those in a block whose value no other
    block reads, but for sums over ranks."""
    graph = chunk.forward.graph
    block = blocks_of(graph)
    inside = {node for node in block if not is_sum(node)}
    for node, name in block.items():
        if any(block.get(user) != name for user in node.users if user.op != "output"):
            inside.discard(looked_at(node))
    return inside


def routing_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Which experts tokens go to, in which order their rows stand, and how many there are."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in (ORDER, SENDS):
            found |= {node, node.all_input_nodes[0], *node.users}
        elif node.target == COUNTS:
            found.add(node)
    return found


def attention_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Attention operators, what only they read up to the projections before them, and what is
    made of their results alone up to the projection behind them.

    No collective is among them. Raises InputError when there is no attention.
    """
    region = _attention_cores(graph)
    if not region:
        raise InputError(
            "train.recompute = 'attention' found no attention in the model",
            hint="set train.recompute to layer or none",
        )
    nodes = [node for node in graph.nodes if node.op == "call_function" and not _is_heavy(node)]
    for node in reversed(nodes):
        readers = [user for user in node.users if user.op != "output"]
        if readers and region.issuperset(readers):
            region.add(node)
    for node in nodes:
        made_of = [n for n in node.all_input_nodes if n.op == "call_function"]
        if made_of and region.issuperset(made_of):
            region.add(node)
    return region


def _is_heavy(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node) or kind_of(node) in _HEAVY


def _attention_cores(graph: fx.Graph) -> set[fx.Node]:
    """Attention kernels, and softmax with the two batched matmuls around it."""
    cores: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if kind_of(node) is Kind.ATTENTION:
            cores.add(node)
        elif node.target in (aten._softmax.default, aten._safe_softmax.default):
            before, behind = _batched(node, before=True), _batched(node, before=False)
            if before is not None and behind is not None:
                cores |= {before, node, behind}
    return cores


def _batched(softmax: fx.Node, *, before: bool) -> fx.Node | None:
    """The batched matmul from which a softmax comes, or to which it goes."""
    stack, seen = [softmax], set()
    while stack:
        node = stack.pop()
        for other in node.all_input_nodes if before else node.users:
            if other.target in (aten.bmm.default, aten.baddbmm.default):
                return other
            if other.op == "call_function" and other not in seen and not _is_heavy(other):
                seen.add(other)
                stack.append(other)
    return None
