"""What to keep within a number of bytes, by PyTorch's min-cut partitioner.

It works on forward and backward in one graph, and takes a share (1: everything that its own
heuristics keep, 0: nothing), not bytes. So the two graphs are joined, and the share is searched.
"""

from collections.abc import Collection

from torch import fx

from interlace.errors import InputError
from interlace.graphs.collectives import is_collective
from interlace.graphs.module_paths import is_sum
from interlace.graphs.remake import kept_bytes, looked_at, saved_values
from interlace.graphs.torch_private import min_cut_saved
from interlace.graphs.trace import Binding, ChunkGraphs

MIB = 1 << 20
"""Bytes of a MiB."""
_STEPS = 6
"""How often what is left of the range of shares is halved; a choice."""


def solve_budget(
    chunk: ChunkGraphs, inside: Collection[fx.Node], budget_bytes: int
) -> frozenset[fx.Node]:
    """Nodes of the forward that are computed again so that at most `budget_bytes` are kept.

    `inside` are the nodes of blocks but for what is always kept, such as their inputs: computed
    again, all of the forward would be alive at the start of the backward. Raises InputError with
    the least number of bytes if the budget is smaller.
    """
    least = kept_bytes(chunk, inside.__contains__)
    if least > budget_bytes:
        raise InputError(
            f"train.recompute_mib = {budget_bytes / MIB:.4g} is too little: one micro-batch keeps "
            f"{least / MIB:.4g} MiB even if every block is computed again from its input",
            hint=f"set train.recompute_mib to {least / MIB * 1.005:.4g} or more, or make the "
            "micro-batch smaller",
        )
    best = frozenset(inside)
    low, high = 0.0, 2.0  # at first 1.0 is tried, then halves of what is left of (0, 1)
    for _ in range(_STEPS):
        share = (low + high) / 2
        again = _again(chunk, inside, share)
        if kept_bytes(chunk, again.__contains__) <= budget_bytes:
            best, low = again, share
            if share == 1.0:
                break
        else:
            high = share
    return best


def _again(chunk: ChunkGraphs, inside: Collection[fx.Node], share: float) -> frozenset[fx.Node]:
    """What is computed again if `share` of what the partitioner can choose from is kept."""
    joint, copies = _joint(chunk)
    fixed = [
        node
        for node in chunk.forward.graph.nodes
        if is_sum(node) or (node not in inside and any(user in inside for user in node.users))
    ]
    names = min_cut_saved(joint, share, [copies[node] for node in fixed])
    kept = set()
    for node in chunk.forward.graph.nodes:
        if copies.get(node) is not None and copies[node].name in names:
            kept.add(looked_at(node))
            if is_collective(node):  # not while it is in flight
                kept.update(node.users)
    return frozenset(n for n in chunk.forward.graph.nodes if n.op == "call_function") - kept


def _joint(chunk: ChunkGraphs) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Forward and backward as one graph that returns the loss and the gradients, in the form that
    autograd's tracer gives it; and its node for each node of the forward."""
    graph = fx.Graph()
    forward, backward = chunk.forward, chunk.backward
    copies: dict[fx.Node, fx.Node] = {}
    given: dict[Binding, fx.Node] = {}
    inputs = [(forward, n) for n in forward.graph.find_nodes(op="placeholder")]
    inputs += [(backward, n) for n in backward.graph.find_nodes(op="placeholder")]
    saved = saved_values(chunk)
    for strand, node in inputs:
        binding = strand.bindings[node.name]
        if binding.role == "saved":
            continue
        if binding not in given:
            kind = "tangents" if binding.role == "tangent" else "primals"
            given[binding] = graph.placeholder(f"{kind}_{len(given) + 1}")
            given[binding].meta = dict(node.meta)
        copies[node] = given[binding]
    for strand in (forward, backward):
        for node in strand.graph.nodes:
            if node.op == "placeholder" and node not in copies:
                copies[node] = copies[saved[strand.bindings[node.name].target]]
            elif node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.pop("recompute", None)
    outputs = [copies[n] for n in (forward.outputs[0], *backward.outputs)]
    graph.output(tuple(outputs)).meta["desc"] = [None] * len(outputs)
    constants = {
        str(node.target): getattr(strand.module, str(node.target))
        for strand in (forward, backward)
        for node in strand.graph.find_nodes(op="get_attr")
    }
    return fx.GraphModule(constants, graph), copies
