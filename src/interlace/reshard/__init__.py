"""Moves tensors between device meshes of any layout.

    y = interlace.reshard(x, dst_mesh, dst_placements)         this package can be called
    plan = interlace.ReshardPlan.of(state_dict, dst_mesh, dst_placements)
    handle = plan.start(state_dict); ...; moved = handle.wait()

Importing this loads no torch, and nothing of tracing or training at any time.

planning/        what moves in which order, without torch
reshard_plan.py  `reshard` and `ReshardPlan`
settings.py      what a user may set
inputs.py        what is to move: as described, or as the source ranks hold it
layouts.py       from DTensors and meshes to the layouts that planning knows
agreement.py     all ranks agree on what moves, where they are, and on the plan
meeting.py       ranks agree through the store, so that a missing one is named
program.py       one rank's walk through a plan: sends, receives, copies
messages.py      which bytes of which tensors a message holds
wire.py          bytes sent and received, with buffers of bounded size
handle.py        a transfer under way
flight.py        one walk of a rank through its program
peers.py         waiting for other ranks within a transfer
roll.py          which transfers each rank has begun, refused or given up
watch.py         a watchdog for the ranks of one transfer
world.py         what all plans of a world share on one rank
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
"""The module of each public name."""


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
