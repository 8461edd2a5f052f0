"""Data parallelism as a pass over traced graphs: gathers of weights, reductions of gradients.

The traced module computes with whole weights. Where `parallel.data` shards them, this pass puts in
what a data-parallel rank exchanges, as ordinary operators that the planner moves:

    gather_each   ZeRO-3: weights come from an all-gather of their bucket, in a forward and again
                  in a backward, one bucket ahead of their first reader
    gather_once   ZeRO-1: a strand that gathers all weights at the start of a step
    reduce_each   ZeRO-3: a micro-batch's gradients are reduce-scattered and added to shard sums
    reduce_once   a strand that reduces the sums of all micro-batches at the end of a step

The parts of a bucket lie behind each other in one flat tensor, role `shard` (weights) or
`shard_gradient` (sums), target: the bucket's index.
"""

import torch
from torch import fx

from interlace.errors import InputError
from interlace.graphs.op_graphs import is_free
from interlace.graphs.trace import Binding, ChunkGraphs, StrandGraph, output_node
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
from interlace.parallel.data import Bucket, DataLayout, Weight

aten = torch.ops.aten


def gather_each(
    strand: StrandGraph, layout: DataLayout, chunk_of: dict[str, int] | None = None
) -> StrandGraph:
    """`strand` with its sharded weights gathered; changes its graph.

    `chunk_of` has the chunk of each operator, by name, where the graph will be cut: a bucket is
    then gathered in each chunk that reads it, and the operators that do so are added."""
    graph = strand.graph
    placeholders = {
        binding.target: node
        for node in graph.find_nodes(op="placeholder")
        if (binding := strand.bindings[node.name]).role == "parameter"
    }
    buckets = [
        (bucket, {w: n for w in bucket.weights for n in _named(placeholders, w) if bucket.sharded})
        for bucket in layout.buckets
    ]
    uses = [
        (bucket, chunk, nodes, users)
        for bucket, nodes in buckets
        for chunk, users in _users_by_chunk(graph, nodes, chunk_of).items()
    ]
    place = {node: index for index, node in enumerate(graph.nodes)}
    firsts = [{w: min(own, key=place.__getitem__) for w, own in use[3].items()} for use in uses]
    order = sorted(range(len(uses)), key=lambda i: min(place[user] for user in firsts[i].values()))
    bindings = dict(strand.bindings)
    shards: dict[int, fx.Node] = {}
    before: dict[int, fx.Node] = {}
    for number in order:
        bucket, chunk, nodes, users = uses[number]
        first = min(firsts[number].values(), key=place.__getitem__)
        writer = GraphWriter(graph, bindings, like=next(iter(nodes.values())))
        if bucket.index not in shards:
            shards[bucket.index] = writer.placeholder(
                f"shard_{bucket.index}", Binding("shard", str(bucket.index)), _shard(bucket)
            )
        shard = shards[bucket.index]
        gathered = gathered_rows(writer.at(before.get(chunk) or first), shard, bucket.shard)
        for weight, own in users.items():
            rows = _rows(writer.at(firsts[number][weight]), gathered, bucket, weight)
            whole = joined(writer, rows, weight.shape)
            for user in own:
                user.replace_input_with(nodes[weight], whole)
        before[chunk] = first
    for _, nodes in buckets:
        for node in nodes.values():
            bindings.pop(node.name)
            graph.erase_node(node)
    if chunk_of is not None:
        _number_new(graph, chunk_of)
    strand.module.recompile()
    return StrandGraph(strand.name, strand.module, bindings)


def _users_by_chunk(
    graph: fx.Graph, nodes: dict[Weight, fx.Node], chunk_of: dict[str, int] | None
) -> dict[int, dict[Weight, list[fx.Node]]]:
    """Who reads the weights of a bucket, by chunk; all in one without `chunk_of`."""
    found: dict[int, dict[Weight, list[fx.Node]]] = {}
    for weight, node in nodes.items():
        if chunk_of is not None:
            _split_views(graph, node, chunk_of)
        for user in node.users:
            chunk = 0 if chunk_of is None else _chunk_of(user, chunk_of)
            found.setdefault(chunk, {}).setdefault(weight, []).append(user)
    return found


