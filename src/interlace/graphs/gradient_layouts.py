"""Bring each gradient to its parameter's layout, inside the backward graph.

Autograd leaves the gradient of a DTensor in whatever layout its last operator gave it, which need
not be the parameter's. Buffers are as large as a rank's part of the parameter, so before a gradient
is added to one it is converted, by operators and collectives that a planner sees like any other:

    Replicate -> Shard    this rank's slice
    Partial -> Shard      a reduce-scatter
    Shard -> Replicate    an all-gather
    Shard -> other Shard  an all-to-all (all-gather and slice where several axes cut a dimension)
    Partial -> Replicate  nothing: the sums of all micro-batches are summed over ranks once a step

A mean over ranks, `Partial("avg")`, becomes a sum of parts divided by the number of ranks. What has
no such conversion is refused by name, and so are parts that are not equal on all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from interlace.errors import InputError
from interlace.graphs.trace import ChunkGraphs, output_node
from interlace.graphs.weight_parts import in_dtype
from interlace.graphs.writer import GraphWriter
from interlace.parallel.local_parts import stored

aten = torch.ops.aten
_functional = torch.ops._c10d_functional

MeshPlacements = tuple[Placement, ...]


class Conversion(NamedTuple):
    """One conversion over one mesh axis."""

    kind: Literal["gather", "reduce", "scatter", "exchange", "cut", "divide"]
    axis: int
    dim: int = 0
    """The tensor's dimension that is gathered, scattered or cut."""
    other: int = 0
    """Of an exchange: the dimension that is gathered."""


def steps_between(given: MeshPlacements, wanted: MeshPlacements) -> list[Conversion]:
    """How a tensor laid out as `given` gets to `wanted`: shards are undone from the innermost axis
    outwards, and made from the outermost inwards, as several axes may cut one dimension.

    Both hold `Replicate`, `Shard` and, of `given`, `Partial` sums and means only.
    """
    steps: list[Conversion] = []
    now = list(given)
    for axis in reversed(range(len(now))):
        placement = now[axis]
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            steps.append(Conversion("divide", axis))
            now[axis] = Partial("sum")
        elif isinstance(placement, Shard) and _is_apart(now, wanted, axis):
            other = wanted[axis]
            assert isinstance(other, Shard)
            steps.append(Conversion("exchange", axis, other.dim, placement.dim))
            now[axis] = other
        elif isinstance(placement, Shard) and _must_be_undone(now, wanted, axis, placement):
            steps.append(Conversion("gather", axis, placement.dim))
            now[axis] = Replicate()
    for axis, placement in enumerate(wanted):
        if now[axis] == placement:
            continue
        if isinstance(placement, Shard):
            kind = "scatter" if isinstance(now[axis], Partial) else "cut"
            steps.append(Conversion(kind, axis, placement.dim))
        else:
            steps.append(Conversion("reduce", axis))
    return steps


def _must_be_undone(
    now: Sequence[Placement], wanted: MeshPlacements, axis: int, shard: Shard
) -> bool:
    """Whether a shard is not the wanted one, or lies inside of another that is yet to change."""
    outer = zip(now[:axis], wanted[:axis], strict=True)
    return wanted[axis] != shard or any((a == shard) != (b == shard) for a, b in outer)


def _is_apart(now: Sequence[Placement], wanted: MeshPlacements, axis: int) -> bool:
    """Whether a shard becomes another, and no other axis cuts any of the two dimensions."""
    here = {now[axis], wanted[axis]}
    others = {*now[:axis], *now[axis + 1 :], *wanted[:axis], *wanted[axis + 1 :]}
    return len(here) == 2 and isinstance(wanted[axis], Shard) and here.isdisjoint(others)


