"""What the ranks of a module under `fully_shard` exchange, as a pass over its traced graphs.

The module was traced with whole weights. As in `data_parallel`, a forward and a backward get the
gathers of the weights that they read, one group ahead of their first reader, and a backward the
reductions of its gradients. Here a rank's part of a weight is a tensor of its own, as FSDP2 keeps
it, and may be filled up with zeros; a group is rounded before it is gathered, and its gradients are
summed in a type of their own; and a group that stays whole after forward is gathered once.

The parts are inputs of role `shard`, one for each weight; the sums of a group's gradients are one
flat input of role `shard_gradient`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from interlace.errors import InputError
from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph, output_node, set_outputs
from interlace.graphs.weight_parts import (
    gathered_rows,
    in_dtype,
    in_rows,
    joined,
    packed_rows,
    scattered_sum,
    side_by_side,
    summed,
)
from interlace.graphs.writer import GraphWriter
from interlace.parallel.fsdp_groups import GroupWeight, WeightGroup, WeightGroups

aten = torch.ops.aten


def exchange(
    chunk: ChunkGraphs, layout: WeightGroups, buffer_dtype: torch.dtype
) -> tuple[ChunkGraphs, frozenset[str]]:
    """`chunk` with gathers and reductions, and the names of the parameters whose gradients are
    dealt with; changes its graphs. Sums of gradients are of `buffer_dtype`."""
    done = _reduce_groups(chunk, layout, buffer_dtype)
    forward, wholes = _gather_groups(chunk.forward, layout, {})
    kept = {
        weight: (f"whole_{group.index}_{number}", wholes[weight])
        for group in layout.groups
        for number, weight in enumerate(group.weights)
        if group.keeps and weight in wholes
    }
    backward, _ = _gather_groups(
        chunk.backward, layout, {weight: name for weight, (name, _) in kept.items()}
    )
    read = {binding.target for binding in backward.bindings.values() if binding.role == "saved"}
    handed = [(name, node) for name, node in kept.values() if name in read]
    output = output_node(forward.graph)
    output.args = ((*forward.outputs, *(node for _, node in handed)),)
    forward.module.recompile()
    saved = (*chunk.saved, *(name for name, _ in handed))
    return replace(chunk, forward=forward, backward=backward, saved=saved), done


def keep_wide(chunk: ChunkGraphs, names: Collection[str]) -> None:
    """Let gradients of these parameters be as wide as operators give them; changes the backward
    graph, whose gradients autograd rounded to the type of the weight as it was traced. Raises
    InputError for a weight whose gradients are added up and come in several types."""
    if not names:
        return
    backward = chunk.backward
    outputs = []
    for name, node in zip(chunk.parameters, backward.outputs, strict=True):
        writer = GraphWriter(backward.graph, backward.bindings, like=node)
        outputs.append(_unrounded(writer, node, name) if name in names else node)
    set_outputs(backward.graph, outputs)
    backward.module.recompile()


def _unrounded(writer: GraphWriter, gradient: fx.Node, name: str) -> fx.Node:
    """What autograd rounded. It does so under the number of the operator whose gradient it is; a
    cast in the module has a number, and so a gradient, of its own. Of a weight that is read several
    times autograd adds up what it has rounded."""
    if gradient.meta.get("is_gradient_acc"):
        rounded = [each for each in gradient.args if isinstance(each, fx.Node)]
        parts = [_unrounded(writer, each, name) for each in rounded]
        if parts == rounded:
            return gradient
        if len({part.meta["val"].dtype for part in parts}) > 1:
            raise InputError(
                f"{name.removeprefix('module.')!r} is under fully_shard and read several times, "
                "and its gradients come in several types, which autograd adds up as they come",
                hint="read it in one type everywhere, as in module.weight.float()",
            )
        return writer.after(gradient).call(aten.add.Tensor, *parts)
    if gradient.target != aten._to_copy.default:
        return gradient
    [source] = gradient.all_input_nodes
    number = gradient.meta.get("seq_nr")
    is_rounded = source.meta["val"].dtype.itemsize > gradient.meta["val"].dtype.itemsize
    return source if is_rounded and source.meta.get("seq_nr") == number is not None else gradient


def _gather_groups(
    strand: StrandGraph, layout: WeightGroups, kept: Mapping[GroupWeight, str]
) -> tuple[StrandGraph, dict[GroupWeight, fx.Node]]:
    """`strand` with its weights gathered, and the nodes that are whole weights. Those in `kept`
    become values that the forward saves under these names."""
    graph, bindings = strand.graph, dict(strand.bindings)
    weight_of = {name: w for group in layout.groups for w in group.weights for name in w.names}
    inputs: dict[GroupWeight, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        binding = bindings[node.name]
        if binding.role != "parameter" or binding.target not in weight_of:
            continue
        weight = weight_of[binding.target]
        if weight in kept:
            bindings[node.name] = Binding("saved", kept[weight])
        else:
            inputs.setdefault(weight, []).append(node)
    place = {node: index for index, node in enumerate(graph.nodes)}
    readers = {
        w: sorted((user for node in nodes for user in node.users), key=place.__getitem__)
        for w, nodes in inputs.items()
    }
    used = [
        (group, [w for w in group.weights if readers.get(w)])
        for group in layout.groups
        if any(readers.get(w) for w in group.weights)
    ]
    used.sort(key=lambda each: min(place[readers[w][0]] for w in each[1]))
    wholes: dict[GroupWeight, fx.Node] = {}
    before: fx.Node | None = None
    for group, weights in used:
        first = min((readers[w][0] for w in weights), key=place.__getitem__)
        writer = GraphWriter(graph, bindings, like=inputs[weights[0]][0])
        parts = _gather(writer, before or first, group, weights)
        for weight, part in zip(weights, parts, strict=True):
            wholes[weight] = _whole(writer.at(readers[weight][0]), group, weight, part)
            for node in inputs[weight]:
                node.replace_all_uses_with(wholes[weight])
        before = first
    for nodes in inputs.values():
        for node in nodes:
            bindings.pop(node.name)
            graph.erase_node(node)
    strand.module.recompile()
    return StrandGraph(strand.name, strand.module, bindings), wholes


def _gather(
    writer: GraphWriter, at: fx.Node, group: WeightGroup, weights: Sequence[GroupWeight]
) -> list[fx.Node]:
    """[ranks, elements of a part] of each of these weights, gathered together before `at`."""
    dtypes = [weight.shard().dtype for weight in weights]
    shards = []
    for weight, dtype in zip(weights, dtypes, strict=True):
        role, target = group.shard_key(weight)
        name = f"{role}_{target.replace('.', '_')}"
        shape = (weight.part_elements,)
        shards.append(writer.placeholder(name, Binding(role, target), shape, dtype))
    writer.at(at)
    if group.shard.size == 1:
        shards = [in_dtype(writer, each, group.compute_dtype) for each in shards]
        return [writer.call(aten.view.default, each, [1, -1]) for each in shards]
    flat = shards[0] if len(shards) == 1 else writer.call(aten.cat.default, shards)
    rows = gathered_rows(writer, in_dtype(writer, flat, group.compute_dtype), group.shard)
    if len(weights) == 1:
        return [rows]
    parts, start = [], 0
    for weight in weights:
        end = start + weight.part_elements
        parts.append(writer.call(aten.slice.Tensor, rows, 1, start, end))
        start = end
    return parts


def _whole(writer: GraphWriter, group: WeightGroup, weight: GroupWeight, part: fx.Node) -> fx.Node:
    """The weight of the parts of all ranks, without what fills them up."""
    ranks, dim, shape = group.shard.size, weight.dim, list(weight.part)
    parts = side_by_side(writer, part, ranks, dim, weight.part)
    shape[dim] *= ranks
    whole = joined(writer, parts, shape)
    if shape[dim] == weight.shape[dim]:
        return whole
    return writer.call(aten.slice.Tensor, whole, dim, 0, weight.shape[dim])


def gradient_places(
    group: WeightGroup, names: Sequence[str]
) -> tuple[tuple[GroupWeight, int], ...]:
    """The weights of a group that have gradients under any of these names, and where the sums of
    each begin in the flat sums of the group."""
    having, places, start = set(names), [], 0
    for weight in group.weights:
        if having.intersection(weight.names):
            places.append((weight, start))
            start += weight.part_elements
    return tuple(places)


def _reduce_groups(
    chunk: ChunkGraphs, layout: WeightGroups, buffer_dtype: torch.dtype
) -> frozenset[str]:
    """Put the reductions of gradients into the backward graph."""
    backward = chunk.backward
    gradients = dict(zip(chunk.parameters, backward.outputs, strict=True))
    place = {node: index for index, node in enumerate(backward.graph.nodes)}
    done: set[str] = set()
    for group in layout.groups:
        weights = [weight for weight, _ in gradient_places(group, chunk.parameters)]
        if not weights:
            continue
        found = {w: next(gradients[n] for n in w.names if n in gradients) for w in weights}
        last = max(found.values(), key=place.__getitem__)
        writer = GraphWriter(backward.graph, backward.bindings, like=last)
        role, target = group.sum_key
        elements = sum(weight.part_elements for weight in weights)
        total = writer.placeholder(
            f"{role}_{target}", Binding(role, target), (elements,), buffer_dtype
        )
        writer.after(last)
        reduced = _reduce(writer, group, found)
        writer.at(output_node(backward.graph)).call(aten.add_.Tensor, total, reduced)
        done |= {name for weight in weights for name in weight.names}
    return frozenset(done)


def _reduce(
    writer: GraphWriter, group: WeightGroup, gradients: Mapping[GroupWeight, fx.Node]
) -> fx.Node:
    """This rank's flat part of the sum over ranks."""
    ranks = group.shard.size
    parts = [
        in_rows(writer, _filled_up(writer, ranks, weight, node), ranks, weight.dim, weight.part)
        for weight, node in gradients.items()
    ]
    packed = in_dtype(writer, packed_rows(writer, parts), group.reduce_dtype)
    if ranks > 1:
        packed = scattered_sum(writer, packed, group.shard)
    if group.replicate.size > 1:
        packed = summed(writer, packed, group.replicate)
    return writer.call(aten.view.default, packed, [-1])


def _filled_up(writer: GraphWriter, ranks: int, weight: GroupWeight, node: fx.Node) -> fx.Node:
    """A gradient with as many zeros behind it as ranks have parts of equal size."""
    missing = weight.part[weight.dim] * ranks - weight.shape[weight.dim]
    if not missing:
        return node
    padding = [0] * (2 * (len(weight.shape) - weight.dim))
    padding[-1] = missing
    return writer.call(aten.constant_pad_nd.default, node, padding)
