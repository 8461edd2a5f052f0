"""The stack of blocks of a module, and a shallow twin that holds one period of each kind.

A deep model is a list of blocks that differ in their weights only. Some models alternate kinds
(local and global attention, dense and sparse layers): then what repeats is a period of several
blocks. The blocks before the first period and after the last one are the head and the tail.
"""

import copy
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_LONGEST_PERIOD = 8
"""Blocks after which a model may repeat itself at most; a choice."""
_SHORTEST = 5
"""Blocks of the smallest twin."""


@dataclass(frozen=True)
class Stack:
    """A list of blocks, and which of them a shallow twin keeps: head, two periods and tail.

    Next to the two periods, where they are compared, head and tail are like them: operators reach
    across the edges of blocks, in the backward by two blocks.
    """

    path: str
    """Qualified name of the list; empty if the module is the list itself."""
    depth: int
    """Blocks of the whole module."""
    head: int
    """Blocks before the first period, at least 1."""
    period: int
    """Blocks after which the same kinds come again."""
    tail: int
    """Blocks after the last period, at least 1 and a period."""

    @property
    def kept(self) -> int:
        """Blocks of the twin."""
        return self.head + 2 * self.period + self.tail

    @property
    def left_out(self) -> int:
        """Periods that the twin lacks."""
        return (self.depth - self.kept) // self.period

    def of_copies(self) -> "Stack":
        """The same for blocks that are known to be copies of each other: nothing is compared, so a
        period needs no block before it. Blocks of several kinds in turn keep theirs."""
        return self if self.period > 1 else replace(self, head=self.head - 1)

    @property
    def prefix(self) -> str:
        """What the names of the blocks' parameters begin with."""
        return f"{self.path}." if self.path else ""


def find_stack(module: nn.Module) -> Stack | str:
    """The longest list of blocks in `module`; or in words why no period of it can stand for all,
    empty if it is too short for that to save anything.

    Lists are `nn.ModuleList` and `nn.Sequential`; a list inside a block does not count.
    """
    lists = _outermost_lists(module)
    if not lists:
        return f"{type(module).__name__} holds no ModuleList or Sequential of blocks"
    path, blocks = max(lists.items(), key=lambda item: len(item[1]))
    depth = len(blocks)
    if depth <= _SHORTEST:
        return ""
    kinds = _kinds(blocks)
    found = [
        Stack(path, depth, *parts)
        for period in range(1, min(_LONGEST_PERIOD, depth // 3) + 1)
        if (parts := _parts(kinds, period)) is not None
    ]
    if not found:
        return f"the {depth} blocks of {path or type(module).__name__} do not repeat often enough"
    return min(found, key=lambda stack: stack.kept)


def shallow(module: nn.Module, stack: Stack) -> nn.Module:
    """A twin of `module` with the stack's kept blocks, renumbered. It shares all blocks, weights
    and buffers with `module`; only the modules on the way to the list are copied."""
    first = stack.head + 2 * stack.period
    if not stack.path:
        return _with_children(module, _renumbered(module, first, stack.tail))
    names = stack.path.split(".")
    owners = [module]
    for name in names:
        owners.append(owners[-1].get_submodule(name))
    twin = _with_children(owners[-1], _renumbered(owners[-1], first, stack.tail))
    for owner, name in zip(reversed(owners[:-1]), reversed(names), strict=True):
        twin = _with_children(owner, dict(owner.named_children()) | {name: twin})
    return twin


def _renumbered(blocks: nn.Module, first: int, last: int) -> dict[str, nn.Module]:
    children = list(blocks.children())
    return {str(i): block for i, block in enumerate(children[:first] + children[-last:])}


def _with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(children)
    return twin


def _outermost_lists(module: nn.Module) -> dict[str, list[nn.Module]]:
    found: dict[str, list[nn.Module]] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{path}.") or not path for path in found)
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and not inside and len(child) > 1:
            found[name] = list(child)
    return found


def _kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """A number per block; blocks of one number run the same code on tensors of the same form."""
    examples: list[int] = []
    kinds = []
    for index, block in enumerate(blocks):
        for kind, example in enumerate(examples):
            if _Comparison(example, index).alike(blocks[example], block):
                kinds.append(kind)
                break
        else:
            kinds.append(len(examples))
            examples.append(index)
    return kinds


def _parts(kinds: Sequence[int], period: int) -> tuple[int, int, int] | None:
    """(head, period, tail) of the longest stretch of that period, if it leaves something out."""
    depth = len(kinds)
    length, start = 0, 0
    begin = 0
    for i in range(depth):
        if i >= period and kinds[i] != kinds[i - period]:
            begin = i - period + 1
        if i + 1 - begin > length:
            length, start = i + 1 - begin, begin
    head = start + period if start else 1
    end = min(start + length, depth - 1) - period
    periods = (end - head) // period
    return (head, period, depth - head - periods * period) if periods > 2 else None


class _Comparison:
    """Whether two blocks are of one kind: same classes, same forms of tensors, same settings,
    same hooks. A setting that is a block's own number counts as the same."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.compared: set[tuple[int, int]] = set()

    def alike(self, a: Any, b: Any) -> bool:
        if a is b or (id(a), id(b)) in self.compared:
            return True
        if type(a) is not type(b):
            return False
        self.compared.add((id(a), id(b)))
        if isinstance(a, nn.Module):
            return self._modules(a, b)
        if isinstance(a, Tensor):
            return False  # a tensor that is neither parameter nor buffer is a constant of the code
        if isinstance(a, Mapping):
            return list(a) == list(b) and self._all(a.values(), b.values())
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and self._all(a, b)
        if isinstance(a, types.FunctionType):
            cells = [[c.cell_contents for c in f.__closure__ or ()] for f in (a, b)]
            same = a.__code__ is b.__code__ and self.alike(a.__defaults__, b.__defaults__)
            return same and self.alike(a.__kwdefaults__, b.__kwdefaults__) and self.alike(*cells)
        if isinstance(a, types.MethodType):
            return a.__func__ is b.__func__ and self.alike(a.__self__, b.__self__)
        if isinstance(a, functools.partial):
            return self._all((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
        if type(a) is int and (a, b) == self.numbers:
            return True
        if type(a).__eq__ is not object.__eq__:
            return bool(a == b)
        return hasattr(a, "__dict__") and self.alike(vars(a), vars(b))

    def _all(self, a: Any, b: Any) -> bool:
        return all(self.alike(x, y) for x, y in zip(a, b, strict=True))

    def _modules(self, a: nn.Module, b: nn.Module) -> bool:
        tensors, settings = [], []
        for module in (a, b):
            fields = dict(vars(module))
            held = {**fields.pop("_parameters"), **fields.pop("_buffers")}
            tensors.append({name: _form(tensor) for name, tensor in held.items()})
            for name, value in list(fields.items()):
                if "state_dict" in name:  # hooks that no forward calls: FSDP2's differ by block
                    del fields[name]
                elif "_hooks" in name and isinstance(value, Mapping):
                    fields[name] = list(value.values())  # their keys are numbers of handles
            settings.append(fields)
        return tensors[0] == tensors[1] and self.alike(*settings)


def _form(tensor: Tensor | None) -> Any:
    """All that the code of a block can see of a parameter or buffer, but for its values."""
    if tensor is None:
        return None
    layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, layout
