"""Trace a rank's chunk of the model into a forward and a backward graph.

Nothing is rewritten here: the graphs hold the operators that eager autograd would run. Only
nodes that compute nothing are dropped (detach, reshapes to the same shape, double transposes).

The joint graph is cut in two: a forward that ends with the loss, and a backward. Nodes keep their
order. Whatever the backward reads of the forward is saved, parameters included. Nodes get names
that depend on the graph alone: tracing drops nodes and leaves gaps in its numbers.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Placement

from interlace.experts.pieces import EXPERT_ROWS
from interlace.graphs.buffers import filled
from interlace.graphs.capture_settings import tensors_put_back, without_fused_recurrence
from interlace.graphs.joint import Joint, input_of
from interlace.graphs.python_reads import BlockReads, Reads
from interlace.graphs.ragged import refuse_sizes
from interlace.graphs.torch_private import Forward, LazyGraphModule, capture_forward, capture_joint
from interlace.graphs.trace_errors import (
    explained,
    refuse_collectives,
    refuse_flex_attention,
    refuse_sparse,
    refuse_writes,
    set_labels_kind,
)

aten = torch.ops.aten
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.alias.default,
        aten.detach.default,
        EXPERT_ROWS,
        filled,
    }
)
"""Operators whose results look at the memory of their inputs."""


RESULTS = "interlace_results"
"""Where a node keeps which tensors it is of those that a forward gives beside its loss."""


@dataclass(frozen=True)
class Binding:
    """Where an input of a graph comes from at run time."""

    role: str
    """`parameter`, `buffer`, `batch`, `saved`, `tangent`, `gradient` or `mesh`."""
    target: str
    """Qualified parameter or buffer name, batch index, or name of the saved value."""


@dataclass(frozen=True)
class StrandGraph:
    """One direction of a chunk: an fx graph, what its inputs are, what its outputs are."""

    name: str
    module: fx.GraphModule
    bindings: dict[str, Binding]
    """By placeholder name."""

    @property
    def graph(self) -> fx.Graph:
        """The graph itself."""
        return self.module.graph

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Output nodes: loss and saved values forward, gradients backward."""
        return output_values(self.graph)


@dataclass(frozen=True)
class ChunkGraphs:
    """Forward and backward of one chunk on one rank."""

    forward: StrandGraph
    """Outputs: the loss, then the values in `saved`."""
    backward: StrandGraph
    """Outputs: the gradients of `parameters`, in that order."""
    saved: tuple[str, ...]
    parameters: tuple[str, ...]
    placements: dict[str, tuple[Placement, ...] | None]
    """Layout of each parameter's gradient, None for plain tensors."""
    reads: Reads | None = None
    """What the forward read beside parameters and buffers, if that was asked for."""
    results: int = 0
    """How many tensors the forward gives beside the loss (`results_of`)."""


def output_node(graph: fx.Graph) -> fx.Node:
    """The one output node of a graph."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def output_values(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """What a graph returns."""
    values = output_node(graph).args[0]
    assert isinstance(values, (tuple, list))
    return tuple(value for value in values if isinstance(value, fx.Node))


def results_of(forward: StrandGraph) -> dict[int, fx.Node]:
    """The nodes of the tensors that a forward gives beside its loss, by their number."""
    found = {
        number: node for node in forward.graph.nodes for number in node.meta.get(RESULTS, ())
    }  # fmt: skip
    return dict(sorted(found.items()))


def trace_chunk(
    module: nn.Module, example_inputs: tuple[Tensor, ...], *, watch: bool = False
) -> ChunkGraphs:
    """Trace `module(*example_inputs) -> scalar loss` on this rank. With `watch` the graphs know
    what the forward read beside parameters and buffers.

    Raises InputError naming what could not be traced.
    """
    forward = trace_forward(module, example_inputs, watch=watch)
    return bind(trace_joint(module, forward, example_inputs), forward.reads)


def trace_forward(
    module: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    watch: bool = False,
    blocks: BlockReads | None = None,
) -> Forward:
    """`module(*example_inputs) -> scalar loss` as Python runs it. Raises InputError as
    `trace_chunk` does."""
    with explained(module), without_fused_recurrence(module):
        forward = capture_forward(module, example_inputs, watch=watch, blocks=blocks)
        if set_labels_kind(forward.notes):  # it reads what it set, so that another branch is taken
            forward = capture_forward(module, example_inputs, watch=watch, blocks=blocks)
        return forward


def trace_joint(module: nn.Module, forward: Forward, example_inputs: tuple[Tensor, ...]) -> Joint:
    """Forward and backward of a module in one graph. Raises InputError as `trace_chunk` does."""
    with explained(module), without_fused_recurrence(module), tensors_put_back(module):
        joint = capture_joint(forward, example_inputs)
    refuse_writes(module, joint.writes)
    refuse_sparse(module, joint.graph)
    refuse_flex_attention(module, joint.graph)
    refuse_collectives(module, joint.graph)
    refuse_sizes(module, joint.graph)
    return joint


def _simplify(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Drop nodes that only rename a value; node order and arithmetic stay. Returns the outputs,
    which the graph no longer has: replacing one among thousands is slow."""
    outputs = output_values(graph)
    output_node(graph).args = ((),)
    kept: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        source = _same_value(node)
        if source is not None:
            node.replace_all_uses_with(source)
            if RESULTS in node.meta:
                source.meta[RESULTS] = (*source.meta.get(RESULTS, ()), *node.meta[RESULTS])
            graph.erase_node(node)
            kept[node] = source
    return tuple(kept.get(node, node) for node in outputs)


