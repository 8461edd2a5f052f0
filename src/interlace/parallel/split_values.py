"""Find out where values are split over ranks when a plan splits some linear layers of a model.

The plan of a model names its column and row layers. What lies between them computes on this
rank's part only: a whole parameter that is read there (a norm of the heads, say) gets only a part
of its gradient on each rank, and a whole activation that is read there would get a wrong one. One
small forward of the model, before it is laid out, shows both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interlace.errors import InputError

COLUMNS = frozenset({"column", "column_gathered", "head"})
"""Roles of linear layers whose output features are split over ranks."""
ROWS = frozenset({"row", "row_splits_input"})
"""Roles of linear layers whose input features are split over ranks."""
SPLIT, WHOLE = "split", "whole"
"""States of a value: split over ranks, or whole and made from tokens. A set of names of parameters,
as a state, means that the value is a function of these parameters alone."""
SplitState = str | frozenset[str] | None


@dataclass
class SplitValues(TorchFunctionMode):
    """Records one forward of `model`. `roles` gives the role of each laid-out module."""

    model: nn.Module
    roles: Mapping[str, str]
    partial: set[str] = field(default_factory=set)
    """Whole parameters whose gradients are sums over ranks."""
    _states: dict[int, tuple[Tensor, SplitState]] = field(default_factory=dict)
    _stack: list[str] = field(default_factory=list)
    _made_by: dict[int, str] = field(default_factory=dict)
    _columns_of: dict[int, set[str]] = field(default_factory=dict)
    _other_uses: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def watch(self, *inputs: Tensor) -> None:
        """Run the model once, without gradients and without dropout."""
        for name, parameter in self.model.named_parameters():
            self._states[id(parameter)] = (parameter, frozenset({name}))
        hooks = []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after(name)))
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self:
                self.model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
            for module, training in modes.items():
                module.training = training

    def shared_inputs(self) -> dict[str, set[str]]:
        """Modules whose outputs nothing but columns read, at least two, with these columns. The
        gradients of such an output can be added before they are summed over ranks."""
        outputs: dict[str, list[int]] = {}
        for value, name in self._made_by.items():
            outputs.setdefault(name, []).append(value)
        readers = {
            name: set().union(*(self._columns_of.get(value, set()) for value in values))
            for name, values in outputs.items()
            if all(value in self._columns_of for value in values)
            and not self._other_uses.intersection(values)
        }
        readers = {name: columns for name, columns in readers.items() if len(columns) > 1}
        served = [value for name in readers for value in outputs[name]]
        loose = {
            column
            for value, columns in self._columns_of.items()
            if value not in served
            for column in columns
        }
        return {name: columns for name, columns in readers.items() if not columns & loose}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Note what an operation does to the states of its inputs."""
        result = func(*args, **(kwargs or {}))
        inputs = list(_tensors((args, kwargs or {})))
        outputs = list(_tensors(result))
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            outputs = inputs[:1]
        if outputs and not self._inside_plan():
            returned = {id(tensor) for tensor in outputs}  # `x.to(dtype)` may be x itself
            self._other_uses.update({id(tensor) for tensor in inputs} - returned)
            state = WHOLE if name == "embedding" else self._combined(inputs)
            for tensor in outputs:
                known = state if state == SPLIT or tensor.is_floating_point() else None
                self._states[id(tensor)] = (tensor, known)
        return result

    def _inside_plan(self) -> bool:
        return any(name in self.roles for name in self._stack)

    def _state(self, tensor: Tensor) -> SplitState:
        return self._states.get(id(tensor), (tensor, None))[1]

    def _combined(self, inputs: list[Tensor]) -> SplitState:
        states = [state for state in map(self._state, inputs) if state]
        names = frozenset().union(*(state for state in states if isinstance(state, frozenset)))
        if SPLIT in states:
            if WHOLE in states:
                raise self._unusable("combines values that are split over ranks with whole ones")
            self.partial |= names
            return SPLIT
        return WHOLE if WHOLE in states else names or None

    def _before(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
            role = self.roles.get(name)
            if role and not self._inside_plan():
                self._check_input(name, role, next(iter(_tensors((args, kwargs)))))
            self._stack.append(name)

        return note

    def _check_input(self, name: str, role: str, x: Tensor) -> None:
        split = self._state(x) == SPLIT
        if role == "row" and not split:
            raise self._unusable(f"reads whole values, and {name!r} expects split ones")
        if role != "row" and split:
            raise self._unusable(f"reads split values, and {name!r} expects whole ones")
        if role in COLUMNS:
            self._columns_of.setdefault(id(x), set()).add(name)
        self._states.setdefault(id(x), (x, None))  # keeps it, so that no other gets its id

    def _after(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple, result: Any) -> None:
            self._stack.pop()
            if self._inside_plan():
                return
            role = self.roles.get(name)
            if role:
                state = SPLIT if role in ("column", "head") else WHOLE
                for tensor in _tensors(result):
                    self._states[id(tensor)] = (tensor, state)
            elif isinstance(result, Tensor) and id(result) in self._states:
                self._made_by.setdefault(id(result), name)

        return note

    def _unusable(self, what: str) -> InputError:
        where = self._stack[-1] if self._stack else ""
        module = self.model.get_submodule(where)
        return InputError(
            f"the tensor-parallel plan of {type(self.model).__name__} cannot be used: "
            f"{where or 'the model'} ({type(module).__name__}) {what}",
            hint="set parallel.tensor to 1, or lay the module out yourself and use "
            "interlace.compile_step",
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
