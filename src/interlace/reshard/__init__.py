"""Moves tensors between device meshes of any layout.

    y = interlace.reshard(x, dst_mesh, dst_placements)         this package can be called
    plan = interlace.ReshardPlan.of(state_dict, dst_mesh, dst_placements)
    handle = plan.start(state_dict); ...; moved = handle.wait()

planning/   what moves in which order, without torch
api.py      reshard, ReshardPlan, Settings
handle.py, flight.py, program.py   running a plan
watch.py, meeting.py               bounded waits, errors that name a rank
Importing this loads no torch, and nothing of tracing or training at any time.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.reshard.handle import Handle
    from interlace.reshard.inputs import Move
    from interlace.reshard.reshard_plan import ReshardPlan, reshard
    from interlace.reshard.settings import Settings

__all__ = ["Handle", "Move", "ReshardPlan", "Settings", "reshard"]

_HOMES = {
    "Handle": "handle",
    "Move": "inputs",
    "ReshardPlan": "reshard_plan",
    "Settings": "settings",
    "reshard": "reshard_plan",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _CallablePackage(ModuleType):
    """`interlace.reshard` is this package as soon as it is imported; calling it moves a tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return __getattr__("reshard")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
