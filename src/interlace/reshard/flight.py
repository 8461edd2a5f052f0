"""One walk of a rank through its program.

Operations are issued in the global order of the plan, at most `outstanding` of them unfinished,
and a rank blocks only for an operation that it has issued. So the earliest unfinished message of
the list has always been issued by both of its ranks, or one of them is about to: nothing can
deadlock, whatever the window, the buffers and the speed of the ranks.

gloo sends nothing before the receive is posted. So while a forward waits for its data, the next
receive of each peer is posted ahead of its turn, with buffers of its own and outside of the window:
what is in turn never waits for it. Otherwise a port idles for the time of a notice after each
message.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from interlace.reshard.messages import Shards, in_place, pack, unpack
from interlace.reshard.program import Operation, Program
from interlace.reshard.wire import Buffers, Wire

_LOOK_AHEAD = 64
"""Operations among which receives are posted ahead, one of each peer; a choice. If all receives
were, all chunks would be under way at once and arrive together at the end, where their forwards
have nothing to run beside: moves took 1.2 times as long."""


@dataclass(frozen=True, slots=True)
class _Pending:
    operation: Operation
    work: dist.Work
    data: Tensor
    """Kept until the work is done."""
    buffer: Tensor | None
    buffers: Buffers
    """Where `buffer` is from."""


class Flight:
    """A program under way. One thread issues and waits; nothing happens but in its calls.

    `wait_for(work, peer)` blocks until a work is done (or the stream does), or raises. `ahead` has
    the buffers of receives before their turn; None posts none, as NCCL runs messages in order.
    """

    def __init__(
        self,
        program: Program,
        shards: Shards,
        *,
        wire: Wire,
        buffers: Buffers,
        ahead: Buffers | None,
        outstanding: int,
        wait_for: Callable[[dist.Work, int], None],
        explain: Callable[[RuntimeError, int], Exception],
    ) -> None:
        self._program = program
        self._shards = shards
        self._wire = wire
        self._buffers = buffers
        self._ahead = ahead
        self._early: set[int] = set()
        """Receives posted ahead whose turn has not come."""
        self._outstanding = outstanding
        self._wait_for = wait_for
        self._explain = explain
        self._next = 0
        self._pending: dict[int, _Pending] = {}

    @property
    def done(self) -> bool:
        """Whether every operation has finished."""
        return self._next == len(self._program.operations) and not self._pending

    @property
    def under_way(self) -> list[object]:
        """The messages that have not finished, and their memory."""
        return list(self._pending.values())

    def issue(self) -> None:
        """Issues operations until the next would have to wait for an earlier one."""
        while self._next < len(self._program.operations):
            if self._next in self._early:
                self._early.remove(self._next)
            elif self._awaited(self._next) is not None or not self._begin(
                self._next, self._buffers
            ):
                break
            self._next += 1
        if self._ahead is not None:
            self._post_ahead(self._ahead)

    def _post_ahead(self, buffers: Buffers) -> None:
        """The next receive of each peer: between two ranks, receives keep their order."""
        operations = self._program.operations
        peers = {operations[number].peer for number in self._early}
        for number in range(self._next, min(self._next + _LOOK_AHEAD, len(operations))):
            operation = operations[number]
            if operation.sends or operation.peer in peers:
                continue
            if not self._begin(number, buffers):
                return
            self._early.add(number)
            peers.add(operation.peer)

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
            awaited = self._awaited(self._next)
        self._finish(min(self._pending) if awaited is None else awaited)
        self.issue()

    def _awaited(self, number: int) -> int | None:
        """What must finish before the operation: what it forwards, or room in the window."""
        for index in self._program.operations[number].after:
            if index in self._pending:
                return index
        if len(self._pending) - len(self._early) >= self._outstanding:
            return min(self._pending)
        return None

    def _begin(self, number: int, buffers: Buffers) -> bool:
        """Issues an operation; False if it must wait for a buffer."""
        operation = self._program.operations[number]
        message = operation.message
        data = in_place(message, self._shards)
        buffer = None
        if data is None:
            buffer = buffers.take(message.size_bytes)
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
        self._pending[number] = _Pending(operation, work, data, buffer, buffers)
        return True

    def _finish(self, index: int) -> None:
        pending = self._pending[index]
        self._wait_for(pending.work, pending.operation.peer)
        del self._pending[index]
        if pending.buffer is None:
            return
        if not pending.operation.sends:
            unpack(pending.operation.message, self._shards, pending.data)
        pending.buffers.give_back(pending.buffer)
