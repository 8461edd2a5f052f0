"""Export a traced graph as an OpGraph, the torch-free form that planners read."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from interlace.errors import InputError
from interlace.graphs.buffers import is_in_place, written
from interlace.graphs.collectives import (
    group_of,
    is_collective,
    is_wait,
    kind_of_collective,
)
from interlace.graphs.trace import VIEWS, StrandGraph
from interlace.graphs.wide_sums import ADD_WIDE
from interlace.ir.graph import COMPUTE_LANE, GraphInput, Kind, Operator, OpGraph

aten = torch.ops.aten
_KINDS = {
    Kind.MATMUL: {
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "grouped_matmul",
        "grouped_weight_gradient",
        "add_grouped_weight_gradient",
    },
    Kind.EMBEDDING: {"embedding", "embedding_dense_backward"},
    Kind.REDUCTION: {"sum", "mean", "amax", "max", "_log_softmax", "_softmax", "var_mean"},
    Kind.MEMORY: {
        "cat",
        "clone",
        "_to_copy",
        "index_put",
        "gather",
        "copy",
        "zeros_like",
        "copy_",
        "new_empty",
        "new_empty_strided",
        "rows_of_tokens",
        "tokens_of_rows",
    },
    Kind.ACCUMULATE: {"add_"},
}
"""Names of ATen operators by kind; all others that compute are element-wise."""
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
"""Operators whose cost depends on more than the shapes of their inputs."""
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
"""The same by name."""


def is_free(node: fx.Node) -> bool:
    """Nodes that a planner does not see: inputs, views, tuple look-ups and waits."""
    if node.op in ("placeholder", "get_attr"):
        return True
    return node.target in VIEWS or node.target is operator.getitem or is_wait(node)


class Storage(NamedTuple):
    """The memory behind a value."""

    name: str
    """The node that allocated it, or the input that it is a view of."""
    bytes: int
    """0 for a view of an input, which is there anyway."""


def output_storages(strand: StrandGraph, names: Sequence[str] = ()) -> dict[str, Storage]:
    """The memory behind each output: several saved values may be views of one tensor. `names` are
    those of the outputs, if a pass put other nodes in their place."""
    nodes = strand.outputs
    names = names or [node.name for node in nodes]
    return {name: _storage(node) for name, node in zip(names, nodes, strict=True)}


def _storage(node: fx.Node) -> Storage:
    while node.target in VIEWS or is_wait(node) or is_in_place(node):
        node = written(node)[0] if is_in_place(node) else node.all_input_nodes[0]
    return Storage(node.name, 0 if node.op == "placeholder" else _bytes(node.meta.get("val")))


def export(
    strand: StrandGraph,
    axis_of_group: dict[str, str],
    storages: Mapping[str, Storage] = MappingProxyType({}),
) -> OpGraph:
    """The OpGraph of a strand. `axis_of_group` names the mesh axis of each process group.

    `storages` gives the memory behind saved values by name; those that share it are one input.
    Raises InputError for a collective on a group that belongs to no mesh axis.
    """
    behind: dict[fx.Node, tuple[frozenset[str], frozenset[str]]] = {}
    operators = []
    in_place: set[str] = set()
    inputs_of, reads_as = _graph_inputs(strand, storages)
    look = _Look()
    for node in strand.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            behind[node] = (frozenset(), frozenset({reads_as[node.name]}))
            continue
        inputs = frozenset().union(*(behind[n][0] for n in node.all_input_nodes))
        reads = frozenset().union(*(behind[n][1] for n in node.all_input_nodes))
        if is_free(node):
            behind[node] = (inputs, reads)
            continue
        operator_ = _operator(node, inputs, reads, axis_of_group, look)
        memory: frozenset[str] = frozenset()
        if is_in_place(node):
            changed = [behind[source] for source in written(node)]
            writes = frozenset().union(*(of_source[1] for of_source in changed))
            operator_ = replace(operator_, writes=tuple(sorted(writes)))
            in_place.add(node.name)
            # Who reads the result holds the memory of the operator that allocated it.
            memory = frozenset().union(*(of_source[0] for of_source in changed)) - in_place
        operators.append(operator_)
        behind[node] = (memory | {node.name}, frozenset())
    outputs = frozenset().union(*(behind[node][0] for node in strand.outputs))
    return OpGraph(
        name=strand.name,
        operators=tuple(operators),
        inputs=inputs_of,
        outputs=tuple(op.id for op in operators if op.id in outputs),
    )


def _graph_inputs(
    strand: StrandGraph, storages: Mapping[str, Storage]
) -> tuple[tuple[GraphInput, ...], dict[str, str]]:
    """The inputs, and for each placeholder the input that stands for its memory."""
    inputs: list[GraphInput] = []
    reads_as: dict[str, str] = {}
    first: dict[str, str] = {}
    for node in strand.graph.find_nodes(op="placeholder"):
        binding, size = strand.bindings[node.name], _bytes(node.meta.get("val"))
        reads_as[node.name] = node.name
        if binding.role == "saved" and binding.target in storages:
            storage = storages[binding.target]
            reads_as[node.name] = first.setdefault(storage.name, node.name)
            size = storage.bytes if reads_as[node.name] == node.name else 0
        inputs.append(GraphInput(node.name, binding.role, size))
    return tuple(inputs), reads_as


class _Look:
    """(shape, bytes) of values. Those of copied blocks are the same objects, and are looked at
    once; all of them live as long as the graph."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int]] = {}

    def __call__(self, node: fx.Node) -> tuple[str, int]:
        value = node.meta.get("val")
        if id(value) not in self._seen:
            self._seen[id(value)] = _shape(value), _bytes(value)
        return self._seen[id(value)]


