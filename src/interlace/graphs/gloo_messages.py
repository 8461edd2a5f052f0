"""Collectives on gloo that move rows without arithmetic, as messages: all receives, then all sends.

gloo's own all-gather and all-to-all send first. A rank that calls a moment after its peer then
writes its data at once, and its notice that it can receive waits behind them on the connection: the
peer begins when this rank is done, and a link that could carry both directions at once carries one
after the other. 8 MiB each way on a 500 Mbit/s link take 140 ms with the receives first, and
between 140 and 280 ms otherwise.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class Messages:
    """Receives and sends under way, waited for as one work: `wait` and `get_future` as of a
    `dist.Work`. gloo's messages have no futures, so one that is asked for has a thread."""

    def __init__(
        self, works: Sequence[dist.Work], output: Tensor, *, in_streams: bool = False
    ) -> None:
        """With `in_streams` a wait is one of the current stream, as on NCCL: a recorder's stream
        and the one that reads the output each have their own. gloo's messages end once, and a
        second wait for one would never return."""
        self._works = works
        self._output = output
        self._in_streams = in_streams
        self._follower: _Follower | None = None

    def wait(self) -> None:
        """Block until all have ended, or let the current stream wait for that. Raises RuntimeError
        if one broke."""
        if self._follower is not None:
            self._follower.join()
            self._follower.future.wait()
            return
        for work in self._works:
            work.wait()
        if not self._in_streams:
            self._works = ()

    def get_future(self) -> Future[Any]:
        """Completes when all messages have ended, or with their error."""
        if self._follower is None:
            self._follower = _Follower(self._works, self._output)
            self._follower.start()
        return self._follower.future


class _Follower(threading.Thread):
    """Waits for the messages, and completes a future. To be joined: a thread that comes back from
    native code while the interpreter shuts down aborts the process."""

    def __init__(self, works: Sequence[dist.Work], output: Tensor) -> None:
        super().__init__(name="interlace-messages", daemon=True)
        self.future: Future[Any] = Future()
        self._works, self._output = works, output

    def run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self.future.set_exception(error)
            return
        self.future.set_result(self._output)


def exchange(
    output: Tensor,
    output_splits: Sequence[int],
    inputs: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> Messages:
    """Starts sending `inputs[i]` to rank i of the group and receiving `output_splits[i]` rows of
    `output` from it; the own part is copied. Tensors are contiguous. What is empty is not sent, so
    both ends must know it.
    """
    rank, ranks = group.rank(), group.size()
    parts = output.split(list(output_splits))
    works: list[dist.Work] = []
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    for source in reversed(others):
        if parts[source].numel():
            works.append(_started(dist.irecv(parts[source], group=group, group_src=source)))
    for to in others:
        if inputs[to].numel():
            works.append(_started(dist.isend(inputs[to], group=group, group_dst=to)))
    parts[rank].copy_(inputs[rank])
    return Messages(works, output)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
