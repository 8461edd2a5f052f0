"""A transfer under way."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.errors import InterlaceError, RunError
from interlace.reshard.flight import Flight
from interlace.reshard.inputs import PlannedTensor
from interlace.reshard.layouts import reduce_partial
from interlace.reshard.messages import Shards
from interlace.reshard.peers import Peers
from interlace.reshard.planning.layout import Box
from interlace.reshard.program import Program
from interlace.reshard.roll import fresh
from interlace.reshard.wire import Buffers, Wire
from interlace.reshard.world import World


class Handle:
    """A transfer that `ReshardPlan.start` began. `wait` must be called; source tensors must not
    be changed before it returns. A handle that is dropped before ends the transfer on all ranks
    with an error that names this one, and closes the plan.

    gloo moves what was issued while this thread computes, but cannot be asked whether a message
    has arrived, so the next are issued in `progress` and `wait`. With NCCL all are issued at once.
    """

    def __init__(
        self,
        items: Sequence[PlannedTensor],
        program: Program,
        sources: Sequence[DTensor | None],
        *,
        wire: Wire,
        peers: Peers,
        device: torch.device,
        memory_bytes: int,
        outstanding: int,
        world: World,
        plan: int,
    ) -> None:
        self._items = items
        self._peers = peers
        self._world = world
        self._plan = plan
        self._failure: InterlaceError | None = None
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
        with self._keeping_messages(), self._on_stream():
            self._flight.issue()
            self._flight.copy_locally()
            while self._stream is not None and not self._flight.done:
                self._flight.step()
        world.add_transfer(plan, self)
        self._dropped = weakref.finalize(self, _drop, peers, world, self._flight)
        setattr(self._dropped, "atexit", False)  # noqa: B010 - the type stub lacks it

    @property
    def buffer_bytes(self) -> int:
        """The most memory that message buffers took so far, besides the tensors themselves."""
        return sum(buffers.peak_bytes for buffers in self._buffers)

    def progress(self) -> bool:
        """Finishes one message, blocking until it is done, and issues what it made way for.

        Returns whether no message is left, so that `wait` would not block. Raises as `wait`.
        """
        for handle in (*self._transfers_before(), self):
            if handle._result is None and not handle._flight.done:
                handle._step()
                break
        self._check()
        return all(handle._flight.done for handle in (*self._transfers_before(), self))

    def wait(self) -> dict[str, DTensor | None]:
        """The tensors on their destination mesh, by name; None outside of it.

        Raises PeerError if another rank died, stalled, did not begin, or refused to; the source
        tensors are untouched then and nothing is delivered, but the process group is of no more
        use. Called again, returns or raises the same.

        With gloo, transfers of plans that were made before are finished first: if one rank waited
        for one of two transfers and another rank for the other one, each would wait for what the
        other has to forward.
        """
        self._check()
        if self._result is None:
            with self._ending_on_error():
                for handle in self._transfers_before():
                    handle._finish(ahead_of_turn=True)
            self._finish()
        self._check()
        assert self._result is not None
        return self._result

    def abandon(self, error: RunError) -> None:
        """Ends the transfer with an error: here on `wait`, and on all other ranks."""
        if self._dropped.detach() is not None:
            self._failure = error
            self._world.remove_transfer(self._plan)
            self._world.keep(self._flight.under_way)
            _give_up(self._peers, error)

    def _transfers_before(self) -> list["Handle"]:
        if self._stream is not None or self._result is not None:
            return []
        before = self._world.transfers_before(self._plan)
        handles = [each for each in before if isinstance(each, Handle)]
        return [handle for handle in handles if handle._stream is None]  # else all are issued

    def _check(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure)

    def _step(self) -> None:
        self._check()
        with self._ending_on_error(), self._on_stream():
            self._flight.step()

    def _finish(self, *, ahead_of_turn: bool = False) -> None:
        """Waits for all messages, and ends the transfer.

        The process that hosts the store ends a transfer in its turn only, since it stays until all
        other ranks have ended theirs.
        """
        self._check()
        if self._result is not None:
            return
        while not self._flight.done:
            self._step()
        watch = self._peers.watch
        if ahead_of_turn and watch is not None and watch.hosts_store:
            return
        with self._ending_on_error():
            self._end()
            self._result = self._wrap()

    def _end(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            with self._peers.awaited(self._partners):  # what arrived is of this transfer
                if self._peers.watch is not None:  # it may leave only when all has arrived
                    self._stream.synchronize()
        if self._peers.watch is not None:
            self._peers.watch.stop()
        self._dropped.detach()
        self._world.remove_transfer(self._plan)
        self._peers.roll.end()

    def _wrap(self) -> dict[str, DTensor | None]:
        result: dict[str, DTensor | None] = {}
        for item, local in zip(self._items, self._shards.destinations, strict=True):
            result[item.name] = None if local is None else _as_dtensor(item, local)
        return result

    def _source(self, item: PlannedTensor, tensor: DTensor | None) -> Tensor | None:
        if tensor is None:
            return None
        source = item.source
        held = cast("DTensor", tensor.detach())
        if source.reduced() != source.placements:
            with self._peers.awaited([r for r in source.mesh.ranks if r != dist.get_rank()]):
                held = reduce_partial(held, source.reduced())
        return held.to_local().resolve_conj().resolve_neg()

    def _empty(self, item: PlannedTensor, box: Box | None) -> Tensor | None:
        if box is None:
            return None
        shape = [stop - start for start, stop in box]
        return torch.empty(shape, dtype=item.source.dtype, device=self._device)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextlib.contextmanager
    def _keeping_messages(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._world.keep(self._flight.under_way)
            raise

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            with ending_on_error(self._peers), self._keeping_messages():
                yield
        except BaseException as error:
            self._dropped.detach()
            self._world.remove_transfer(self._plan)
            self._failure = _lasting(error, self._peers)
            self._world.failure = self._failure.message
            raise


@contextlib.contextmanager
def ending_on_error(peers: Peers) -> Iterator[None]:
    """Tells the other ranks that this one failed, and closes the plan.

    Raises PeerError instead if another is at fault.
    """
    watch = peers.watch
    try:
        try:
            yield
        except BaseException as error:
            if watch is not None:
                watch.__exit__(type(error), error, error.__traceback__)
            raise
    except BaseException as error:
        peers.roll.fail(peers.number, error, tell=watch is None)
        raise


def _lasting(error: BaseException, peers: Peers) -> InterlaceError:
    """What `wait` raises from now on."""
    if isinstance(error, InterlaceError):
        return fresh(error)
    what = peers.roll.transfer(peers.number)
    return RunError(f"{what} failed before: {type(error).__name__}: {error}"[:1000])


def _drop(peers: Peers, world: World, flight: Flight) -> None:
    """What becomes of a transfer whose handle is gone: nobody can wait for it any more."""
    world.keep(flight.under_way)
    message = f"the handle of {peers.roll.transfer(peers.number)} was dropped before wait"
    if world.failure:
        message += f", after another transfer failed: {world.failure}"
    _give_up(peers, RunError(message, hint="keep what start returns, and call wait"))


def _give_up(peers: Peers, error: RunError) -> None:
    """Ends a transfer that this rank will not finish, on the other ranks and for this plan."""
    if peers.watch is not None:
        peers.watch.abandon(error)
    peers.roll.fail(peers.number, error, tell=peers.watch is None)


def _order_behind(work: dist.Work, _peer: int) -> None:
    """Makes the current stream, not this thread, wait for a message of NCCL."""
    work.wait()


def _as_dtensor(item: PlannedTensor, local: Tensor) -> DTensor:
    shape = torch.Size(item.source.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, item.dst_mesh, item.dst_placements, run_check=False, shape=shape, stride=stride
    )
