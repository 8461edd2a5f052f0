"""One walk of a rank through its program.

Operations are issued in the global order of the plan, at most `outstanding` of them unfinished,
and a rank blocks only for an operation that it has issued. So the earliest unfinished message of
the list has always been issued by both of its ranks, or one of them is about to: nothing can
deadlock, whatever the window, the buffers and the speed of the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from interlace.reshard.messages import Shards, in_place, pack, unpack
from interlace.reshard.program import Operation, Program
from interlace.reshard.wire import Buffers, Wire


@dataclass(frozen=True, slots=True)
class _Pending:
    operation: Operation
    work: dist.Work
    data: Tensor
    """Kept until the work is done."""
    buffer: Tensor | None


class Flight:
    """A program under way. One thread issues and waits; nothing happens but in its calls.

    `wait_for(work, peer)` blocks until a work is done (or the stream does), or raises.
    """

    def __init__(
        self,
        program: Program,
        shards: Shards,
        *,
        wire: Wire,
        buffers: Buffers,
        outstanding: int,
        wait_for: Callable[[dist.Work, int], None],
        explain: Callable[[RuntimeError, int], Exception],
    ) -> None:
        self._program = program
        self._shards = shards
        self._wire = wire
        self._buffers = buffers
        self._outstanding = outstanding
        self._wait_for = wait_for
        self._explain = explain
        self._next = 0
        self._pending: dict[int, _Pending] = {}

    @property
    def done(self) -> bool:
        """Whether every operation has finished."""
        return self._next == len(self._program.operations) and not self._pending

    def issue(self) -> None:
        """Issues operations until the next would have to wait for an earlier one."""
        while self._next < len(self._program.operations):
            operation = self._program.operations[self._next]
            if self._awaited(operation) is not None or not self._begin(operation):
                return
            self._next += 1

    def copy_locally(self) -> None:
        """Does the rank's local copies."""
        for copy in self._program.copies:
            source = self._shards.sources[copy.tensor]
            destination = self._shards.destinations[copy.tensor]
            assert source is not None
            assert destination is not None
            destination[copy.destination].copy_(source[copy.source])

    def step(self) -> None:
        """Finishes the operation that the next one waits for (or the oldest); issues more."""
        assert self._pending, "an operation waits for nothing that is under way"
        awaited = None
        if self._next < len(self._program.operations):
            awaited = self._awaited(self._program.operations[self._next])
        self._finish(next(iter(self._pending)) if awaited is None else awaited)
        self.issue()

    def _awaited(self, operation: Operation) -> int | None:
        """What must finish before the operation: what it forwards, or room in the window."""
        for index in operation.after:
            if index in self._pending:
                return index
        if len(self._pending) >= self._outstanding:
            return next(iter(self._pending))
        return None

    def _begin(self, operation: Operation) -> bool:
        """Issues an operation; False if it must wait for a buffer."""
        message = operation.message
        data = in_place(message, self._shards)
        buffer = None
        if data is None:
            buffer = self._buffers.take(message.size_bytes)
            if buffer is None:
                return False
            data = buffer[: message.size_bytes]
            if operation.sends:
                pack(message, self._shards, data)
        begin = self._wire.send if operation.sends else self._wire.receive
        try:
            work = begin(data, operation.peer)
        except RuntimeError as error:  # gloo raises here if it knows that the peer is gone
            raise self._explain(error, operation.peer) from error
        self._pending[self._next] = _Pending(operation, work, data, buffer)
        return True

    def _finish(self, index: int) -> None:
        pending = self._pending[index]
        self._wait_for(pending.work, pending.operation.peer)
        del self._pending[index]
        if pending.buffer is None:
            return
        if not pending.operation.sends:
            unpack(pending.operation.message, self._shards, pending.data)
        self._buffers.give_back(pending.buffer)
