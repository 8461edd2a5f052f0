"""Interlace hides communication in distributed LLM training.

`compile_step` makes an interlaced training step of your own module, `reshard` and `ReshardPlan`
move tensors between device meshes. Importing this package does nothing, not even import torch;
each sub-package says in its docstring what it is for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.api import Step, compile_step
    from interlace.reshard import ReshardPlan, reshard

__all__ = ["ReshardPlan", "Step", "__version__", "compile_step", "reshard"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for."""
    if name in ("Step", "compile_step"):
        from interlace import api  # noqa: PLC0415 - imports torch

        return getattr(api, name)
    if name in ("ReshardPlan", "reshard"):
        package = importlib.import_module("interlace.reshard")
        return package if name == "reshard" else package.ReshardPlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
