"""Gradients flow into persistent buffers inside the backward graph.

After this pass the backward graph has no outputs: each gradient is added to its buffer by a node
that nobody waits for, so a planner may move it anywhere and no second full set of gradients is
ever alive. Where the gradient is a matmul of the buffer's dtype, matmul and addition are one
kernel (`buffer += a @ b`), which saves a write and a read of the whole gradient.
"""

from collections.abc import Collection

import torch
from torch import fx

from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph, output_node

aten = torch.ops.aten
BUFFER_PREFIX = "gradient_"


def accumulate_gradients(
    chunk: ChunkGraphs, buffer_dtype: torch.dtype, *, done: Collection[str] = ()
) -> StrandGraph:
    """The backward graph of `chunk` with accumulation into buffers of `buffer_dtype`, one per
    parameter, bound under role `gradient`. Changes the graph in place. Gradients of the parameters
    in `done` are left out: the graph deals with them already."""
    backward = chunk.backward
    graph = backward.graph
    output = output_node(graph)
    first = next(iter(graph.nodes))
    bindings = dict(backward.bindings)
    gradients = backward.outputs
    output.args = ((),)
    for index, (parameter, gradient) in enumerate(zip(chunk.parameters, gradients, strict=True)):
        if parameter in done:
            continue
        with graph.inserting_before(first):
            buffer = graph.placeholder(f"{BUFFER_PREFIX}{index}")
        buffer.meta["val"] = gradient.meta["val"].to(buffer_dtype)
        bindings[buffer.name] = Binding("gradient", parameter)
        _add(graph, buffer, gradient)
    backward.module.recompile()
    return StrandGraph("backward", backward.module, bindings)


def _add(graph: fx.Graph, buffer: fx.Node, gradient: fx.Node) -> None:
    """buffer += gradient, right after the gradient."""
    same_dtype = buffer.meta["val"].dtype == gradient.meta["val"].dtype
    if gradient.target == aten.mm.default and same_dtype and not gradient.users:
        with graph.inserting_after(gradient):
            node = graph.call_function(aten.addmm_.default, (buffer, *gradient.args))
        node.meta["val"] = buffer.meta["val"]
        graph.erase_node(gradient)
        return
    with graph.inserting_after(gradient):
        node = graph.call_function(aten.add_.Tensor, (buffer, gradient))
    node.meta["val"] = buffer.meta["val"]