def _operator(
    node: fx.Node,
    inputs: frozenset[str],
    reads: frozenset[str],
    axis_of_group: dict[str, str],
    look: _Look,
) -> Operator:
    arguments = [look(source) for source in node.all_input_nodes]
    kind, lane = _kind(node), COMPUTE_LANE
    if is_collective(node):
        group = group_of(node)
        if group not in axis_of_group:
            raise InputError(
                f"collective {node.name!r} runs on process group {group!r}, which belongs to no "
                f"mesh axis",
                hint="build the model on the mesh that is given to the trace",
            )
        lane = axis_of_group[group]
    target = str(node.target)
    depends_on = " ".join([*(shape for shape, _ in arguments), *_form(node)])
    return Operator(
        id=node.name,
        kind=kind,
        target=target,
        lane=lane,
        inputs=tuple(sorted(inputs)),
        reads=tuple(sorted(reads)),
        key=f"{target} {depends_on} {lane}".strip(),
        bytes_in=sum(size for _, size in arguments),
        bytes_out=0 if is_in_place(node) else look(node)[1],
        flops=_flops(node),
    )


def _kind(node: fx.Node) -> Kind:
    if is_collective(node):
        return kind_of_collective(node.target, node.args)
    return kind_of_target(node.target)


def kind_of_target(target: Any) -> Kind:
    """The kind of a compute operator, from its name and tags."""
    name = str(target).split(".")[1]
    if "attention" in name:
        return Kind.ATTENTION
    if name in _KIND_OF:
        return _KIND_OF[name]
    tags = getattr(target, "tags", ())
    return Kind.ELEMENTWISE if torch.Tag.pointwise in tags else Kind.OTHER


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(value))


def _shape(value: Any) -> str:
    """`float32[128x256]`, with strides when the layout is not the plain one."""
    texts = []
    for tensor in _tensors(value):
        sizes = "x".join(map(str, tensor.shape))
        layout = "" if tensor.is_contiguous() else ":" + "x".join(map(str, tensor.stride()))
        texts.append(f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}{layout}]")
    return ",".join(texts)


def _form(node: fx.Node) -> list[str]:
    """What the time of a convolution depends on beside its shapes: strides, and which gradients it
    computes."""
    if _packet(node) not in _CONVOLUTIONS:
        return []
    return [str(each).replace(" ", "") for each in node.args[3:]]


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _flops(node: fx.Node) -> int:
    """Multiplications and additions of matmuls, convolutions and attention; 0 for everything
    else."""
    packet = _packet(node)
    name = str(node.target).split(".")[1]
    if packet == aten.convolution_backward:
        return _convolution_backward_flops(node)
    if name == "addmm_" or node.target == ADD_WIDE:
        a, b = (n.meta["val"] for n in node.args[1:3] if isinstance(n, fx.Node))
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if "attention" in name:
        return _attention_flops(node, backward="backward" in name)
    if packet not in flop_registry:
        return 0
    values = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return int(flop_registry[packet](*values, **node.kwargs, out_val=node.meta["val"]))


def _convolution_backward_flops(node: fx.Node) -> int:
    """For the input and for the weight, if they are asked for, as many as forward: a product for
    each weight, image, and place of the output, or of the input if it is transposed. (torch counts
    those of the weight of a grouped convolution once too often for each group.)"""
    output, x, weight = (n.meta["val"] for n in node.args[:3] if isinstance(n, fx.Node))
    is_transposed, asked = node.args[7], node.args[-1]
    assert isinstance(asked, (list, tuple))
    images, _, *places = (x if is_transposed else output).shape
    return 2 * images * prod(places) * weight.numel() * sum(map(bool, asked[:2]))


def _attention_flops(node: fx.Node, *, backward: bool) -> int:
    """Two matmuls forward, five backward, each 2 B H S T E; half of it when causal."""
    query, key = node.args[1:3] if backward else node.args[:2]
    assert isinstance(query, fx.Node)
    assert isinstance(key, fx.Node)
    *batch_heads, length, size = query.meta["val"].shape
    pairs = length * key.meta["val"].shape[-2]
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    causal = dict(zip(names, node.args, strict=False)).get("is_causal", False)
    return (5 if backward else 2) * 2 * prod(batch_heads) * pairs * size // (2 if causal else 1)
