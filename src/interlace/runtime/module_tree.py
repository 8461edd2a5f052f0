"""The tree of modules that was traced, and whether it is still the same one.

Hundreds of modules are compared by identity in loops that run in C: about 0.1 ms for 300 modules.
Only when something differs are they gone through one by one, to name it.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import nn

from interlace.errors import InputError, RunError
from interlace.graphs.torch_private import (
    GRADIENT_HOOKS,
    MODULE_ENTRIES,
    MODULE_STATE,
    global_hooks,
    hooks_of,
)

AGAIN = "make the change before compile_step, or compile the step again"
"""Hint where a module is no longer what was traced."""
SINCE = "after the step was compiled"
"""How messages end that name such a change."""
_state = itemgetter(*MODULE_STATE)
entries_of = attrgetter(*MODULE_ENTRIES)


def own_name(name: str) -> str:
    """A name in the traced module, which holds the user's as `module`, in the user's words."""
    return name.removeprefix("module.")


def module_name(name: str) -> str:
    """A module of the traced one in the user's words."""
    return "the module" if name == "module" else f"module {own_name(name)!r}"


def same(found: Iterable[Any], wanted: Iterable[Any]) -> bool:
    """Whether these are the same objects, as far as the shorter one goes."""
    return all(map(is_, found, wanted))


def refuse_gradient_hooks(root: nn.Module) -> None:
    """Raise InputError if a module or parameter has a hook that autograd would call in backward:
    a traced backward has no autograd."""
    for name, module in root.named_modules():
        if any(hooks_of(module, backward=True)):
            raise InputError(
                f"{module_name(name)} has a backward hook, and a traced step has no autograd that "
                "would call it",
                hint="remove the hook; gradients are in param.grad after the step",
            )
    if any(global_hooks(backward=True)):
        raise InputError(
            "torch has a backward hook for all modules, and a traced step has no autograd that "
            "would call it",
            hint="remove the hook (register_module_full_backward_hook)",
        )
    for name, parameter in root.named_parameters():
        if any(getattr(parameter, hooks) for hooks in GRADIENT_HOOKS):
            raise InputError(
                f"parameter {own_name(name)!r} has a gradient hook, and a traced step has no "
                "autograd that would call it",
                hint="remove the hook, and change param.grad after the step",
            )


class Traced(NamedTuple):
    """What is compared of one module."""

    kind: type[nn.Module]
    training: bool
    children: dict[str, nn.Module | None]
    tables: tuple[Any, ...]
    """The dictionaries of its parameters and buffers; their values are not looked at here."""
    hooks: list[list[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "Traced":
        """A module as it is now."""
        children, parameters, buffers = entries_of(module)
        return cls(
            type(module),
            module.training,
            dict(children),
            (id(parameters), id(buffers)),
            [list(table.values()) for table in _hooks_of(module)],
        )


class ModuleTree:
    """Classes, modes, sub-modules and hooks of the modules below a root, as they are now."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = dict(root.named_modules())
        modules = list(self._modules.values())
        self._traced = {name: Traced.of(module) for name, module in self._modules.items()}
        self._types = list(map(type, modules))
        self._forwards: dict[type[nn.Module], Callable[..., Any]] = {
            kind: kind.forward for kind in self._types
        }
        self._states = list(chain.from_iterable(map(_state, map(vars, modules))))
        self._global_hooks = [list(table.values()) for table in _global_hooks()]
        tables = [entries_of(module)[0] for module in modules] + _global_hooks()
        tables += [table for module in modules for table in _hooks_of(module)]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._entries = list(chain.from_iterable(map(dict.values, self._filled)))

    def check(self) -> None:
        """Raise RunError naming what is not as it was."""
        modules = self._modules.values()
        if (
            any(self._empty)
            or sum(map(len, self._filled)) != len(self._entries)
            or not same(chain.from_iterable(map(dict.values, self._filled)), self._entries)
            or not same(chain.from_iterable(map(_state, map(vars, modules))), self._states)
            or not same(map(type, modules), self._types)
            or any(kind.forward is not forward for kind, forward in self._forwards.items())
        ):
            self._name_change()

    def _name_change(self) -> None:
        for name, before in self._traced.items():
            _compare(name, before, Traced.of(self._modules[name]))
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                raise RunError(f"{kind.__name__}.forward was replaced {SINCE}", hint=AGAIN)
        if self._global_hooks != [list(table.values()) for table in _global_hooks()]:
            raise RunError(f"torch's hooks for all modules changed {SINCE}", hint=AGAIN)
        raise RunError(f"the modules' own dictionaries were replaced {SINCE}", hint=AGAIN)


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return hooks_of(module, backward=False) + hooks_of(module, backward=True)


def _global_hooks() -> list[dict[int, Any]]:
    return global_hooks(backward=False) + global_hooks(backward=True)


def _compare(name: str, before: Traced, now: Traced) -> None:
    """Raise RunError if a module is not what it was."""
    if now.kind is not before.kind:
        raise RunError(
            f"{module_name(name)} is a {now.kind.__name__}, and was a {before.kind.__name__} when "
            "the step was compiled",
            hint=f"a parametrization changes a module's class: {AGAIN}",
        )
    if now.training != before.training:
        modes = {True: "train", False: "eval"}
        raise RunError(
            f"{module_name(name)} is in {modes[now.training]} mode, and was in "
            f"{modes[before.training]} mode when the step was compiled",
            hint=f"call {modes[before.training]}() before the step, or compile another step",
        )
    path = name + "." if name else ""
    for child in {**before.children, **now.children}:
        if now.children.get(child) is not before.children.get(child):
            how = "added" if before.children.get(child) is None else "replaced"
            how = "removed" if now.children.get(child) is None else how
            raise RunError(f"{module_name(path + child)} was {how} {SINCE}", hint=AGAIN)
    if list(now.children) != list(before.children):
        raise RunError(f"the sub-modules of {module_name(name)} changed places {SINCE}", hint=AGAIN)
    if now.hooks != before.hooks:
        raise RunError(f"the hooks of {module_name(name)} changed {SINCE}", hint=AGAIN)
    if now.tables != before.tables:
        raise RunError(
            f"{module_name(name)} got other dictionaries of parameters or buffers {SINCE}",
            hint=AGAIN,
        )
