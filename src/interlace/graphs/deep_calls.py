"""Whether a deep forward with stand-ins calls its blocks as the forward of its shallow twin does.

Both forwards have marks where blocks are entered and left (`stand_ins`). Up to the end of the
second period they must be equal, operator for operator, and so must be what comes behind the
blocks. In between, stand-ins must be called with what the second period is called with, counted
from the period: what the period before gave, what code beside the blocks computed for this period,
or what was there before the first period.

    twin   head | entered(1) .. left(1) | entered(2) .. left(2) |                     | tail
    deep   head | entered(1) .. left(1) | entered(2) .. left(2) | stand_in(3) .. (n)  | tail
"""

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from interlace.graphs.blocks import Stack
from interlace.graphs.deep_forward import body_of, described, is_input, same
from interlace.graphs.periods import PeriodsDifferError
from interlace.graphs.stand_ins import entered, left, number_of, stand_in, tensors_in

Key = tuple[Any, ...]
"""A value of the deep forward: ("input", name), ("at", number of the operator), or ("out", number
of the stand-in, way to it in what that gives)."""
Read = Callable[[fx.Node], Key]


def check_calls(deep: fx.GraphModule, twin: fx.GraphModule, stack: Stack) -> None:
    """Raise PeriodsDifferError unless `deep` calls all blocks of `stack` as `twin` calls those of
    its second period."""
    calls = _Calls(deep, twin, stack)
    calls.check_inside()
    calls.check_periods_that_are_kept()
    calls.check_stand_ins()
    calls.check_tail()


class _Calls:
    def __init__(self, deep: fx.GraphModule, twin: fx.GraphModule, stack: Stack) -> None:
        self.twin, self.stack = twin, stack
        way = "".join(f"_modules_{part}" for part in stack.path.split(".") if part)
        self.block = re.compile(rf"(?P<way>L_\w*?{re.escape(way)}_modules_)(?P<block>\d+)(?=_)")
        self.nodes = body_of(twin)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        ends = self._ends_of_blocks()
        self.first, self.second, self.behind = (
            ends[stack.head + k * stack.period - 1] + 1 for k in range(3)
        )
        """Where the first period, the second one, and what is behind them begin in the twin."""
        if self.second - self.first != self.behind - self.second:
            raise PeriodsDifferError("the two periods have other numbers of operators")
        self.inside = self._operators_inside()
        """Operators of blocks, and the mark where that block is entered."""
        self.deep = _Deep(deep)
        self.fixed: dict[fx.Node, Key] = {}
        """Values that are computed before the first stand-in."""
        self.last: dict[fx.Node, Key] = {}
        """Operators of the twin's second period, as values of the last period that was seen."""

    def check_inside(self) -> None:
        """Of a block that is left out it cannot be seen that it reads more than it is called with,
        so no block of the two periods may."""
        for node in self.nodes[self.first : self.behind]:
            call = self.inside.get(node)
            if call is None:
                continue
            given = {*tensors_in(call.args[1:])}
            for source in node.all_input_nodes:
                own = self.inside.get(source) is call or source in given
                if not own and source.op not in ("placeholder", "get_attr"):
                    raise PeriodsDifferError(f"{node.name} in a block reads {source.name}")

    def check_periods_that_are_kept(self) -> None:
        """Up to the end of the second period."""
        for node in self.nodes[: self.behind]:
            self.fixed[node] = self._match(node, 0, self.fixed.__getitem__)
        self.last = {node: self.fixed[node] for node in self.nodes[self.second : self.behind]}

    def check_stand_ins(self) -> None:
        """Each period of them."""
        for copy in range(1, self.stack.left_out + 1):
            self._check_period(copy)

    def check_tail(self) -> None:
        """What is behind the last stand-in."""
        tail: dict[fx.Node, Key] = {}

        def read(source: fx.Node) -> Key:
            at = self.index[source]
            if self.first <= at < self.second:
                raise PeriodsDifferError(f"{source.name} is read behind the blocks")
            return (self.fixed if at < self.first else self.last if at < self.behind else tail)[
                source
            ]

        for node in self.nodes[self.behind :]:
            tail[node] = self._match(node, self.stack.left_out, read)
        self.deep.check_end()

    def _ends_of_blocks(self) -> dict[int, int]:
        """Where each block of the twin is left, if they are called in order, each of them once."""
        marks = [node for node in self.nodes if node.target in (entered, left)]
        stack = self.stack
        kept = [
            *range(stack.head + 2 * stack.period),
            *range(stack.depth - stack.tail, stack.depth),
        ]
        if [number_of(n) for n in marks] != [number for number in kept for _ in (entered, left)]:
            raise PeriodsDifferError("the blocks are not called one after the other")
        return {number_of(node): self.index[node] for node in marks if node.target is left}

    def _operators_inside(self) -> dict[fx.Node, fx.Node]:
        found, call = {}, None
        for node in self.nodes:
            if node.target is left:
                call = None
            elif call is not None:
                found[node] = call
            elif node.target is entered:
                call = node
        return found

    def _check_period(self, copy: int) -> None:
        now: dict[fx.Node, Key] = {}

        def read(source: fx.Node) -> Key:
            at = self.index[source]
            if at < self.first:
                return self.fixed[source]
            if at < self.second:
                return self.last[self.nodes[at - self.first + self.second]]
            return now[source]

        call: fx.Node | None = None
        for node in self.nodes[self.second : self.behind]:
            if node.target is left:
                number = number_of(node) + copy * self.stack.period
                for way, leaf in _leaves(node.args[1]):
                    out = ("out", number, way)
                    if self.inside.get(leaf) is call and leaf not in now:
                        now[leaf] = out
                    else:  # handed on as it was
                        self.deep.equal[out] = self._wanted(leaf, copy, read)
            elif node not in self.inside:
                now[node] = self._match(node, copy, read)
                call = node
        self.last = now

    def _match(self, node: fx.Node, copy: int, read: Read) -> Key:
        """The next value of the deep forward, if it is computed as this operator of the twin is in
        a period so many periods later. Raises PeriodsDifferError."""
        there = self.deep.next()
        wanted = described(self.twin, node, lambda source: self._wanted(source, copy, read))
        found = self.deep.described(there)
        if node.target is entered and there.target is stand_in:
            number = number_of(node) + copy * self.stack.period
            wanted = (stand_in, (number, *wanted[1][1:]), {})
            found = (stand_in, (found[1][0], *found[1][2:]), {})
        if there.op != node.op or not same(found, wanted):
            raise PeriodsDifferError(
                f"{there.name} of the forward is not like {node.name}, {copy} periods of blocks "
                "before it"
            )
        return self.deep.key(there)

    def _wanted(self, source: fx.Node, copy: int, read: Read) -> Key:
        if is_input(source):
            return "input", self._later(str(source.target), copy)
        try:
            return read(source)
        except KeyError:
            raise PeriodsDifferError(f"{source.name} is read outside of its block") from None

    def _later(self, name: str, copy: int) -> str:
        """The name that an input of a block of the twin has in the deep forward, so many periods
        later. What is named after a block of the head (as a mesh is, after the first that uses it)
        is the same in all."""
        found, stack = self.block.match(name), self.stack
        if found is None or int(found["block"]) < stack.head:
            return name
        number = int(found["block"])
        behind = number >= stack.head + 2 * stack.period
        number += (stack.left_out if behind else copy) * stack.period
        return f"{found['way']}{number}{name[found.end() :]}"


