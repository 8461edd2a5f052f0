"""Sending and receiving bytes within one process group, with buffers of bounded size."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_TAGS = 1 << 30
"""A half of the tags that gloo has. The lower ones are left to other messages of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Point-to-point messages of one resharding among the ranks of a group.

    gloo tells messages apart by their tag, one for each plan; NCCL by their order between two
    ranks, which the plan fixes, and the order in which ranks start plans.
    """

    group: dist.ProcessGroup
    plan: int
    """The number of the plan, alike on all ranks."""

    @property
    def tag(self) -> int:
        """Equal for two plans only if 2^30 were made in between."""
        return _TAGS + self.plan % _TAGS

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
        """Lets the buffer be used again."""
        self._free.append(buffer)
