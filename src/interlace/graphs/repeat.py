"""Trace a few blocks of a deep module, and copy the operators of the middle ones for the others.

A twin with the head, two periods and the tail of the stack of blocks is traced. If its two periods
turn out to be alike (operators, constants, shapes, and, counted from the period, what they read),
the second one is copied, in the joint graph of forward and backward, once for each period that the
twin lacks. What follows (cutting, recomputation, data parallelism) sees the graph of all blocks.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, TypeVar

from torch import Tensor, fx, nn

from interlace.errors import InputError
from interlace.graphs.blocks import Stack, find_stack, shallow
from interlace.graphs.deep_calls import check_calls
from interlace.graphs.deep_forward import check_deep_forward
from interlace.graphs.joint import GradientOf, Joint, input_of, set_input
from interlace.graphs.periods import (
    FIRST,
    SECOND,
    Marks,
    PeriodsDifferError,
    Place,
    check_periods,
)
from interlace.graphs.python_reads import BlockReads
from interlace.graphs.stand_ins import NUMBER, forms_of, marked, without_marks
from interlace.graphs.torch_private import Forward
from interlace.graphs.trace import ChunkGraphs, bind, trace_forward, trace_joint

T = TypeVar("T")
_WORTH = 2
"""With `watch` a twin is captured if the module has so many times its blocks. Autograd takes about
1.6 times as long to trace as Python to capture, so the twin pays off from 1.6 times on."""


class Repeated(NamedTuple):
    """The graphs of a module, and how they came about."""

    chunk: ChunkGraphs
    copied: int
    """Blocks that were copied instead of traced."""
    reason: str
    """Why all blocks were traced, if they were."""


def trace_repeated(
    module: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    watch: bool = False,
    copies: bool = False,
) -> Repeated:
    """The graphs that `trace_chunk(module, example_inputs)` gives, node for node, for the cost of
    tracing a few blocks. Copied blocks share small constants that each would have made anew.

    All blocks are traced after all if no period of them can stand for the others. Without `watch`,
    code around the blocks must treat blocks of one kind alike: what it does for one in the middle
    by its number is not seen. With `watch` the forward of the whole module is captured, and is
    compared with that of a few blocks before their backward stands for all; the graphs know what it
    read beside parameters and buffers. `copies` says that all blocks of a kind were made as copies
    of one, of which fewer are traced then, and not compared. Raises InputError naming what could
    not be traced.
    """
    stack = find_stack(module)
    if copies and isinstance(stack, Stack):
        stack = stack.of_copies()
    if watch and isinstance(stack, Stack) and stack.depth >= _WORTH * stack.kept:
        with suppress(PeriodsDifferError, InputError):  # what follows sees more, or says why
            return _with_stand_ins(module, stack, example_inputs)
    deep = trace_forward(module, example_inputs, watch=True) if watch else None
    reads = None if deep is None else deep.reads
    reason = ""
    if isinstance(stack, str):
        reason = stack
    elif deep is None or stack.depth >= _WORTH * stack.kept:
        try:
            twin = _joint_of_twin(module, stack, example_inputs, deep)
            joint = repeat(twin, stack, compare=not copies)
            return Repeated(bind(joint, reads), stack.depth - stack.kept, "")
        except PeriodsDifferError as why:
            reason = str(why)
        except InputError as why:  # if it is not for the missing blocks, the next line raises too
            reason = f"with {stack.kept} of its blocks, {why.message}"
    if deep is None:
        deep = trace_forward(module, example_inputs)
    return Repeated(bind(trace_joint(module, deep, example_inputs), reads), 0, reason)


def _with_stand_ins(
    module: nn.Module, stack: Stack, example_inputs: tuple[Tensor, ...]
) -> Repeated:
    """As `trace_repeated` with `watch`, for the cost of capturing how the blocks in the middle are
    called, and not what they do. Raises PeriodsDifferError if that does not show that they are
    called alike, and InputError."""
    blocks = dict(enumerate(module.get_submodule(stack.path).children()))
    twin = shallow(module, stack)
    with marked(blocks):
        shallow_forward = trace_forward(twin, example_inputs)
    forms = forms_of(shallow_forward.module, stack)
    like = {n: stack.head + stack.period + (n - stack.head) % stack.period for n in forms}
    with marked(blocks, forms) as marks:
        reads = BlockReads(stack.path, blocks, like, NUMBER, marks.close)
        deep = trace_forward(module, example_inputs, watch=True, blocks=reads)
    if reads.differ:
        raise PeriodsDifferError(reads.differ)
    check_calls(deep.module, shallow_forward.module, stack)
    without_marks(shallow_forward.module)
    joint = repeat(trace_joint(twin, shallow_forward, example_inputs), stack)
    return Repeated(bind(joint, deep.reads), stack.depth - stack.kept, "")


def _joint_of_twin(
    module: nn.Module, stack: Stack, example_inputs: tuple[Tensor, ...], deep: Forward | None
) -> Joint:
    """The joint graph of a few blocks; if `deep`, the whole forward, is known, it is compared."""
    twin = shallow(module, stack)
    forward = trace_forward(twin, example_inputs)
    if deep is not None:
        check_deep_forward(deep.module, forward.module, stack)
    return trace_joint(twin, forward, example_inputs)


def repeat(joint: Joint, stack: Stack, *, compare: bool = True) -> Joint:
    """The joint graph of all of the stack's blocks, from that of its twin.

    Raises PeriodsDifferError if the twin's two periods are not alike, so far as they are compared.
    """
    marks = Marks(joint, stack)
    if compare:
        check_periods(marks)
    return _Writer(joint, marks, stack).write()


class _Writer:
    """Copies the twin's graph, with group 2 once more for each period that is left out.

    Those copies are groups 3, 4, ...; what was behind group 2 comes after them.
    """

    def __init__(self, joint: Joint, marks: Marks, stack: Stack) -> None:
        self.joint = joint
        self.marks = marks
        self.stack = stack
        self.numbers = _Numbers(marks, stack)
        self.graph = fx.Graph()
        self.made: dict[Place, fx.Node] = {}
        prefix = re.escape(stack.prefix)
        self.block = re.compile(rf"(?P<self>L\['self'\]\.)?{prefix}(?P<block>\d+)(?=\.|$)")

    def write(self) -> Joint:
        marks = self.marks
        for node, group in self._repeated(marks.inputs, marks.place.__getitem__):
            what = input_of(node)
            name = self._renamed(what.target, marks.place[node], group)
            set_input(self._copy(node, group), replace(what, target=name))
        for node, group in self._repeated(marks.body, marks.place.__getitem__):
            self._copy(node, group)
        outputs = [self.made[self._read(marks.loss, Place("", 0, None), 0)]]
        gradients: list[GradientOf] = []
        results = zip(marks.outputs, marks.gradients, self.joint.gradients, strict=True)
        for (place, node, gradient), group in self._repeated(results, lambda result: result[0]):
            outputs.append(self.made[self._read(node, place, group)])
            name = self._renamed(gradient.parameter, place, group)
            gradients.append(replace(gradient, parameter=name))
        self.graph.output(tuple(outputs))
        beside = [self.made[self._read(n, Place("", 0, None), 0)] for n in self.joint.results]
        return Joint(self.graph, self.joint.root, tuple(gradients), results=tuple(beside))

    def _repeated(
        self, items: Iterable[T], place_of: Callable[[T], Place]
    ) -> Iterator[tuple[T, int]]:
        """Each item with its group in the whole graph; a run of group 2 comes several times, in
        the order of blocks, or against it in the backward."""
        copies = range(SECOND, SECOND + self.stack.left_out + 1)
        for (region, group), run in groupby(items, lambda item: place_of(item)[:2]):
            if group != SECOND or not region:
                yield from ((item, self._moved(place_of(item))) for item in run)
                continue
            same = list(run)
            for copy in reversed(copies) if region == "backward" else copies:
                yield from ((item, copy) for item in same)

    def _moved(self, place: Place) -> int:
        """The group in the whole graph of what is not copied."""
        return place.group + (self.stack.left_out if place.group > SECOND else 0)

    def _read(self, source: fx.Node, reader: Place, group: int) -> Place:
        """The place in the whole graph of what a reader, which is in `group` there, reads."""
        place = self.marks.place[source]
        if not place.region:
            return place
        ahead = place.group - reader.group
        return place._replace(group=group + ahead if reader.region else self._moved(place))

    def _copy(self, node: fx.Node, group: int) -> fx.Node:
        place = self.marks.place[node]
        args, kwargs = (
            fx.node.map_arg(part, lambda source: self.made[self._read(source, place, group)])
            for part in (node.args, node.kwargs)
        )
        # With a name, or fx would work one out of the target.
        copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)  # type: ignore[arg-type]
        copy.meta = dict(node.meta)
        self.numbers.renumber(copy, place, group)
        modules = node.meta.get("nn_module_stack")
        if modules:
            copy.meta["nn_module_stack"] = {
                key: (self._renamed(path, place, group), kind)
                for key, (path, kind) in modules.items()
            }
        self.made[place._replace(group=group)] = copy
        return copy

    def _renamed(self, name: str, place: Place, group: int) -> str:
        """A name in the twin as a name in the whole module, for what is in `group` there."""

        def number(found: re.Match[str]) -> str:
            block, stack = int(found["block"]), self.stack
            if place.region:
                block += (group - place.group) * stack.period
            elif block >= stack.head + 2 * stack.period:
                block += stack.depth - stack.kept
            return f"{found['self'] or ''}{stack.prefix}{block}"

        found = self.block.match(name)
        return number(found) + name[found.end() :] if found else name


class _Numbers:
    """Autograd's numbers, which say whose gradient an operator computes (`graphs.chunk_places`).

    They count what the forward records, so those of the next period are as much larger as a period
    has records, and all behind the periods are larger by the records of those that were left out.
    """

    def __init__(self, marks: Marks, stack: Stack) -> None:
        first: dict[int, int] = {}
        self._last = -1
        """Of the forward. Sums of gradients carry this one or larger ones, wherever they are."""
        for node in marks.body:
            place, number = marks.place[node], node.meta.get("seq_nr")
            if isinstance(number, int):
                self._last = max(number, self._last)
                if place.region == "forward":
                    first[place.group] = min(number, first.get(place.group, number))
            if node is marks.loss:
                break
        known = FIRST in first and SECOND in first
        self._period = first[SECOND] - first[FIRST] if known else 0
        self._behind = first[SECOND] + self._period if known else 0
        """The first number behind the two periods."""
        self._left_out = stack.left_out

    def renumber(self, copy: fx.Node, place: Place, group: int) -> None:
        """Give a copy in `group`, of what is at `place`, the number that it has in the whole
        graph."""
        number = copy.meta.get("seq_nr")
        if not isinstance(number, int):
            return
        periods = group - place.group
        if not place.region or number >= self._last:
            periods = self._left_out if number >= self._behind else 0
        copy.meta["seq_nr"] = number + periods * self._period
