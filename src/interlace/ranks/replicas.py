"""Which ranks hold the same part of a tensor, so that its content can be compared among them.

A plain tensor is whole on every rank. A DTensor's local part is equal on ranks that have the same
coordinates on the mesh dimensions over which it is not replicated. What no two ranks share is
never looked at.

What travels is a digest of 8 bytes, made where the tensor lies. The bytes are read as 64-bit words.
Each word is mixed with its place and the results are summed. The mixing is one to one, so that a
change of one word always changes the sum; words that changed places, or several changed words, go
unnoticed once in 2^64. Integer sums do not depend on the order of addition: threads, devices and
pieces give the same digest. It guards against mistakes, not against people who forge weights.

Cost: about 1 GB/s on one CPU core, which is as fast as sha256. On a GPU it is some twelve passes
over a piece by elementwise kernels, and one transfer for all tensors together.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.parallel.local_parts import local
from interlace.parallel.own_buffers import own_buffers
from interlace.ranks.agree import Content
from interlace.ranks.small_collectives import alone

DIGEST_BYTES = 16
"""Bytes of the hash over a tensor's dtype, shape and sum of words; a choice, as many as `agree`
compares."""
WORD_BYTES = 8
"""Bytes of an int64, the words that are summed."""
# Words of a piece, a choice: 512 KiB that stay in a core's cache, and 128 MiB that fill a GPU
# (three of these are held at a time).
CPU_WORDS, DEVICE_WORDS = 1 << 16, 1 << 24
# Odd, so that multiplying by them is one to one: from splitmix64 (Steele, Lea, Flood, 2014).
_PLACE, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_SHIFT = 29
"""Bits by which a word is shifted while it is mixed; a choice, near half of the 64, so that high
bits reach the low ones."""
_NO_SIGN = (1 << (64 - _SHIFT)) - 1
"""Mask of the bits that a shift leaves: torch fills the others with the sign."""


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> list[bytes]:
    """One digest per tensor, of its bytes, dtype and shape. Zeros of other signs and NaNs of other
    payloads are other bytes. Tensors without memory (`meta`, or given back) are told apart by dtype
    and shape."""
    given = [tensor.detach() for tensor in tensors]
    sums = [_sum_of_words(each) for each in given]
    values = _to_host(sums)
    return [
        hashlib.blake2b(
            f"{each.dtype} {list(each.shape)} {value}".encode(), digest_size=DIGEST_BYTES
        ).digest()
        for each, value in zip(given, values, strict=True)
    ]


def _sum_of_words(tensor: Tensor) -> Tensor:
    if tensor.is_meta or (tensor.numel() and not tensor.untyped_storage().nbytes()):
        return torch.zeros((), dtype=torch.int64)
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    at_once = CPU_WORDS if content.device.type == "cpu" else DEVICE_WORDS
    for piece in range(0, content.numel(), at_once * WORD_BYTES):
        words = _words(content[piece : piece + at_once * WORD_BYTES])
        first = piece // WORD_BYTES + 1
        places = torch.arange(first, first + words.numel(), device=words.device)
        total += _mixed(words, places).sum()
    return total


def _words(content: Tensor) -> Tensor:
    """Bytes as 64-bit words, the last one filled up with zeros."""
    missing = -content.numel() % WORD_BYTES
    if missing:
        content = torch.cat((content, content.new_zeros(missing)))
    elif content.storage_offset() % WORD_BYTES:
        content = content.clone()
    return content.view(torch.int64)


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    mixed = places.mul_(_PLACE).bitwise_xor_(words)
    for factor in (_FIRST, _SECOND):
        mixed.mul_(factor)
        mixed.bitwise_xor_(mixed.bitwise_right_shift(_SHIFT).bitwise_and_(_NO_SIGN))
    return mixed


def _to_host(sums: list[Tensor]) -> list[int]:
    """Numbers of tensors that may lie on several devices, in one transfer per device."""
    found: dict[int, int] = {}
    for device in {each.device for each in sums}:
        of_device = [index for index, each in enumerate(sums) if each.device == device]
        values = torch.stack([sums[index] for index in of_device]).tolist()
        found |= dict(zip(of_device, values, strict=True))
    return [found[index] for index in range(len(sums))]


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


def module_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> list[Content]:
    """Buffers of a model, of which ranks may hold their own rows."""
    buffers = {f"buffer {name!r}": each for name, each in module.named_buffers()}
    own = {f"buffer {name!r}": place for name, place in own_buffers(module)}
    return tensor_contents(buffers, own=own, group=group)
