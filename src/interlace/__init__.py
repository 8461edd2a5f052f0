"""Interlace hides communication in distributed LLM training.

`compile_step` makes an interlaced training step of your own module. Importing this package does
nothing, not even import torch; each sub-package says in its docstring what it is for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.api import Step, compile_step

__all__ = ["Step", "__version__", "compile_step"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Step` and `compile_step`, imported when they are first asked for."""
    if name in ("Step", "compile_step"):
        from interlace import api  # noqa: PLC0415 - imports torch

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
