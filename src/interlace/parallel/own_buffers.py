"""Buffers of which each rank of an axis holds its own, such as rows of its positions.

Whoever makes such a buffer marks it, with the rank's place on that axis. What is not marked must
be equal on all ranks, and what is marked on all ranks of the same place.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

AxisPlace = tuple[tuple[str, int], ...]
"""(axis, this rank's number on it), for each axis over which a buffer differs."""
_MARKS = "own_buffers"
"""Attribute of a module in which its marks are kept, by name of the buffer."""


def mark_own(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Mark all buffers of `module` as this rank's own on a one-dimensional mesh; returns it.

    Marks are plain names and numbers, so that a module with them can be copied.
    """
    (axis,) = mesh.mesh_dim_names or ("",)
    here = (axis, mesh.get_local_rank())
    for owner in module.modules():
        names = [name for name, _ in owner.named_buffers(recurse=False)]
        if names:
            marks = _marks_of(owner)
            setattr(owner, _MARKS, {name: (*marks.get(name, ()), here) for name in names})
    return module


def copy_marks(source: nn.Module, target: nn.Module) -> None:
    """Let buffers of `target` differ over the axes that those of `source` under their names do."""
    names = {name for name, _ in target.named_buffers(recurse=False)}
    kept = {name: place for name, place in _marks_of(source).items() if name in names}
    if kept:
        setattr(target, _MARKS, kept)


def own_buffers(module: nn.Module) -> Iterator[tuple[str, AxisPlace]]:
    """(name, place) of each marked buffer below `module`."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, place in _marks_of(owner).items():
            yield (f"{path}.{name}" if path else name), place


def _marks_of(module: nn.Module) -> dict[str, AxisPlace]:
    found: dict[str, AxisPlace] = getattr(module, _MARKS, {})
    return found