def _split_views(graph: fx.Graph, node: fx.Node, chunk_of: dict[str, int]) -> None:
    """Copy views of a weight that operators of several chunks read, so that each has its own."""
    for view in [user for user in node.users if is_free(user)]:
        _split_views(graph, view, chunk_of)
        readers: dict[int, list[fx.Node]] = {}
        for user in view.users:
            readers.setdefault(_chunk_of(user, chunk_of), []).append(user)
        for chunk in sorted(readers)[1:]:
            with graph.inserting_after(view):
                copy = graph.node_copy(view)
            for reader in readers[chunk]:
                reader.replace_input_with(view, copy)


def _chunk_of(node: fx.Node, chunk_of: dict[str, int]) -> int:
    """Of an operator, or of the operators behind a view, which are of one chunk."""
    while node.name not in chunk_of:
        if node.op == "output":
            raise InputError(
                "the forward keeps a view of a weight for the backward, and a stage gathers its "
                "weights for each of them",
                hint="set parallel.zero to 1",
            )
        node = next(iter(node.users))
    return chunk_of[node.name]


def _number_new(graph: fx.Graph, chunk_of: dict[str, int]) -> None:
    """Operators that gather are of the chunk that reads what they gather."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not is_free(node) and node.name not in chunk_of:
            chunk_of[node.name] = _chunk_of(next(iter(node.users)), chunk_of)


def gather_once(forward: StrandGraph, layout: DataLayout) -> StrandGraph:
    """The strand that fills the weights that `forward` reads from their shards."""
    writer = GraphWriter.empty(_any_value(forward))
    for bucket in layout.buckets:
        if not bucket.sharded:
            continue
        shard = writer.placeholder(
            f"shard_{bucket.index}", Binding("shard", str(bucket.index)), _shard(bucket)
        )
        gathered = gathered_rows(writer, shard, bucket.shard)
        for weight in bucket.weights:
            part = _rows(writer, gathered, bucket, weight)
            for name, target in _placeholders(forward, "parameter", weight):
                whole = writer.placeholder_like(_input(forward, name), Binding("parameter", target))
                split = writer.call(aten.view.default, whole, _split_shape(weight))
                writer.call(aten.copy_.default, split, part)
    return writer.strand("gather")


def reduce_each(
    chunk: ChunkGraphs, layout: DataLayout, buffer_dtype: torch.dtype
) -> frozenset[str]:
    """Put the reductions of sharded weights' gradients into the backward graph of `chunk`.
    Returns the names of the parameters whose gradients are dealt with."""
    backward = chunk.backward
    gradients = dict(zip(chunk.parameters, backward.outputs, strict=True))
    place = {node: index for index, node in enumerate(backward.graph.nodes)}
    bindings = backward.bindings
    done: set[str] = set()
    for bucket in layout.buckets:
        found = {
            w: gradients[name] for w in bucket.weights for name in w.names if name in gradients
        }
        if not bucket.sharded or not found:
            continue
        last = max(found.values(), key=place.__getitem__)
        writer = GraphWriter(backward.graph, bindings, like=last)
        total = writer.placeholder(
            f"shard_gradient_{bucket.index}",
            Binding("shard_gradient", str(bucket.index)),
            _shard(bucket),
            buffer_dtype,
        )
        writer.after(last)
        reduced = _reduce(writer, bucket, found, layout)
        writer.at(output_node(backward.graph)).call(aten.add_.Tensor, total, reduced)
        done |= {name for w in bucket.weights for name in w.names}
    return frozenset(done)


def reduce_once(
    backward: StrandGraph, layout: DataLayout, buffer_dtype: torch.dtype
) -> StrandGraph:
    """The strand that reduces the gradient sums that `backward` leaves, and shares or scatters
    them. Sums of weights that stay whole are replaced by their totals."""
    writer = GraphWriter.empty(_any_value(backward))
    for bucket in layout.buckets:
        if (bucket.sharded and layout.reduce_each) or not (bucket.sharded or bucket.axes):
            continue
        found = {
            weight: writer.placeholder_like(_input(backward, name), Binding("gradient", target))
            for weight in bucket.weights
            for name, target in _placeholders(backward, "gradient", weight)
        }
        if not found:
            continue
        if bucket.sharded:
            total = writer.placeholder(
                f"shard_gradient_{bucket.index}",
                Binding("shard_gradient", str(bucket.index)),
                _shard(bucket),
                buffer_dtype,
            )
            writer.call(aten.copy_.default, total, _reduce(writer, bucket, found, layout))
            continue
        reduced = _reduce(writer, bucket, found, layout)
        offset = 0
        for weight, node in found.items():
            piece = writer.call(aten.slice.Tensor, reduced, 0, offset, offset + weight.elements)
            offset += weight.elements
            view = writer.call(aten.view.default, piece, list(weight.shape))
            writer.call(aten.copy_.default, node, view)
    return writer.strand("reduce")


def _named(placeholders: dict[str, fx.Node], weight: Weight) -> list[fx.Node]:
    return [placeholders[name] for name in weight.names if name in placeholders]


def _placeholders(strand: StrandGraph, role: str, weight: Weight) -> list[tuple[str, str]]:
    """(placeholder, parameter name) of a weight in a strand: one, or none if it is not used."""
    return [
        (name, binding.target)
        for name, binding in strand.bindings.items()
        if binding.role == role and binding.target in weight.names
    ][:1]


def _input(strand: StrandGraph, name: str) -> fx.Node:
    return next(node for node in strand.graph.find_nodes(op="placeholder") if node.name == name)


def _any_value(strand: StrandGraph) -> fx.Node:
    return next(
        node for node in strand.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    )


def _shard(bucket: Bucket) -> tuple[int, ...]:
    return (bucket.elements // bucket.shard.size,)


def _split_shape(weight: Weight) -> list[int]:
    """The whole weight's shape with the ranks as an axis of its own."""
    assert weight.dim is not None
    return [*weight.part[: weight.dim], weight.ranks, *weight.part[weight.dim :]]


