"""A transfer under way."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.errors import PeerError
from interlace.reshard.flight import Flight
from interlace.reshard.inputs import Item
from interlace.reshard.layouts import reduce_partial
from interlace.reshard.meeting import Pauses, Roll
from interlace.reshard.messages import Shards
from interlace.reshard.planning.layout import Box
from interlace.reshard.program import Program
from interlace.reshard.watch import TransferWatch
from interlace.reshard.wire import Buffers, Wire

_BEGIN_HINT = "call start on every rank of both meshes, as often and in the same order"


class Peers:
    """Waits for other ranks in one transfer, never without a bound or a watchdog."""

    def __init__(
        self, roll: Roll, number: int, watch: TransferWatch | None, timeout_s: float
    ) -> None:
        self.watch = watch
        self._roll = roll
        self._number = number
        self._timeout_s = timeout_s
        self._begun: set[int] = set()

    def wait_for(self, work: dist.Work, peer: int) -> None:
        """Blocks until a message is done.

        Raises PeerError if the peer does not begin in time, dies, or breaks the connection.
        """
        with self.awaited([peer]):
            try:
                work.wait()
            except RuntimeError as error:
                raise self.explained(error, peer) from error

    def explained(self, error: RuntimeError, peer: int) -> PeerError:
        """Who is at fault when a message with `peer` broke; what gloo raises may blame others."""
        known = None
        if self.watch is not None:
            self.watch.waits_for([peer])
            known = self.watch.explain(error)
        return known or PeerError(
            f"the transfer with rank {peer} broke: {str(error)[:300]}",
            ranks=[peer],
            hint="see the end of its output",
        )

    @contextlib.contextmanager
    def awaited(self, peers: Sequence[int]) -> Iterator[None]:
        """Around whatever blocks until these ranks do their part; first waits for their start."""
        if self.watch is not None:
            self.watch.waits_for(peers)
        for peer in peers:
            if peer not in self._begun:
                self._await_start(peer)
        yield
        if self.watch is not None:
            self.watch.waits_for(())

    def _await_start(self, peer: int) -> None:
        sleeps = Pauses(self._timeout_s)
        while not self._roll.begun(peer, self._number):
            if self.watch is not None:
                self.watch.raise_verdict()
            if not sleeps.next():
                raise PeerError(
                    f"rank {peer} has not begun the transfer within {self._timeout_s:g} s",
                    ranks=[peer],
                    hint=_BEGIN_HINT,
                )
        self._begun.add(peer)


class Handle:
    """A transfer that `ReshardPlan.start` began. `wait` must be called; source tensors must not
    be changed before it returns.

    gloo moves what was issued while this thread computes, but cannot be asked whether a message
    has arrived, so the next are issued in `progress` and `wait`. With NCCL all are issued at once.
    """

    def __init__(
        self,
        items: Sequence[Item],
        program: Program,
        sources: Sequence[DTensor | None],
        *,
        wire: Wire,
        peers: Peers,
        device: torch.device,
        memory_bytes: int,
        outstanding: int,
        on_end: Callable[[], None],
    ) -> None:
        self._items = items
        self._peers = peers
        self._on_end = on_end
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        pools = 1 if self._stream is not None else 2
        self._buffers = [Buffers(memory_bytes // pools, device) for _ in range(pools)]
        self._result: dict[str, DTensor | None] | None = None
        boxes = program.boxes.destinations
        self._shards = Shards(
            [self._source(item, tensor) for item, tensor in zip(items, sources, strict=True)],
            [self._empty(item, box) for item, box in zip(items, boxes, strict=True)],
        )
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._flight = Flight(
            program,
            self._shards,
            wire=wire,
            buffers=self._buffers[0],
            ahead=None if self._stream is not None else self._buffers[1],
            outstanding=outstanding,
            wait_for=peers.wait_for if self._stream is None else _order_behind,
            explain=peers.explained,
        )
        self._partners = sorted({operation.peer for operation in program.operations})
        if self._stream is not None and peers.watch is not None:
            peers.watch.waits_for(self._partners)  # NCCL connects two ranks when they first meet
        with self._on_stream():
            self._flight.issue()
            self._flight.copy_locally()
            while self._stream is not None and not self._flight.done:
                self._flight.step()

    @property
    def buffer_bytes(self) -> int:
        """The most memory that message buffers took so far, besides the tensors themselves."""
        return sum(buffers.peak_bytes for buffers in self._buffers)

    def progress(self) -> bool:
        """Finishes one message, blocking until it is done, and issues what it made way for.

        Returns whether no message is left, so that `wait` would not block. Raises as `wait`.
        """
        if self._result is None and not self._flight.done:
            with self._ending_on_error(), self._on_stream():
                self._flight.step()
        return self._result is not None or self._flight.done

    def wait(self) -> dict[str, DTensor | None]:
        """The tensors on their destination mesh, by name; None outside of it.

        Raises PeerError if another rank died, stalled or did not begin; the source tensors are
        untouched then, but the process group is of no more use.
        """
        if self._result is None:
            with self._ending_on_error():
                with self._on_stream():
                    while not self._flight.done:
                        self._flight.step()
                self._end()
            self._result = self._wrap()
        return self._result

    def _end(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            if self._peers.watch is not None:  # it may leave only when all has arrived
                with self._peers.awaited(self._partners):
                    self._stream.synchronize()
        if self._peers.watch is not None:
            self._peers.watch.stop()
        self._on_end()

    def _wrap(self) -> dict[str, DTensor | None]:
        result: dict[str, DTensor | None] = {}
        for item, local in zip(self._items, self._shards.destinations, strict=True):
            result[item.name] = None if local is None else _as_dtensor(item, local)
        return result

    def _source(self, item: Item, tensor: DTensor | None) -> Tensor | None:
        if tensor is None:
            return None
        source = item.source
        held = cast("DTensor", tensor.detach())
        if source.reduced() != source.placements:
            with self._peers.awaited([r for r in source.mesh.ranks if r != dist.get_rank()]):
                held = reduce_partial(held, source.reduced())
        return held.to_local().resolve_conj().resolve_neg()

    def _empty(self, item: Item, box: Box | None) -> Tensor | None:
        if box is None:
            return None
        shape = [stop - start for start, stop in box]
        return torch.empty(shape, dtype=item.source.dtype, device=self._device)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            end_watch(self._peers.watch, error)
            raise


def end_watch(watch: TransferWatch | None, error: BaseException) -> None:
    """Tells the other ranks that this one failed; raises PeerError if another is at fault."""
    if watch is not None:
        watch.__exit__(type(error), error, error.__traceback__)


def _order_behind(work: dist.Work, _peer: int) -> None:
    """Makes the current stream, not this thread, wait for a message of NCCL."""
    work.wait()


def _as_dtensor(item: Item, local: Tensor) -> DTensor:
    shape = torch.Size(item.source.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, item.dst_mesh, item.dst_placements, run_check=False, shape=shape, stride=stride
    )
