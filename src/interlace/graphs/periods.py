"""Where the blocks of a shallow twin are in its joint graph, and whether its two periods are alike.

The same work in the next period has the same position in the next group. A group of the forward
begins where a parameter of a period's first block is first used; a group of the backward ends with
the first gradient of one. A block's edges are not a group's edges, which does not matter: what
counts is that work comes again after one period. Groups 1 and 2 are the twin's two periods,
smaller ones belong to the head and larger ones to the tail.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, fx

from interlace.graphs.blocks import Stack
from interlace.graphs.joint import Joint, input_of
from interlace.graphs.torch_private import tree_leaves

FIRST, SECOND = 1, 2
_SMALL = 64
"""Elements of the largest constant whose values are compared; a choice."""


class PeriodsDifferError(Exception):
    """The twin's two periods are not alike; the text says where."""


class Place(NamedTuple):
    """Where a node or an output stands."""

    region: str
    """`input`, `forward`, `backward`, `output`; empty for what belongs to no group."""
    group: int
    position: Any


class Marks:
    """The places of everything in a twin's joint graph.

    Raises PeriodsDifferError if the periods cannot be told apart in it.
    """

    def __init__(self, joint: Joint, stack: Stack) -> None:
        self._stack = stack
        self._block = re.compile(re.escape(stack.prefix) + r"(\d+)\.(.+)")
        self.root = joint.root
        nodes = list(joint.graph.nodes)
        (self.loss, *self.gradients) = nodes[-1].args[0]
        self.layouts = [gradient.placements for gradient in joint.gradients]
        self.results = joint.results
        self.inputs: list[fx.Node] = [node for node in nodes if node.op == "placeholder"]
        self.body: list[fx.Node] = [n for n in nodes if n.op not in ("placeholder", "output")]
        self._index = {node: i for i, node in enumerate(self.body)}
        self.place = {node: Place("", 0, node) for node in nodes}
        for node in self.inputs:
            what = input_of(node)
            self.place[node] = self._named("input", what.target, what.role, node)
        self.outputs = [
            self._named("output", gradient.parameter, "", node)
            for gradient, node in zip(joint.gradients, self.gradients, strict=True)
        ]
        self._mark_forward()
        self._mark_backward()

    def _named(self, region: str, name: str, role: str, node: fx.Node) -> Place:
        """The place of a parameter or buffer, or of its gradient."""
        found = self._block.fullmatch(name)
        if not found:
            return Place("", 0, node)
        group, block = divmod(int(found[1]) - self._stack.head, self._stack.period)
        return Place(region, group + FIRST, (block, found[2], role))

    def _mark_forward(self) -> None:
        users = [
            (self.place[node], user)
            for node in self.inputs
            if self.place[node].region
            for user in node.users
            if user in self._index
        ]
        starts = self._bounds("reads its parameters", users)
        start, length = starts[0], self._length("forward", starts)
        first = min(self._index[user] for _, user in users)
        end = min(starts[-1] + length, self._index[self.loss] + 1)
        for i in range(max(start - length, first), end):
            slot, position = divmod(i - start, length)
            self.place[self.body[i]] = Place("forward", FIRST + slot, position)

    def _mark_backward(self) -> None:
        gradients = zip(self.outputs, self.gradients, strict=True)
        ends = [i + 1 for i in reversed(self._bounds("gives gradients", gradients))]
        start, length = ends[0], self._length("backward", ends)
        end = min(ends[-1] + length, len(self.body))
        for i in range(max(start - length, self._index[self.loss] + 1), end):
            slot, position = divmod(i - start, length)
            self.place[self.body[i]] = Place("backward", SECOND - slot, position)

    def _bounds(self, what: str, found: Iterable[tuple[Place, fx.Node]]) -> list[int]:
        """The first operator of those found for the first blocks of groups 1, 2 and 3."""
        first: dict[int, int] = {}
        for place, node in found:
            if place.region and place.position[0] == 0 and node in self._index:
                first[place.group] = min(self._index[node], first.get(place.group, len(self.body)))
        groups = range(FIRST, SECOND + 2)
        for group in groups:
            if group not in first:
                block = self._stack.head + (group - FIRST) * self._stack.period
                raise PeriodsDifferError(f"nothing {what} in {self._stack.prefix}{block}")
        return [first[group] for group in groups]

    @staticmethod
    def _length(region: str, bounds: list[int]) -> int:
        lengths = [b - a for a, b in pairwise(bounds)]
        if lengths[0] != lengths[1] or lengths[0] <= 0:
            raise PeriodsDifferError(
                f"two periods of blocks take {lengths[0]} and {lengths[1]} operators {region}"
            )
        return lengths[0]