def _rows(writer: GraphWriter, gathered: fx.Node, bucket: Bucket, weight: Weight) -> fx.Node:
    """A view of `gathered`: the weight with the ranks as an axis before the dimension they cut."""
    assert weight.dim is not None
    ranks = weight.ranks
    earlier = bucket.weights[: bucket.weights.index(weight)]
    start = sum(other.elements for other in earlier) // ranks
    piece = writer.call(aten.slice.Tensor, gathered, 1, start, start + weight.elements // ranks)
    return side_by_side(writer, piece, ranks, weight.dim, weight.part)


def _reduce(
    writer: GraphWriter, bucket: Bucket, gradients: dict[Weight, fx.Node], layout: DataLayout
) -> fx.Node:
    """The sum over ranks of a bucket's gradients: this rank's flat shard, or all of them flat."""
    unused = [weight.name for weight in bucket.weights if weight not in gradients]
    if bucket.sharded and unused:
        raise InputError(
            f"the loss does not depend on {unused[0]!r}, and its shard of gradients would be empty",
            hint="set parallel.data_shard to 1 and share the work by parallel.data_replicate",
        )
    parts = [
        in_rows(writer, node, weight.ranks, weight.dim or 0, weight.part)
        for weight, node in gradients.items()
    ]
    packed = in_dtype(writer, packed_rows(writer, parts), layout.reduce_dtype)
    if bucket.sharded:
        packed = scattered_sum(writer, packed, bucket.shard)
    for axis in bucket.axes:
        packed = summed(writer, packed, axis)
    return writer.call(aten.view.default, packed, [-1])
