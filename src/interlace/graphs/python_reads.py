"""What a captured forward read of Python, and what blocks that were left out of it would have read.

A capture keeps a guard for each value that a forward read: the way to it and how it is compared.
A block that a stand-in took the place of would have read what the block of its kind did that was
captured, in its own place: there the same guards are put. If one of them asks for another value (a
block's own number, say), the stand-in could be for a block that does something else.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from torch import Tensor, nn

_VALUES = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH"})
"""Guards on plain values, which are kept wherever the value was read."""
LOOKED_AT_ELSEWHERE = frozenset({"TENSOR_MATCH", "DUPLICATE_INPUT", "EMPTY_NN_MODULE_HOOKS_DICT"})
"""Guards on tensors and hooks, which `runtime.binding` looks at itself."""


def is_kept(guard: Any) -> bool:
    """Whether a step watches what a guard is on: values anywhere, and all below the module."""
    kind = guard.create_fn_name()
    below = guard.name.startswith("L['self']") and kind not in LOOKED_AT_ELSEWHERE
    return not guard.name.startswith("L['batch']") and (below or kind in _VALUES)


class Reads:
    """What a traced forward read beside parameters and buffers, as dynamo's guards know it:
    attributes, elements of lists, values of closures and of modules' globals."""

    def __init__(self, module: nn.Module, manager: Any) -> None:
        self._manager = manager
        self._locals = {"self": module}
        self._scope = {**manager.global_scope, "L": self._locals, **manager.closure_vars}
        self.tensors: tuple[tuple[str, Tensor, Callable[[], Any]], ...] = ()
        """Tensors that the graph holds as constants: the expression that gave each (in dynamo's
        words), the tensor, and a function that evaluates the expression again."""

    def values(self, expressions: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Those of these expressions that have a value now, which those on the batch have not."""
        for expression in expressions:
            with suppress(Exception):  # that of anybody's attribute that was asked for in vain
                yield expression, eval(expression, self._scope)

    def hold_tensors(self, expressions: Iterable[str], known: Collection[int]) -> None:
        """Note as constants the tensors that these expressions give, each once; `known` are ids of
        those that are none."""
        found = {
            id(tensor): (name, tensor, eval(f"lambda: {name}", self._scope))
            for name, tensor in self.values(expressions)
            if id(tensor) not in known
        }
        self.tensors = tuple(found.values())

    def hold(self) -> bool:
        """Whether all values are what they were. Tensors are not looked at."""
        return self._manager.check(self._locals)

    def broken(self) -> str:
        """The first value that is not what it was: dynamo's condition, and where it was read."""
        parts = self._manager.check_verbose(self._locals).verbose_code_parts
        return parts[0] if parts else ""


class BlockReads:
    """The reads of `blocks`, `like` those of others, by their numbers; the list of blocks is at
    `path` in the module. `number` is the attribute that the marks of calls look at, and `end` puts
    the forwards of blocks back that were marked."""

    def __init__(
        self,
        path: str,
        blocks: Mapping[int, nn.Module],
        like: Mapping[int, int],
        number: str,
        end: Callable[[], None],
    ) -> None:
        self._blocks, self._like, self._number, self._end = blocks, like, number, end
        parts = [part for part in path.split(".") if part]
        self._base = "".join(
            ["L['self']", *(f"._modules['{part}']" for part in parts), "._modules"]
        )
        block = rf"{re.escape(self._base)}\['\d+'\]"
        self._marking = re.compile(
            rf"dict\(type\({block}\)\.__dict__\)\['forward'\]\.__closure__\[\d+\]\.cell_contents"
        )
        self._own: dict[int, list[Any]] = {}
        self.differ = ""
        """Why a block may not be like the one that stands for it, once `compare` has found that."""

    def add(self, guards: Any, elsewhere: Collection[str]) -> None:
        """Put the guards of the blocks that were captured onto the others too, but for those of
        kinds that are looked at `elsewhere`. `guards` is torch's set of guards, of which none has
        its condition yet."""
        self._end()
        for guard in list(guards):
            self._without_marks(guards, guard)
        sources = self._ways_to_blocks(guards)
        self._own = {
            number: [
                guard
                for guard in guards
                if guard.originating_source.name.startswith(self._name(number))
                and guard.create_fn_name() not in elsewhere
            ]
            for number in set(self._like.values())
        }
        known = {guard: guard for guard in guards}
        for number, like in self._like.items():
            names = (self._name(like), self._name(number))
            if any(name not in sources for name in names):
                self.differ = f"the capture did not see block {number} or {like}"
                return
            block, other = (sources[name] for name in names)
            moved = _Moved(lambda source, a=block, b=other: b if source == a else None)
            made = [_moved_guard(guard, moved) for guard in self._own[like]]
            self._own[number] = [known.get(guard, guard) for guard in made]
            for guard in made:
                guards.add(guard, collect_debug_stack=False)

    def compare(self, guards: Any, others: Iterable[tuple[str, Any]]) -> None:
        """Say in `differ` if a block reads other values than the one that is like it, or if a block
        was also read as something else, as code does that asks which block it is. After torch has
        written the guards' conditions; `others` are values, by their names, whose guards it has
        not."""
        names = {id(block): self._name(number) for number, block in self._blocks.items()}
        own = [(guard.name, guard.obj_weakref and guard.obj_weakref()) for guard in guards]
        for name, value in (*own, *others):
            if names.get(id(value), name) != name:
                self.differ = f"{names[id(value)]} is also read as {name}"
        for number, like in self._like.items():
            differing = sorted(self._conditions(number) ^ self._conditions(like))
            if differing and not self.differ:
                self.differ = f"block {number} is not like block {like}: {differing[0]}"

    def _without_marks(self, guards: Any, guard: Any) -> None:
        """Leave out a guard on what marks calls; for one on a block's forward, which the marking
        forward holds, the way there that is left when the marks are gone."""
        source = guard.originating_source
        asked = getattr(guard.create_fn, "keywords", {}).values()  # of a partial function
        marks = self._number in source.name or self._number in asked
        if not marks and not self._marking.match(source.name):
            return
        guards.inner.remove(guard)
        moved = _Moved(self._forward_itself)
        whole = moved(source)
        if not marks and not self._marking.match(whole.name):
            guards.add(_moved_guard(guard, moved), collect_debug_stack=False)

    def _forward_itself(self, source: Any) -> Any:
        """For the cell in which the marking forward keeps the block's own: where that is without
        marks."""
        cell = self._marking.fullmatch(source.name)
        held = cell and getattr(source, "freevar_name", "") == "forward"
        return source.base.base.base if held else None

    def _conditions(self, number: int) -> set[str]:
        name = self._name(number)
        return {
            code.replace(name, "block")
            for guard in self._own.get(number, ())
            for code in guard.code_list or ()  # none where another guard says the same
        }

    def _name(self, number: int) -> str:
        return f"{self._base}['{number}']"

    def _ways_to_blocks(self, guards: Any) -> dict[str, Any]:
        """Blocks as torch's capture names them, by that name."""
        wanted = {self._name(number) for pair in self._like.items() for number in pair}
        found = {}
        for guard in guards:
            source = guard.originating_source
            while source is not None:
                if source.name in wanted:
                    found[source.name] = source
                source = getattr(source, "base", None)
        return found


class _Moved:
    """Ways to values, with parts of them replaced: `replaced` gives the new part, or None."""

    def __init__(self, replaced: Callable[[Any], Any]) -> None:
        self._replaced = replaced
        self._made: dict[int, tuple[Any, Any]] = {}
        """By identity, as equality looks at the whole way: the part, which stays alive, and what
        it becomes."""

    def __call__(self, source: Any) -> Any:
        if id(source) not in self._made:
            self._made[id(source)] = (source, self._make(source))
        return self._made[id(source)][1]

    def _make(self, source: Any) -> Any:
        if (new := self._replaced(source)) is not None:
            return new
        parts = {
            name: value
            for name in _fields(type(source))
            if dataclasses.is_dataclass(value := getattr(source, name))
        }
        moved = {name: self(value) for name, value in parts.items()}
        changed = {name: value for name, value in moved.items() if value is not parts[name]}
        return dataclasses.replace(source, **changed) if changed else source


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _moved_guard(guard: Any, moved: _Moved) -> Any:
    """The same condition on the value at another place."""
    new = type(guard)(moved(guard.originating_source), guard.create_fn)
    new.stack, new.user_stack = guard.stack, guard.user_stack
    return new
