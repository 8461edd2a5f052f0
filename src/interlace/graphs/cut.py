"""Cut a joint graph in two: a forward that ends with the loss, and a backward.

Nodes keep their order. Whatever the backward reads of the forward is saved, parameters included.
Nodes get names that depend on the graph alone: tracing drops nodes and leaves gaps in its numbers.
"""

from collections import Counter

from torch import fx

from interlace.graphs.torch_private import input_of


def cut(joint: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """(forward, backward) of a graph that returns the loss and then gradients.

    The forward returns the loss, then the saved values; the backward reads them under the same
    names and returns the gradients.
    """
    nodes = list(joint.nodes)
    (loss, *gradients) = nodes[-1].args[0]  # type: ignore[misc]
    end = nodes.index(loss) + 1
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
