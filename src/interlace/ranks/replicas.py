"""Which ranks hold the same part of a tensor, so that its content can be compared among them.

A plain tensor is whole on every rank. A DTensor's local part is equal on ranks that have the same
coordinates on the mesh dimensions over which it is not replicated. What no two ranks share is
never looked at.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.parallel.local_parts import local
from interlace.ranks.agree import Content
from interlace.ranks.fingerprint import fingerprints
from interlace.ranks.small_collectives import alone

Places = Mapping[str, tuple[tuple[str, int], ...]]
"""By name of a plain tensor: (axis, this rank's number on it) for each axis over which it differs
from rank to rank."""


def tensor_contents(
    tensors: Mapping[str, Tensor],
    *,
    own: Places | None = None,
    ranks: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Content]:
    """The contents of named tensors, plain or DTensor, for `check_contents` on `group`.

    `own` says which plain tensors differ over ranks, and `ranks` among which ranks of the group
    all of this is compared (every rank gives the set that it is in; default: all). A world of one
    has nothing to compare.
    """
    if alone(group):
        return []
    own = own or {}
    among = len(ranks) if ranks is not None else dist.get_world_size(group)
    scope = "" if ranks is None else f"among {sorted(ranks)} "
    meshes: list[DeviceMesh] = []
    found: list[tuple[str, Tensor, str, str]] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if _is_nowhere_twice(tensor, among):
                continue
            layout, part = _dealt_out(tensor, meshes)
        else:
            place = own.get(name, ())
            layout = "over " + ", ".join(axis for axis, _ in place)
            part = str([number for _, number in place])
        found.append((name, local(tensor), layout, scope + part))
    digests = fingerprints(tensor for _, tensor, _, _ in found)
    return [
        Content(name=name, digest=digest, layout=layout, part=part)
        for (name, _, layout, part), digest in zip(found, digests, strict=True)
    ]


def random_state(device: torch.device) -> bytes:
    """A digest of where this process's random generators stand."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(fingerprints(states))


def _split_axes(tensor: DTensor) -> list[int]:
    """Mesh dimensions on which ranks hold different parts."""
    mesh = tensor.device_mesh
    return [
        axis
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]


def _is_nowhere_twice(tensor: DTensor, ranks: int) -> bool:
    mesh = tensor.device_mesh
    parts = math.prod(mesh.size(axis) for axis in _split_axes(tensor))
    return parts == mesh.size() == ranks


def _dealt_out(tensor: DTensor, meshes: list[DeviceMesh]) -> tuple[str, str]:
    """(layout, this rank's part). `meshes` collects those seen so far: their numbers are the same
    on all ranks of one program, whose sub-meshes hold different ranks."""
    mesh, axes = tensor.device_mesh, _split_axes(tensor)
    if mesh not in meshes:
        meshes.append(mesh)
    layout = f"mesh {meshes.index(mesh)} of {tuple(mesh.shape)} over {axes}"
    place = mesh.get_coordinate()
    return layout, "outside" if place is None else str([place[axis] for axis in axes])
