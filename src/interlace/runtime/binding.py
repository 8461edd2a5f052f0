"""A step is bound to what it was compiled for, and says so when that is no longer there.

Graphs hold what a forward was when it was traced. Before each step everything that eager PyTorch
would look at again is compared: modules, hooks and modes (`module_tree`), parameters and buffers
(`module_tensors`), and the Python values that the forward read, which dynamo's guards know.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from interlace.errors import InputError, RunError
from interlace.graphs.python_reads import Reads
from interlace.runtime.module_tensors import ModuleTensors, kind_of
from interlace.runtime.module_tree import AGAIN, SINCE, ModuleTree

_ENTRY = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
"""Finds where dynamo reads an entry of a module: `._modules['layers']`."""
_IMPORT = re.compile(r"G\['__import_(\w+)'\]")
"""Finds an imported module as dynamo names it: `G['__import_torch_dot_nn']`."""
_GLOBAL = re.compile(r"G\['(\w+)'\]")
"""Finds a global name as dynamo reads it: `G['name']`."""
_CELL = re.compile(r"^loss_fn\.__closure__\[(\d+)\]\.cell_contents")
"""Finds what the loss function uses from outside: its closure, by number."""
_NO_ENTRY = re.compile(r"^not ___dict_contains\('(\w+)', (.*)\.__dict__\)$")
"""Finds dynamo's condition that an object has no attribute of its own of some name."""


class ModuleBinding:
    """What a step was compiled for."""

    def __init__(
        self,
        root: nn.Module,
        reads: Reads,
        device: torch.device,
        as_traced: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`root` was just traced for tensors on `device`, and `reads` is what its forward read. In
        the context `as_traced` it is what was traced, if it is another thing outside.

        Raises InputError for a tensor that would get a gradient in eager PyTorch and is no
        parameter of `root`."""
        code = getattr(getattr(root, "loss_fn", None), "__code__", None)
        self._free: tuple[str, ...] = getattr(code, "co_freevars", ())
        for source, tensor, _ in reads.tensors:
            if tensor.requires_grad:
                raise InputError(
                    f"{readable(source, self._free)} requires a gradient and is no parameter of "
                    "the module, so a step would give it none",
                    hint="register it in the module, pass loss_fn as an nn.Module that holds it, "
                    "or freeze it by requires_grad_(False)",
                )
        self._root = root
        self._tree = ModuleTree(root)
        self._tensors = ModuleTensors(root)
        self._reads = reads
        self._constants = [kind_of(tensor) | _memory(tensor) for _, tensor, _ in reads.tensors]
        self._device = device
        self._modes = modes(device)
        self._as_traced = as_traced
        self.check()

    def accept(self) -> None:
        """From now on parameters and buffers are to be as they are now."""
        self._tensors = ModuleTensors(self._root)

    def check(self) -> bool:
        """Whether parameters or buffers were replaced by others of their kind, which the graphs
        must be given. Raises RunError naming anything else that changed."""
        self._check_modes()
        self._tree.check()
        replaced = self._tensors.replaced()
        with self._as_traced():
            self._check_reads()
        return replaced

    def _check_reads(self) -> None:
        if not self._reads.hold():
            raise RunError(f"{condition(self._reads.broken(), self._free)} {SINCE}", hint=AGAIN)
        for (source, tensor, again), known in zip(
            self._reads.tensors, self._constants, strict=True
        ):
            if again() is not tensor or kind_of(tensor) | _memory(tensor) != known:
                raise RunError(
                    f"the tensor {readable(source, self._free)} was replaced {SINCE}",
                    hint="change it in place, register it as a buffer (a replaced buffer is "
                    "taken over), or compile the step again",
                )

    def _check_modes(self) -> None:
        if not torch.is_grad_enabled():
            raise RunError(
                "the step was called under torch.no_grad() or inference_mode(), and gives "
                "gradients",
                hint="call it outside",
            )
        for name, now in modes(self._device).items():
            before = self._modes[name]
            if now != before:
                raise RunError(
                    f"{name} is {now}, and was {before} when the step was compiled",
                    hint=f"hold the same {name} around compile_step and the step",
                )


def modes(device: torch.device) -> dict[str, str]:
    """Settings of this thread that a forward depends on and that a trace fixes."""
    kind = device.type
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
    return {
        "autocast": autocast,
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
    }


def readable(source: str, free: Sequence[str] = ()) -> str:
    """An expression of dynamo in the user's words: `module.layers.0.eps`. `free` are the names of
    what the loss function uses from outside."""
    text = _ENTRY.sub(r".\1", source).replace("L['self'].", "")
    text = _IMPORT.sub(lambda found: found[1].replace("_dot_", "."), text)
    text = _CELL.sub(lambda found: free[int(found[1])] if free else found[0], text)
    return _GLOBAL.sub(r"\1", text)


def condition(text: str, free: Sequence[str] = ()) -> str:
    """What dynamo says about a condition that no longer holds, as the start of a message."""
    what, *where = [part.strip() for part in text.split("  # ")]
    what = _NO_ENTRY.sub(r"\2 has no '\1' of its own", readable(what, free))
    seen = f" ({': '.join(reversed(where))})" if where else ""
    return f"`{what}`, which the forward relies on{seen}, was changed"


def _memory(tensor: Tensor) -> dict[str, object]:
    return {"address": tensor.data_ptr()}