class _Deep:
    """The operators of the deep forward, one after the other; what takes a part of the results of a
    stand-in is not one of its own."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.nodes = iter(body_of(module))
        self.keys: dict[fx.Node, Key] = {}
        self.equal: dict[Key, Key] = {}
        """Results of stand-ins that are one of the inputs as it was, and which value that is."""

    def next(self) -> fx.Node:
        """The next operator."""
        node = self._next()
        if node is None:
            raise PeriodsDifferError("the forward has fewer operators with all blocks")
        return node

    def check_end(self) -> None:
        """Raise PeriodsDifferError if there is one more."""
        if self._next() is not None:
            raise PeriodsDifferError("the forward has more operators with all blocks")

    def _next(self) -> fx.Node | None:
        for node in self.nodes:
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and self.keys.get(source, ("",))[0] == "out":
                _, number, way = self.keys[source]
                self.keys[node] = ("out", number, (*way, node.args[1]))
                continue
            if node.target is stand_in:
                self.keys[node] = ("out", number_of(node), ())
            else:
                self.keys[node] = ("at", len(self.keys))
            return node
        return None

    def key(self, node: fx.Node) -> Key:
        """Which value a node is."""
        if is_input(node):
            return ("input", str(node.target))
        return self.equal.get(self.keys[node], self.keys[node])

    def described(self, node: fx.Node) -> Any:
        """All that a node does."""
        return described(self.module, node, self.key)


def _leaves(value: Any, way: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], fx.Node]]:
    """The nodes in tuples and lists, and the way to each."""
    if isinstance(value, fx.Node):
        yield way, value
    elif isinstance(value, (tuple, list)):
        for i, each in enumerate(value):
            yield from _leaves(each, (*way, i))
