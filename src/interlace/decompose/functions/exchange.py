"""Point-to-point transfers of one call: started in batches, waited for by key."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class PeerMessage(NamedTuple):
    """A contiguous tensor that goes to, or comes from, rank `peer` of the group."""

    tensor: Tensor
    peer: int


class Link:
    """Transfers within `group` (None: all ranks). Between two ranks messages are matched by the
    order in which both start them, so all ranks must start the same ones in the same order.

    Tensors must live until their transfer was waited for. `finish` must be the last call. NCCL
    needs a group's very first transfer to involve all its ranks, which empty slices may prevent.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._receiving: dict[Hashable, list[dist.Work]] = {}
        self._sending: dict[Hashable, list[dist.Work]] = {}

    def start(
        self, key: Hashable, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]
    ) -> None:
        """Starts all of them at once; empty tensors are neither sent nor received."""
        arriving = [self._operation(dist.irecv, x) for x in receives if x.tensor.numel()]
        leaving = [self._operation(dist.isend, x) for x in sends if x.tensor.numel()]
        both = arriving + leaving
        works = dist.batch_isend_irecv(both) if both else []
        # NCCL gives one work for the batch, gloo one per message.
        joint = len(works) < len(both)
        self._receiving[key] = works if joint else works[: len(arriving)]
        self._sending[key] = works if joint else works[len(arriving) :]

    def received(self, key: Hashable) -> None:
        """Waits until what was started under `key` has arrived (CUDA: makes the stream wait)."""
        for work in self._receiving.pop(key):
            work.wait()

    def sent(self, key: Hashable) -> None:
        """Waits until the buffers that were sent under `key` may be written again."""
        for work in self._sending.pop(key):
            work.wait()

    def finish(self) -> None:
        """Waits for everything that was not waited for."""
        for key in list(self._receiving):
            self.received(key)
        for key in list(self._sending):
            self.sent(key)

    def _operation(self, call: object, message: PeerMessage) -> dist.P2POp:
        return dist.P2POp(call, message.tensor, group=self._group, group_peer=message.peer)  # type: ignore[arg-type]