def check_parameters(module: nn.Module) -> None:
    """Raises InputError, on all ranks alike, for parameters whose parts differ in size between
    ranks, which then would run different graphs, for complex ones, and for those whose gradients
    have a type of their own."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise InputError(
                f"parameter {_own(name)!r} is {_dtype(parameter)}, and gradients are summed in "
                "real numbers",
                hint="make it real, with two numbers in a last dimension (torch.view_as_complex)",
            )
        asked = parameter.grad_dtype if parameter.requires_grad else None  # None takes any
        if asked not in (None, parameter.dtype):
            raise InputError(
                f"parameter {_own(name)!r} is {_dtype(parameter)}, and its gradient is asked for "
                f"in {str(asked).removeprefix('torch.')} (grad_dtype)",
                hint="leave grad_dtype as it is: gradients of all micro-batches are summed in the "
                "parameter's own type",
            )
        if isinstance(parameter, DTensor):
            what = f"parameter {_own(name)!r}"
            _refuse_uneven(what, parameter.shape, parameter.placements, parameter.device_mesh)


def lay_out_gradients(
    chunk: ChunkGraphs,
    module: nn.Module,
    at_once: Mapping[str, torch.dtype | None] = MappingProxyType({}),
) -> ChunkGraphs:
    """`chunk` with gradients as large as this rank's parts of the parameters of `module`, and
    `placements` that say so. Changes the backward graph. Gradients of the parameters in `at_once`
    get their parameter's layout in each micro-batch, and no sums over ranks once a step; they are
    converted to the type given there first, None for their own.

    Raises InputError for a layout that cannot be converted, naming the parameter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    backward = chunk.backward
    late = _summed_once_a_step(chunk, parameters)
    late |= {parameters[name]: own for name in at_once if (own := _layout_of(parameters[name]))}
    outputs: list[fx.Node] = []
    placements: dict[str, MeshPlacements | None] = {}
    for name, node in zip(chunk.parameters, backward.outputs, strict=True):
        parameter = parameters[name]
        given = chunk.placements[name]
        converted = node
        placements[name] = None
        if isinstance(parameter, DTensor) and given is not None:
            own = given if given == parameter.placements else late[parameter]
            placements[name] = own
            writer = GraphWriter(backward.graph, backward.bindings, like=node)
            writer.after(node if node.op != "placeholder" else _last_placeholder(backward.graph))
            if given != own:
                converted = in_dtype(writer, node, at_once.get(name))
            converted = convert(writer, converted, given, own, parameter.device_mesh)
        _check_shape(name, parameter, given, converted)
        outputs.append(converted)
    output_node(backward.graph).args = (tuple(outputs),)
    backward.module.recompile()
    return replace(chunk, placements=placements)


def _summed_once_a_step(
    chunk: ChunkGraphs, parameters: Mapping[str, nn.Parameter]
) -> dict[nn.Parameter, MeshPlacements]:
    """The layout in which each parameter's gradients are added up: the parameter's, with parts of a
    sum where all its gradients (one per name that it is used under) are parts of one."""
    found: dict[nn.Parameter, MeshPlacements] = {}
    for name in chunk.parameters:
        parameter, given = parameters[name], chunk.placements[name]
        _refuse_unknown(name, parameter, given)
        if not isinstance(parameter, DTensor) or given is None:
            continue
        layout = found.get(parameter, given)
        found[parameter] = tuple(
            Partial("sum")
            if late.is_partial() and own.is_partial() and w.is_replicate() and ranks > 1
            else w
            for late, own, w, ranks in zip(
                layout, given, parameter.placements, parameter.device_mesh.shape, strict=True
            )
        )
    return found


def _layout_of(parameter: Tensor) -> MeshPlacements:
    return parameter.placements if isinstance(parameter, DTensor) else ()


def convert(
    writer: GraphWriter,
    node: fx.Node,
    given: MeshPlacements,
    wanted: MeshPlacements,
    mesh: DeviceMesh,
) -> fx.Node:
    """Write the operators that bring a rank's part of a tensor, `node`, to another layout."""
    for step in steps_between(given, wanted):
        if mesh.size(step.axis) > 1:
            node = _step(writer, node, step, mesh)
    return node


def _step(writer: GraphWriter, node: fx.Node, step: Conversion, mesh: DeviceMesh) -> fx.Node:
    ranks, group = mesh.size(step.axis), str(mesh.get_group(step.axis).group_name)
    shape, dim = list(node.meta["val"].shape), step.dim
    if step.kind == "divide":
        return writer.call(aten.div.Scalar, node, ranks)
    if step.kind == "cut":
        part = shape[dim] // ranks
        start = mesh.get_local_rank(step.axis) * part
        return writer.call(aten.slice.Tensor, node, dim, start, start + part)
    if step.kind == "reduce":
        return _waited(writer, _functional.all_reduce.default, node, "sum", group)
    if step.kind == "gather":
        whole = _waited(writer, _functional.all_gather_into_tensor.default, node, ranks, group)
        return _joined(writer, whole, shape, dim, ranks)
    pieces = _pieces(writer, node, dim, ranks)
    if step.kind == "scatter":
        scatter = _functional.reduce_scatter_tensor.default
        return _waited(writer, scatter, pieces, "sum", ranks, group)
    shape[dim] //= ranks
    splits = [shape[0]] * ranks
    call = _functional.all_to_all_single.default
    return _joined(
        writer, _waited(writer, call, pieces, splits, splits, group), shape, step.other, ranks
    )


