"""Whether the forward of a deep module does what that of its shallow twin does, block for block.

What code around a stack of blocks does for one of them by its number cannot be seen in the blocks.
So both forwards are captured as Python runs them, before autograd: the deep one must be the twin's
with the second period of its blocks once more for each period that the twin lacks. Capturing the
Python is the cheaper half of a trace; the other half, autograd, then sees the twin alone.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from interlace.graphs.blocks import Stack
from interlace.graphs.periods import PeriodsDifferError


def check_deep_forward(deep: fx.GraphModule, twin: fx.GraphModule, stack: Stack) -> None:
    """Raise PeriodsDifferError unless `deep` is `twin` with its second period repeated."""
    _Comparison(deep, twin, stack).check()


class _Comparison:
    """Operators by their place: those before the first period, those of periods, and those behind.

    What an operator reads must be as far before it as in the twin, or be the same one of those
    before the first period.
    """

    def __init__(self, deep: fx.GraphModule, twin: fx.GraphModule, stack: Stack) -> None:
        self.deep, self.twin, self.stack = deep, twin, stack
        self.bodies = [body_of(deep), body_of(twin)]
        self.index = {node: i for body in self.bodies for i, node in enumerate(body)}
        way = "".join(f"_modules_{part}" for part in stack.path.split(".") if part)
        self.block = re.compile(rf"(?P<way>L_\w*?{re.escape(way)}_modules_)(?P<block>\d+)(?=_)")
        self.begin, self.length = self._first_period()

    def check(self) -> None:
        deep, twin = self.bodies
        behind = self.begin + 2 * self.length
        if behind > len(twin):
            raise PeriodsDifferError("the blocks do not follow each other in the forward")
        for i, node in enumerate(deep):
            later = max(0, i - behind) // self.length + 1 if i >= behind else 0
            periods = min(later, self.stack.left_out)
            self._check_node(node, twin[i - periods * self.length], periods)

    def _first_period(self) -> tuple[int, int]:
        """The first operator of the twin's first period, and the operators of a period."""
        deep, twin = self.bodies
        length, rest = divmod(len(deep) - len(twin), self.stack.left_out)
        if rest or length <= 0:
            raise PeriodsDifferError(
                f"the forward has {len(deep)} operators with {self.stack.depth} blocks and "
                f"{len(twin)} with {self.stack.kept}"
            )
        for i, node in enumerate(twin):
            for source in node.all_input_nodes:
                found = self.block.match(str(source.target)) if is_input(source) else None
                if found and int(found["block"]) == self.stack.head:
                    return i, length
        raise PeriodsDifferError(f"nothing reads parameters of block {self.stack.head}")

    def _check_node(self, node: fx.Node, like: fx.Node, periods: int) -> None:
        def found(source: fx.Node) -> tuple[str, Any]:
            return ("input", str(source.target)) if is_input(source) else ("at", self.index[source])

        def expected(source: fx.Node) -> tuple[str, Any]:
            if is_input(source):
                return "input", self._later(str(source.target), periods)
            at = self.index[source]
            return "at", at if at < self.begin else at + periods * self.length

        equal = node.op == like.op and same(
            described(self.deep, node, found), described(self.twin, like, expected)
        )
        if not equal:
            raise PeriodsDifferError(
                f"{node.name} of the forward is not like {like.name}, {periods} periods of blocks "
                "before it"
            )

    def _later(self, name: str, periods: int) -> str:
        """The name of an input of a block as it is so many periods of blocks later. What is named
        after a block of the head (as a mesh is, after the first that uses it) is the same in all.
        """
        found = self.block.match(name)
        if found is None or int(found["block"]) < self.stack.head:
            return name
        number = int(found["block"]) + periods * self.stack.period
        return f"{found['way']}{number}{name[found.end() :]}"


def is_input(node: fx.Node) -> bool:
    """Whether a node is an input of its graph."""
    return node.op == "placeholder"


def body_of(module: fx.GraphModule) -> list[fx.Node]:
    """The operators of a graph, in order; the last one is its output."""
    return [node for node in module.graph.nodes if not is_input(node)]


def described(module: fx.GraphModule, node: fx.Node, read: Callable[[fx.Node], Any]) -> Any:
    """All that a node does, with `read` of what it reads; of an attribute, what it holds."""
    if node.op == "get_attr":
        return _attribute(module, str(node.target))
    args, kwargs = (fx.node.map_arg(part, read) for part in (node.args, node.kwargs))
    return node.target, args, kwargs


def _attribute(module: fx.GraphModule, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def same(one: Any, other: Any) -> bool:
    """Whether two descriptions are equal. Tensors are equal if they are one tensor, graphs if they
    have equal operators."""
    if one is other:
        return True
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return same(_lines(one), _lines(other))  # each has a class of its own
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return bool(one == other)


def _lines(graph: fx.GraphModule) -> list[Any]:
    """The operators of a graph inside of another one; inputs by their number."""
    number = {node: i for i, node in enumerate(graph.graph.nodes)}
    return [
        (node.op, None) if is_input(node) else (node.op, described(graph, node, number.get))
        for node in graph.graph.nodes
    ]
