"""Which block of the model a node of a forward graph belongs to.

Dynamo notes on every node the module whose forward made it. Blocks are the elements of an
`nn.ModuleList` or `nn.Sequential` that hold two matmuls at least, or attention.
"""

import operator
import re
from collections import Counter
from collections.abc import Iterator

from torch import fx

from interlace.errors import InputError
from interlace.graphs.collectives import is_wait, row_of
from interlace.graphs.op_graphs import kind_of_target
from interlace.ir.graph import Kind

_ROOT = re.compile(r"^L\['\w+'\]\.?")
"""Beginning of the paths that dynamo gives modules, `L['self']` for the one that is traced."""
_WORK = {Kind.MATMUL: 1, Kind.ATTENTION: 2}
"""What an operator counts in the search for blocks, each of which has two or more: attention is two
matmuls in one."""


def kind_of(node: fx.Node) -> Kind:
    """The kind of a compute node; `other` for look-ups in tuples."""
    return Kind.OTHER if node.target is operator.getitem else kind_of_target(node.target)


def is_sum(node: fx.Node) -> bool:
    """Whether a node waits for a reduction over ranks."""
    if not is_wait(node):
        return False
    row = row_of(node.all_input_nodes[0].target)
    return row is not None and row.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)


def module_path(node: fx.Node) -> str:
    """Qualified name of the module that made a node, as in `model.blocks.3.ffn.gate`; empty for
    inputs and for the outermost module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name, _ = list(stack.values())[-1]
    return _ROOT.sub("", name)


def blocks_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """The block of every node that is in one, as in `model.blocks.3`.

    Raises InputError when the model has no list of blocks.
    """
    work: Counter[str] = Counter()
    paths = {node: module_path(node) for node in graph.nodes if node.op == "call_function"}
    for node, path in paths.items():
        work.update(dict.fromkeys(_list_elements(path), _WORK.get(kind_of(node), 0)))
    elements = {name for name, amount in work.items() if amount >= 2}
    siblings = Counter(_list_of(name) for name in elements)
    blocks = {name for name in elements if siblings[_list_of(name)] >= 2} or elements
    found = {}
    for node, path in paths.items():
        block = next((name for name in _list_elements(path) if name in blocks), None)
        if block is not None:
            found[node] = block
    if not found:
        raise InputError(
            "train.recompute needs the model's blocks, and it has no ModuleList or Sequential of "
            "modules with two matmuls or attention each",
            hint="put its layers into an nn.ModuleList, or set train.recompute to attention or "
            "none",
        )
    return found


def _list_elements(path: str) -> Iterator[str]:
    """Prefixes of `path` that name an element of a list, outermost first."""
    parts = path.split(".")
    for end, part in enumerate(parts, 1):
        if part.isdigit():
            yield ".".join(parts[:end])


def _list_of(element: str) -> str:
    return element.rpartition(".")[0]