def _pieces(writer: GraphWriter, node: fx.Node, dim: int, ranks: int) -> fx.Node:
    """The pieces of a tensor for each rank, cut along `dim`, one behind the other along 0."""
    if dim == 0:
        return node
    shape = list(node.meta["val"].shape)
    split = [*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :]]
    parts = writer.call(aten.view.default, _contiguous(writer, node), split)
    axes = [dim, *(axis for axis in range(len(split)) if axis != dim)]
    moved = _contiguous(writer, writer.call(aten.permute.default, parts, axes))
    shape[dim] //= ranks
    return writer.call(aten.view.default, moved, [ranks * shape[0], *shape[1:]])


def _joined(
    writer: GraphWriter, pieces: fx.Node, shape: list[int], dim: int, ranks: int
) -> fx.Node:
    """One tensor of each rank's piece of `shape`, which lie behind each other along 0."""
    if dim == 0:
        return pieces
    parts = writer.call(aten.view.default, pieces, [ranks, *shape])
    axes = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    moved = _contiguous(writer, writer.call(aten.permute.default, parts, axes))
    whole = [ranks * size if axis == dim else size for axis, size in enumerate(shape)]
    return writer.call(aten.view.default, moved, whole)


def _waited(writer: GraphWriter, collective: object, node: fx.Node, *args: object) -> fx.Node:
    pending = writer.call(collective, _contiguous(writer, node), *args)
    return writer.call(_functional.wait_tensor.default, pending)


def _contiguous(writer: GraphWriter, node: fx.Node) -> fx.Node:
    if node.meta["val"].is_contiguous():
        return node
    return writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return list(graph.find_nodes(op="placeholder"))[-1]


def _refuse_unknown(name: str, parameter: Tensor, given: MeshPlacements | None) -> None:
    """Refuse layouts that `steps_between` does not know."""
    if not isinstance(parameter, DTensor):
        if given is not None:
            raise InputError(
                f"the gradient of {_own(name)!r} is a DTensor {_shown(given)}, and the parameter "
                "is a plain tensor",
                hint="make the parameter a DTensor too (distribute_tensor, Replicate())",
            )
        return
    wanted, mesh = parameter.placements, parameter.device_mesh
    if given is None:
        raise InputError(
            f"the gradient of {_own(name)!r} is a plain tensor, and the parameter is a DTensor "
            f"{_shown(wanted)}",
            hint="take its part by to_local(), whose gradient has a layout",
        )
    if given == wanted:
        return
    sums = [p.reduce_op in ("sum", "avg") for p in given if type(p) is Partial]
    known = all(type(p) in (Replicate, Shard, Partial) for p in given) and all(sums)
    if not known or not all(type(p) in (Replicate, Shard) for p in wanted):
        raise InputError(
            f"the gradient of {_own(name)!r} is laid out as {_shown(given)}, and the parameter as "
            f"{_shown(wanted)}: that cannot be converted",
            hint="lay the parameter out by Shard and Replicate",
        )
    _refuse_uneven(f"the gradient of {_own(name)!r}", parameter.shape, given, mesh)


def _refuse_uneven(
    what: str, shape: Sequence[int], layout: MeshPlacements, mesh: DeviceMesh
) -> None:
    for dim, size in enumerate(shape):
        over = [i for i, p in enumerate(layout) if type(p) is Shard and p.dim % len(shape) == dim]
        ranks = torch.Size(mesh.size(axis) for axis in over).numel()
        if size % ranks:
            raise InputError(
                f"{what} is cut along dimension {dim} into {ranks} parts, and its {size} elements "
                "there cannot be divided among them: ranks would run different graphs",
                hint=f"make that size a multiple of {ranks}, or lay the parameter out by another "
                "dimension or whole (Replicate)",
            )


def _check_shape(
    name: str, parameter: Tensor, given: MeshPlacements | None, gradient: fx.Node
) -> None:
    part = stored(parameter)
    shape = gradient.meta["val"].shape
    if shape != part.shape:
        laid_out = f" laid out as {_shown(given)}" if given is not None else ""
        raise InputError(
            f"the gradient of {_own(name)!r}{laid_out} is {list(shape)} on this rank, and its part "
            f"of the parameter is {list(part.shape)}",
            hint="a gradient must be as large as its parameter",
        )


def _shown(layout: MeshPlacements) -> str:
    return f"({', '.join(str(placement) for placement in layout)})"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _own(name: str) -> str:
    """A parameter's name in the user's module, which is traced inside of another with its loss."""
    return name.removeprefix("module.")
