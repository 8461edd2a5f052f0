"""A digest of what is in a tensor, made where the tensor lies: 8 bytes of it travel.

The bytes are read as 64-bit words. Each word is mixed with its place and the results are summed.
The mixing is one to one, so that a change of one word always changes the sum; words that changed
places, or several changed words, go unnoticed once in 2^64. Integer sums do not depend on the
order of addition: threads, devices and pieces give the same digest. It guards against mistakes,
not against people who forge weights.

Cost: about 1 GB/s on one CPU core, which is as fast as sha256. On a GPU it is some twelve passes
over a piece by elementwise kernels, and one transfer for all tensors together.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

DIGEST_BYTES = 16
WORD_BYTES = 8
# Pieces that stay in a core's cache, and that fill a GPU (three of 128 MiB are held at a time).
CPU_WORDS, DEVICE_WORDS = 1 << 16, 1 << 24
# Odd, so that multiplying by them is one to one: from splitmix64 (Steele, Lea, Flood, 2014).
_PLACE, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_SHIFT = 29
_NO_SIGN = (1 << (64 - _SHIFT)) - 1  # torch shifts the sign in


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> list[bytes]:
    """One digest per tensor, of its bytes, dtype and shape. Zeros of other signs and NaNs of other
    payloads are other bytes. Tensors without memory (`meta`) are told apart by dtype and shape."""
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
    if tensor.is_meta:
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
