"""Gradients flow into persistent buffers inside the backward graph.

After this pass the backward graph has no outputs: each gradient is added to its buffer by a node
that nobody waits for, so a planner may move it anywhere and no second full set of gradients is
ever alive. Where the gradient is a matmul of the buffer's dtype, matmul and addition are one
kernel (`buffer += a @ b`), which saves a write and a read of the whole gradient. So they are where
the matmul is of a narrower dtype and the device can add it to float32 as it is (`wide_sums`);
elsewhere, as on the CPU, such a gradient is rounded to its dtype before it is added.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, fx

from interlace.experts.grouped import ADD_WEIGHT_GRADIENT, WEIGHT_GRADIENT
from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph, output_node
from interlace.graphs.wide_sums import ADD_WIDE

aten = torch.ops.aten
BUFFER_PREFIX = "gradient_"
"""Inputs of this name and a number are the buffers of gradients."""


def accumulate_gradients(
    chunk: ChunkGraphs,
    buffer_dtype: torch.dtype,
    *,
    parameters: Mapping[str, Tensor] = MappingProxyType({}),
    done: Collection[str] = (),
    wide: Collection[torch.dtype] = (),
    fused: bool = True,
) -> StrandGraph:
    """The backward graph of `chunk` with accumulation into buffers of `buffer_dtype`, one per
    parameter, bound under role `gradient`. Changes the graph in place. `parameters` are this rank's
    parts, by name: a buffer lies in memory as its parameter does. Gradients of the parameters
    in `done` are left out: the graph deals with them already. Matmuls of the types in `wide` can be
    added to float32 unrounded on the device that will run the graph. Without `fused` matmul and
    addition stay two kernels, which gives autograd's bits."""
    backward = chunk.backward
    graph = backward.graph
    output = output_node(graph)
    first = next(iter(graph.nodes))
    bindings = dict(backward.bindings)
    gradients = backward.outputs
    output.args = ((),)
    readers, known = Counter(gradients), dict[tuple[object, ...], Tensor]()
    for index, (parameter, gradient) in enumerate(zip(chunk.parameters, gradients, strict=True)):
        if parameter in done:
            continue
        with graph.inserting_before(first):
            buffer = graph.placeholder(f"{BUFFER_PREFIX}{index}")
        like = parameters.get(parameter, gradient.meta["val"])
        buffer.meta["val"] = _buffer_like(like, gradient.meta["val"], buffer_dtype, known)
        bindings[buffer.name] = Binding("gradient", parameter)
        # Of a sum of two parameters, both have the same gradient.
        _add(graph, buffer, gradient, wide, alone=fused and readers[gradient] == 1)
    backward.module.recompile()
    return StrandGraph("backward", backward.module, bindings)


def _buffer_like(
    parameter: Tensor, gradient: Tensor, dtype: torch.dtype, known: dict[tuple[object, ...], Tensor]
) -> Tensor:
    """What `torch.zeros_like(parameter, dtype=dtype)` gives, as a fake tensor; the same one for
    parameters alike, in `known`."""
    form = (parameter.shape, parameter.stride(), gradient.device)
    if form not in known:
        with gradient.fake_mode:  # type: ignore[attr-defined]
            strided = torch.empty_strided(*form[:2], device=gradient.device)
            known[form] = torch.zeros_like(strided, dtype=dtype)
    return known[form]


def _add(
    graph: fx.Graph,
    buffer: fx.Node,
    gradient: fx.Node,
    wide: Collection[torch.dtype],
    *,
    alone: bool,
) -> None:
    """buffer += gradient, right after the gradient; `alone` if no other parameter has it too, and
    so its matmul may add it up."""
    sums, dtype = buffer.meta["val"].dtype, gradient.meta["val"].dtype
    is_own_matmul = gradient.target == aten.mm.default and alone and not gradient.users
    if is_own_matmul and (sums == dtype or (sums == torch.float32 and dtype in wide)):
        with graph.inserting_after(gradient):
            if sums == dtype:
                node = graph.call_function(aten.addmm_.default, (buffer, *gradient.args))
            else:
                args = (buffer, *gradient.args, torch.float32)
                node = graph.call_function(ADD_WIDE, args, {"out": buffer})
        node.meta["val"] = buffer.meta["val"]
        graph.erase_node(gradient)
        return
    is_own_experts = gradient.target == WEIGHT_GRADIENT and alone and not gradient.users
    with graph.inserting_after(gradient):
        if is_own_experts and sums == dtype:
            node = graph.call_function(ADD_WEIGHT_GRADIENT, (buffer, *gradient.args))
            graph.erase_node(gradient)
        else:
            node = graph.call_function(aten.add_.Tensor, (buffer, gradient))
    node.meta["val"] = buffer.meta["val"]
