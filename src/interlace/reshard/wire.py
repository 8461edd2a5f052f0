"""Sending and receiving bytes within one process group, with buffers of bounded size."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

TAGS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Point-to-point messages of one resharding among the ranks of a group.

    gloo tells messages apart by `tag` (1 to TAGS); NCCL by their order between two ranks, which
    the plan fixes.
    """

    group: dist.ProcessGroup
    tag: int

    def send(self, data: Tensor, peer: int) -> dist.Work:
        """Begins to send contiguous bytes to a global rank."""
        work = dist.isend(data, peer, group=self.group, tag=self.tag)
        assert work is not None, "this rank is not in the group"
        return work

    def receive(self, data: Tensor, peer: int) -> dist.Work:
        """Begins to receive into contiguous bytes from a global rank."""
        work = dist.irecv(data, peer, group=self.group, tag=self.tag)
        assert work is not None, "this rank is not in the group"
        return work


class Buffers:
    """Byte buffers of at most `limit_bytes` in all; free ones are used again."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.peak_bytes = 0
        self._limit_bytes = limit_bytes
        self._device = device
        self._held_bytes = 0
        self._free: list[Tensor] = []

    def take(self, size_bytes: int) -> Tensor | None:
        """A buffer of at least that size; None until another is given back."""
        for i, buffer in enumerate(self._free):
            if size_bytes <= buffer.numel():
                return self._free.pop(i)
        while self._free and self._held_bytes + size_bytes > self._limit_bytes:
            self._held_bytes -= self._free.pop().numel()
        if self._held_bytes + size_bytes > self._limit_bytes:
            return None
        self._held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be used again."""
        self._free.append(buffer)