def _same_value(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target in (aten.detach.default, aten.alias.default):
        return source
    reshapes = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    if node.target in reshapes and node.meta["val"].shape == source.meta["val"].shape:
        return source
    if node.target == aten.t.default and source.target == aten.t.default:
        return source.all_input_nodes[0]
    return None


def bind(joint: Joint, reads: Reads | None = None) -> ChunkGraphs:
    """Cut a joint graph in two, drop nodes that compute nothing, and say what each input is.
    `reads` is what the forward read beside parameters and buffers, if that is known."""
    for number, result in enumerate(joint.results):
        _mark_result(result, number)
    forward, backward = cut(joint.graph)
    names = [node.name for node in output_values(forward)]
    values = dict(zip(names, _simplify(forward), strict=True))
    loss = values[names[0]]
    gradients = {
        gradient.parameter: (node, gradient.placements)
        for node, gradient in zip(_simplify(backward), joint.gradients, strict=True)
    }
    set_outputs(backward, [node for node, _ in gradients.values()])
    _share_saved(backward, values)
    _copy_parameter_views(backward, values)
    drop_unused_inputs(backward)

    bindings = {n.name: _handed_over(n) for n in backward.nodes if n.op == "placeholder"}
    saved = tuple(name for name, binding in bindings.items() if binding.role == "saved")
    set_outputs(forward, [loss, *(values[name] for name in saved)])
    drop_unused_inputs(forward)
    return ChunkGraphs(
        forward=StrandGraph(
            "forward",
            LazyGraphModule(joint.root, forward),
            {n.name: _binding(n) for n in forward.nodes if n.op == "placeholder"},
        ),
        backward=StrandGraph("backward", LazyGraphModule(joint.root, backward), bindings),
        saved=saved,
        parameters=tuple(gradients),
        placements={name: placements for name, (_, placements) in gradients.items()},
        reads=reads,
        results=len(joint.results),
    )


def _mark_result(node: fx.Node, number: int) -> None:
    """Note at the operator behind a result that it is one. Copies of a node keep the note."""
    while node.target in (aten.detach.default, aten.alias.default):
        node = node.all_input_nodes[0]
    node.meta[RESULTS] = (*node.meta.get(RESULTS, ()), number)


def _share_saved(backward: fx.Graph, values: dict[str, fx.Node]) -> None:
    """One placeholder per saved value: simplifying made some names stand for the same one."""
    first: dict[fx.Node, fx.Node] = {}
    for node in list(backward.nodes):
        if node.op != "placeholder" or node.name not in values:
            continue
        value = values[node.name]
        if value in first:
            node.replace_all_uses_with(first[value])
        first.setdefault(value, node)


def _binding(placeholder: fx.Node) -> Binding:
    source = input_of(placeholder)
    return Binding(source.role, source.target)


def _handed_over(placeholder: fx.Node) -> Binding:
    """What an input of the backward is; the forward hands on what it needs of the batch."""
    binding = _binding(placeholder)
    return Binding("saved", placeholder.name) if binding.role == "batch" else binding


def set_outputs(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Make a graph return `nodes`, and drop what then nobody uses."""
    output = output_node(graph)
    output.args = (tuple(nodes),)
    output.meta.pop("desc", None)
    graph.eliminate_dead_code(is_impure_node=_must_stay)


def _must_stay(node: fx.Node) -> bool:
    """Whether a node stays though nobody in the graph uses its result: it writes to one of its
    arguments, or a caller is given it.

    By torch's own rule attention (it can draw random numbers) and waits stay too, and with them,
    in backward, the forward attention of every layer and the head's matmul up to a collective.
    """
    if node.op in ("placeholder", "output") or RESULTS in node.meta:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def drop_unused_inputs(graph: fx.Graph) -> None:
    """Erase placeholders that nobody reads."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)


def _copy_parameter_views(backward: fx.Graph, values: dict[str, fx.Node]) -> None:
    """Views of parameters are taken again in the backward graph instead of being saved. A value
    that is a parameter as it is, behind an alias, is read as that where experts' operators do:
    stages under ZeRO-3 gather it anew, and digests of other graphs stay what they were."""
    placeholders = {n.name: n for n in backward.nodes if n.op == "placeholder"}
    body = next(n for n in backward.nodes if n.op != "placeholder")
    for name, placeholder in list(placeholders.items()):
        chain = _view_chain(values.get(name))
        if not chain or chain[0].name == name:
            continue
        if len(chain) == 1 and not any(map(_is_own, placeholder.users)):
            continue
        root = placeholders.get(chain[0].name)
        if root is None:
            with backward.inserting_before(placeholder):
                root = backward.placeholder(chain[0].name)
            root.meta = dict(chain[0].meta)
            placeholders[chain[0].name] = root
        current = root
        with backward.inserting_before(body):
            for step in chain[1:]:
                mapping = {step.all_input_nodes[0]: current}
                current = backward.node_copy(step, lambda n, m=mapping: m[n])
        placeholder.replace_all_uses_with(current)


def _is_own(node: fx.Node) -> bool:
    """Whether a node calls an operator of this package, as experts do."""
    return str(node.target).startswith("interlace.")


def _view_chain(node: fx.Node | None) -> list[fx.Node]:
    """[parameter placeholder, view, ..., node] if node is a chain of views, or of none, else []."""
    chain: list[fx.Node] = []
    while node is not None and node.op == "call_function" and node.target in VIEWS:
        if len(node.all_input_nodes) != 1:
            return []
        chain.append(node)
        node = node.all_input_nodes[0]
    if node is None or node.op != "placeholder":
        return []
    return [node, *reversed(chain)] if input_of(node).role == "parameter" else []


def cut(joint: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """(forward, backward) of a graph that returns the loss and then gradients.

    The forward returns the loss, then the saved values; the backward reads them under the same
    names and returns the gradients.
    """
    nodes = list(joint.nodes)
    (loss, *gradients) = nodes[-1].args[0]  # type: ignore[misc]
    end = 1 + max(i for i, node in enumerate(nodes) if node is loss or RESULTS in node.meta)
    later = [node for node in nodes[end:-1] if node.op != "placeholder"]
    tangents = [node for node in nodes[:end] if node.op == "placeholder" and _is_tangent(node)]
    first = [node for node in nodes[:end] if node not in tangents]
    reads = {source for node in later for source in node.all_input_nodes} | set(gradients)
    saved = [node for node in first if node in reads]

    counts: Counter[str] = Counter()
    forward, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in first:
        made[node] = _copy(forward, node, made, counts)
    forward.output(tuple(made[node] for node in (loss, *saved)))

    backward, remade = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in saved:
        remade[node] = backward.placeholder(made[node].name)
        remade[node].meta = dict(node.meta)
    for node in (*tangents, *later):
        remade[node] = _copy(backward, node, remade, counts)
    backward.output(tuple(remade[node] for node in gradients))
    return forward, backward


def _is_tangent(placeholder: fx.Node) -> bool:
    return input_of(placeholder).role == "tangent"


def _copy(
    graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node], counts: Counter[str]
) -> fx.Node:
    """The node in another graph, under the next name of its operator."""
    name = _next_name(node, counts)
    args, kwargs = (fx.node.map_arg(part, made.__getitem__) for part in (node.args, node.kwargs))
    target = name if node.op == "placeholder" else node.target
    copy = graph.create_node(node.op, target, args, kwargs, name)  # type: ignore[arg-type]
    copy.meta = dict(node.meta)
    return copy


def _next_name(node: fx.Node, counts: Counter[str]) -> str:
    """`mm`, `mm_1`, ...; for inputs `primals_1`, ... and `tangents_1`, as torch names them."""
    if node.op == "placeholder":
        base = "tangents" if _is_tangent(node) else "primals"
        counts[base] += 1
        return f"{base}_{counts[base]}"
    packet = getattr(node.target, "overloadpacket", node.target)
    base = str(getattr(packet, "__name__", node.target))
    counts[base] += 1
    return f"{base}_{counts[base] - 1}" if counts[base] > 1 else base
