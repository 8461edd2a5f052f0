"""In which chunk of a model each operator of a traced step runs.

The forward is cut where it is told to be. A backward operator belongs to the chunk of the forward
operator whose gradient it computes: autograd numbers what it records, and tracing notes that number
on the operators of both directions. Sums of gradients carry a number that says nothing, and
operators that were put in later have none; they follow from what they read and who reads them.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from torch import fx

from interlace.graphs.joint_backwards import gives_weights_only
from interlace.graphs.op_graphs import is_free
from interlace.graphs.parts import GraphPart
from interlace.graphs.trace import VIEWS

_Sources = Mapping[fx.Node, tuple[fx.Node, ...]]
"""The operators and inputs that each operator reads, through free nodes."""


def forward_chunks(forward: GraphPart, ends: Sequence[int]) -> dict[str, int]:
    """The chunk of each operator, by name: `ends` are how many stand before each cut."""
    return {name: bisect_right(ends, place) for place, name in enumerate(forward.operators)}


def backward_chunks(
    backward: GraphPart, forward: GraphPart, chunk_of: Mapping[str, int]
) -> dict[str, int]:
    """The chunk of each operator of a backward, by name; `chunk_of` has those of the forward.

    No operator reads one of an earlier chunk, as backwards run from the last chunk to the first. A
    gradient is added to its sum in a chunk that reads the parameter."""
    last = max(chunk_of.values(), default=0)
    sources, users = _sources(backward)
    numbers = _Numbers(forward, chunk_of)
    readers = _parameter_readers(forward, chunk_of)
    gradients = _from_tangents(backward, sources)
    found: dict[fx.Node, int] = {}
    loose = set()
    for node in backward.operators.values():
        bound = min((found[s] for s in sources[node] if s in found and s in gradients),
                    default=last)  # fmt: skip
        added = _added_to(node, sources, backward)
        wanted = numbers.chunk(node)
        if added:
            known = [c for name in added for c in readers.get(name, ()) if c <= bound]
            wanted = max(known, default=bound)
        if wanted is None or node not in gradients:
            loose.add(node)
        found[node] = bound if wanted is None else min(wanted, bound)
    for node in reversed(list(backward.operators.values())):
        if node in loose and users[node]:
            found[node] = max(found[user] for user in users[node])
    return {name: found[node] for name, node in backward.operators.items()}


def weight_half(backward: GraphPart, chunk_of: Mapping[str, int]) -> frozenset[str]:
    """The operators that compute gradients of weights and nothing that another chunk waits for.

    Nobody waits for the gradients of the first chunk; there those operators stay behind that more
    than one weight's gradient follows from, as elsewhere, but for those that compute nothing else
    than a weight's and its bias's."""
    _, users = _sources(backward)
    chunk = {node: chunk_of[name] for name, node in backward.operators.items()}
    awaited: set[fx.Node] = set()
    sinks: dict[fx.Node, int] = {}
    has_awaited = set()
    for index, node in reversed(list(enumerate(backward.operators.values()))):
        own = [user for user in users[node] if chunk[user] == chunk[node]]
        if len(own) < len(users[node]) or any(user in awaited for user in own):
            awaited.add(node)
            has_awaited.add(chunk[node])
        sinks[node] = 0 if own else 1 << index
        for user in own:
            sinks[node] |= sinks[user]

    def is_late(node: fx.Node) -> bool:
        if chunk[node] in has_awaited:
            return node not in awaited
        return sinks[node].bit_count() < 2 or gives_weights_only(node)

    return frozenset(name for name, node in backward.operators.items() if is_late(node))


class _Numbers:
    """Autograd's numbers of the forward."""

    def __init__(self, forward: GraphPart, chunk_of: Mapping[str, int]) -> None:
        found = [
            (node.meta["seq_nr"], chunk_of[name])
            for name, node in forward.operators.items()
            if isinstance(node.meta.get("seq_nr"), int)
        ]
        in_order = all(a[0] <= b[0] for a, b in pairwise(found))
        known = dict(found)
        views = [(n, c) for n, c in _views(forward, chunk_of) if n not in known]
        self._found = sorted([*found, *views]) if in_order else []
        """Numbers out of order say nothing."""

    def chunk(self, node: fx.Node) -> int | None:
        """The chunk of the forward operator of the same number, or of the last one before."""
        number = node.meta.get("seq_nr")
        if not self._found or not isinstance(number, int):
            return None
        place = bisect_right(self._found, number, key=lambda each: each[0])
        return self._found[max(0, place - 1)][1]


def _views(forward: GraphPart, chunk_of: Mapping[str, int]) -> list[tuple[int, int]]:
    """(number, chunk) of each view: it is made again by who reads it, so there its gradient is
    computed too. Of an image that is doubled by `expand`, the chunk that reads the large one adds
    up the gradient of the small one, which is what is handed over."""
    first: dict[fx.Node, int] = {}
    found = []
    for node in reversed(forward.strand.graph.nodes):
        readers = [
            chunk_of[user.name] if user.name in chunk_of else first.get(user)
            for user in node.users
        ]  # fmt: skip
        chunks = [chunk for chunk in readers if chunk is not None]
        if not chunks or node.name in chunk_of:
            continue
        first[node] = min(chunks)
        if node.target in VIEWS and isinstance(node.meta.get("seq_nr"), int):
            found.append((node.meta["seq_nr"], first[node]))
    return found


def _sources(part: GraphPart) -> tuple[_Sources, Mapping[fx.Node, list[fx.Node]]]:
    """What each operator reads, and who reads each operator."""
    through: dict[fx.Node, tuple[fx.Node, ...]] = {}
    sources: dict[fx.Node, tuple[fx.Node, ...]] = {}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in part.operators.values()}
    for node in part.strand.graph.nodes:
        if node.op == "output":
            continue
        behind = tuple(dict.fromkeys(n for s in node.all_input_nodes for n in through[s]))
        if node in users:
            sources[node] = behind
            for source in behind:
                if source in users:
                    users[source].append(node)
        through[node] = behind if is_free(node) and node.op == "call_function" else (node,)
    return sources, users


def _parameter_readers(
    forward: GraphPart, chunk_of: Mapping[str, int]
) -> dict[str, Collection[int]]:
    """The chunks whose forward reads each parameter, by name."""
    found: dict[str, set[int]] = {}
    sources, _ = _sources(forward)
    for name, node in forward.operators.items():
        for source in sources[node]:
            if source in forward.inputs:
                found.setdefault(forward.inputs[source].target, set()).add(chunk_of[name])
    return dict(found)


def _added_to(node: fx.Node, sources: _Sources, backward: GraphPart) -> list[str]:
    """The parameters whose sums of gradients an operator adds to."""
    bindings = (backward.inputs.get(source) for source in sources[node])
    return [each.target for each in bindings if each is not None and "gradient" in each.role]


def _from_tangents(backward: GraphPart, sources: _Sources) -> set[fx.Node]:
    """The operators that depend on the gradient of the loss; others, such as what is computed
    again, may run at any time before their readers."""
    found = {node for node, binding in backward.inputs.items() if binding.role == "tangent"}
    for node in backward.operators.values():
        if any(source in found for source in sources[node]):
            found.add(node)
    return found
