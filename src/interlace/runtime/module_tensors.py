"""Parameters and buffers of a traced module: what they are, and which were replaced since.

A tensor that was replaced by another of the same kind can take its place in the graphs; another
dtype, shape, device or layout cannot, nor a parameter that no longer wants a gradient, nor another
pattern of shared (tied) tensors. Looking at 300 tensors that nobody touched takes some 0.1 ms.
"""

from collections import defaultdict
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from interlace.errors import RunError
from interlace.graphs.torch_private import GRADIENT_HOOKS, LOCAL_PARTS
from interlace.runtime.module_tree import AGAIN, SINCE, entries_of, own_name, same

_facts = attrgetter("requires_grad", "dtype", "shape")
_local_part, _layout = map(attrgetter, LOCAL_PARTS)
_hooks = attrgetter(*GRADIENT_HOOKS)


class TensorPlace(NamedTuple):
    """A place of a tensor in a module."""

    name: str
    role: str
    """`parameter` or `buffer`."""
    table: dict[str, Tensor | None]
    key: str

    @property
    def title(self) -> str:
        """How a message calls it."""
        return f"{self.role} {own_name(self.name)!r}"


class ModuleTensors:
    """The parameters and buffers below a root, as they are now."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._look()

    def _look(self) -> None:
        self._slots: list[TensorPlace] = []
        tables: list[tuple[str, str, dict[str, Tensor | None]]] = []
        for path, module in self._root.named_modules():
            prefix = f"{path}." if path else ""
            _, parameters, buffers = entries_of(module)
            tables += [(prefix, "parameter", parameters), (prefix, "buffer", buffers)]
        for prefix, role, table in tables:
            self._slots += [TensorPlace(prefix + key, role, table, key) for key in table]
        self._empty = [table for *_, table in tables if not table]
        self._filled = [table for *_, table in tables if table]
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._tensors = list({id(t): t for t in self._values if t is not None}.values())
        self._sharded = [t for t in self._tensors if isinstance(t, DTensor)]
        self._parts = [_local_part(t) if isinstance(t, DTensor) else t for t in self._tensors]
        self._kinds = {id(t): kind_of(t) for t in self._tensors}
        self._now = self._fingerprint()

    def _fingerprint(self) -> tuple[list[Any], ...]:
        """Of the tensors that are known: facts that are cheap to read."""
        return (
            list(map(Tensor.data_ptr, self._parts)),
            list(map(Tensor.stride, self._parts)),
            list(map(_facts, self._tensors)),
            list(map(id, map(_local_part, self._sharded))),
            list(map(id, map(_layout, self._sharded))),
        )

    def replaced(self) -> bool:
        """Whether a tensor, or its memory, was replaced by another one of its kind; from now on
        that one counts. Raises RunError naming a tensor that changed in another way."""
        if any(map(any, map(_hooks, self._tensors))):
            self._refuse_hooks()
        if (
            not any(self._empty)
            and sum(map(len, self._filled)) == len(self._values)
            and same(chain.from_iterable(map(dict.values, self._filled)), self._values)
            and self._fingerprint() == self._now
        ):
            return False
        self._check_slots()
        self._look()
        self._refuse_hooks()
        return True

    def _check_slots(self) -> None:
        known = {id(table): set[str]() for table in (*self._empty, *self._filled)}
        for slot, before in zip(self._slots, self._values, strict=True):
            known[id(slot.table)].add(slot.key)
            now = slot.table.get(slot.key)
            if now is None or before is None:
                if now is not before or slot.key not in slot.table:
                    how = "removed" if before is not None else "set"
                    raise RunError(f"{slot.title} was {how} {SINCE}", hint=AGAIN)
                continue
            difference = _difference(self._kinds[id(before)], kind_of(now))
            if difference:
                raise RunError(f"{slot.title} {difference} when the step was compiled", hint=AGAIN)
        for path, module in self._root.named_modules():
            for table in entries_of(module)[1:]:
                added = sorted(set(table) - known[id(table)])
                if added:
                    name = own_name(f"{path}.{added[0]}")
                    raise RunError(f"{name!r} was added to the module {SINCE}", hint=AGAIN)
        self._check_sharing()

    def _check_sharing(self) -> None:
        """What was one tensor must be one tensor, and what were two must be two: a graph has one
        input and one gradient for each."""
        pairs = [
            (slot, before, slot.table[slot.key])
            for slot, before in zip(self._slots, self._values, strict=True)
            if before is not None
        ]
        successors, forerunners = defaultdict(list), defaultdict(list)
        for slot, before, now in pairs:
            successors[id(before)].append((slot, now))
            forerunners[id(now)].append((slot, before))
        for told, groups in (("no longer", successors), ("now", forerunners)):
            for (first, tensor), *others in groups.values():
                for slot, other in others:
                    if other is not tensor:
                        raise RunError(
                            f"{first.title} and {own_name(slot.name)!r} are {told} the same "
                            "tensor, unlike when the step was compiled",
                            hint=AGAIN,
                        )

    def _refuse_hooks(self) -> None:
        for slot in self._slots:
            tensor = slot.table.get(slot.key)
            if tensor is not None and any(_hooks(tensor)):
                raise RunError(
                    f"{slot.title} has a gradient hook, and a traced step has no autograd that "
                    "would call it",
                    hint="remove the hook, and change param.grad after the step",
                )


def kind_of(tensor: Tensor) -> dict[str, Any]:
    """What must be equal for one tensor to take another's place, by the words of a message."""
    part = _local_part(tensor) if isinstance(tensor, DTensor) else tensor
    kind: dict[str, Any] = {
        "class": type(tensor).__name__,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "device": part.device,
        "requires_grad": tensor.requires_grad,
        "strides": tensor.stride(),
        "memory": part.numel() == 0 or part.data_ptr() != 0,
    }
    if isinstance(tensor, DTensor):
        kind |= {
            "placements": tensor.placements,
            "mesh": tensor.device_mesh,
            "local shape": list(part.shape),
            "local strides": part.stride(),
        }
    return kind


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first fact that is another one, or nothing."""
    for fact, value in before.items():
        if now.get(fact) != value:
            return f"has {fact} {_plain(now.get(fact))}, and had {_plain(value)}"
    return ""


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
