"""Backward operators that compute gradients of an input and of weights at once, as two operators.

Schedules that cut backwards in two run gradients of inputs first, for which another chunk waits,
and gradients of weights where a rank would wait. A linear layer has a matmul for each; a
convolution has one operator for both. It computes them apart all the same, so as two operators it
takes as long and gives the same bits, and each may have a place of its own.

Norms stay whole: the gradients of their weights are sums over what the gradient of the input needs
as well, so as two operators they take longer, and what could be moved is short.
"""

import operator

import torch
from torch import fx

from interlace.graphs.trace import ChunkGraphs

aten = torch.ops.aten
JOINT = aten.convolution_backward.default
"""Gradients of input, weight and bias, of which its last argument says which are wanted."""


def split_joint_backwards(chunk: ChunkGraphs) -> None:
    """Give each such operator of the backward, if its gradients of input and weight are both read,
    to two: it keeps the input, and one behind it has the weight and the bias. Changes the graph."""
    graph = chunk.backward.graph
    for node in graph.find_nodes(op="call_function", target=JOINT):
        users = list(node.users)
        if not all(user.target is operator.getitem for user in users):
            continue
        late = [user for user in users if user.args[1] != 0]
        of_input, of_weight, _ = _wanted(node)
        if of_input and of_weight and 0 < len(late) < len(users):
            _split(graph, node, late)
    chunk.backward.module.recompile()


def gives_weights_only(node: fx.Node) -> bool:
    """Whether this is the half of such an operator that has the gradients of weight and bias."""
    return node.target == JOINT and not _wanted(node)[0]


def _wanted(node: fx.Node) -> tuple[bool, bool, bool]:
    """Whether it computes the gradients of input, weight and bias."""
    wanted = node.args[-1]
    assert isinstance(wanted, (list, tuple))
    of_input, of_weight, of_bias = (bool(each) for each in wanted)
    return of_input, of_weight, of_bias


def _split(graph: fx.Graph, node: fx.Node, late: list[fx.Node]) -> None:
    """`late` are the look-ups of the gradients of weight and bias."""
    *args, _ = node.args
    only_weights = [False, *_wanted(node)[1:]]
    of_input, of_weight, of_bias = node.meta["val"]
    name = f"{node.name}_weight"
    with graph.inserting_after(node):
        other = graph.create_node("call_function", JOINT, (*args, only_weights), name=name)
    other.meta = {**node.meta, "val": (None, of_weight, of_bias)}
    node.args = (*args, [True, False, False])
    node.meta["val"] = (of_input, None, None)
    for user in late:
        user.replace_input_with(node, other)