def check_periods(marks: Marks) -> None:
    """Raise PeriodsDifferError unless groups 1 and 2 are alike and nothing else reads into them
    but their neighbours, as each reads into its own neighbour."""
    items: dict[Place, tuple[Any, str]] = {}
    for node in (*marks.inputs, *marks.body):
        if marks.place[node].region:
            items[marks.place[node]] = _describe(marks, node), node.name
    results = list(zip(marks.outputs, marks.gradients, marks.layouts, strict=True))
    for place, node, layout in results:
        if place.region:
            name = f"the gradient {node.name}"
            items[place] = (_relative(marks, node, place), layout), name
    _check_alike(items)
    for node in marks.body:
        _check_reads(marks, items, marks.place[node], node.all_input_nodes, node.name)
    for place, node, _ in results:
        _check_reads(marks, items, place, [node], f"the gradient {node.name}")
    for node in marks.results:
        _check_reads(marks, items, Place("", 0, node), [node], f"the result {node.name}")


def _check_alike(items: Mapping[Place, tuple[Any, str]]) -> None:
    for group, other in ((FIRST, SECOND), (SECOND, FIRST)):
        for place, (what, name) in items.items():
            if place.group != group:
                continue
            twin = items.get(place._replace(group=other))
            if twin is None or twin[0] != what:
                of_other = "nothing" if twin is None else twin[1]
                raise PeriodsDifferError(
                    f"{name} of one period of blocks and {of_other} of the next are not alike"
                )


def _check_reads(
    marks: Marks,
    items: Mapping[Place, tuple[Any, str]],
    place: Place,
    sources: Iterable[fx.Node],
    name: str,
) -> None:
    """A reader outside of groups 1 and 2 may read at its own end of the stack, or across groups
    just as group 1 does."""
    if place.region and place.group in (FIRST, SECOND):
        return
    usual = items.get(place._replace(group=FIRST)) if place.region else None
    if usual is not None and usual[0] == items[place][0]:
        return
    for source in sources:
        read = marks.place[source]
        if not read.region:
            continue
        inner = read.group in (FIRST, SECOND)
        if inner or (place.region and (read.group < FIRST) != (place.group < FIRST)):
            raise PeriodsDifferError(
                f"{name}, outside of the repeated blocks, reads {source.name} inside of them"
            )


def _describe(marks: Marks, node: fx.Node) -> Any:
    """All of a node that must be alike in each period."""
    target = None if node.op == "placeholder" else node.target
    if node.op == "get_attr":
        target = _constant(getattr(marks.root, str(node.target)), node.target)
    place = marks.place[node]
    args, kwargs = (
        fx.node.map_arg(part, lambda source: _relative(marks, source, place))
        for part in (node.args, node.kwargs)
    )
    return node.op, target, args, kwargs, _form(node.meta.get("val"))


def _constant(value: Any, name: Any) -> Any:
    """What must be alike of a constant: of a small tensor its values, which code that runs for each
    block makes anew each time; of anything else its name, which no other constant has."""
    if isinstance(value, Tensor) and value.numel() <= _SMALL and type(value) is Tensor:
        return _form(value), repr(value.tolist())
    return name


def _relative(marks: Marks, source: fx.Node, reader: Place) -> Place:
    place = marks.place[source]
    return place._replace(group=place.group - reader.group) if place.region else place


def _form(value: Any) -> tuple[Any, ...]:
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else type(leaf)
        for leaf in tree_leaves(value)
    )
