"""Tensors on their way between the ranks of a pipeline, without anybody waiting for them.

Here all stages are laid out alike, and each rank exchanges with one rank of each other stage
(`laid_out_link` has the other case). A message is sent with as many operations as it has tensors,
in the order in which both sides have it in their lists. The memory of a tensor is sent as it lies,
so it arrives with its strides.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.errors import InputError
from interlace.graphs.collectives import on_gloo
from interlace.graphs.strides import restrided
from interlace.ir.stage_messages import StageMessage
from interlace.ranks.agree import listed
from interlace.ranks.watchdog import from_communication
from interlace.runtime.handovers import Handovers
from interlace.runtime.joint_end import WAIT_S, JointEnd, Unended
from interlace.runtime.same_shapes import refuse_difference
from interlace.runtime.stream_watch import StreamWatch


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory that a tensor spans, as bytes; no copy. It has one element at least."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps)
    return tensor.as_strided((span,), (1,)).view(torch.uint8)


T = TypeVar("T")


class Work(Protocol):
    """What is under way, as `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Whether it is known to be over."""
        ...

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it is over. Raises RuntimeError if it cannot end."""
        ...


@dataclass(frozen=True)
class Transit:
    """Something under way, and the memory that it reads or writes."""

    work: Work
    memory: Any
    what: str


@dataclass(frozen=True)
class Arrival:
    """A message that was asked for."""

    tensors: tuple[Tensor, ...]
    flights: tuple[Transit, ...]


@dataclass(frozen=True)
class ReplicaSum:
    """Tensors that are being added up over replicas."""

    tensors: tuple[Tensor, ...]
    flight: Transit


@dataclass(frozen=True)
class DealtWeights:
    """Weights of experts that are dealt to the ranks of a stage."""

    names: frozenset[str]
    replicas: dist.ProcessGroup | None
    """The ranks that hold the same ones; None if no other does."""


class StageLink:
    """What a rank sends to the others of its pipeline, and receives; and what it sums with the
    ranks that run the same stage on other data. Not thread-safe."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        replicas: dist.ProcessGroup | None = None,
        dealt: DealtWeights | None = None,
        around: Sequence[dist.ProcessGroup] = (),
        wait_s: float = WAIT_S,
    ) -> None:
        """`group` has the ranks of one pipeline, in order, `replicas` those of this stage, `around`
        other ranks that actions exchange something with; gradients of `dealt` weights come from all
        replicas, and are summed over fewer ranks. Each wait takes at most `wait_s`. Raises
        InputError if gloo is to send the memory of a GPU, which it takes for the host's."""
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.data_ranks = 1 if replicas is None else dist.get_world_size(replicas)
        self.is_unordered = on_gloo(device.type, group)
        """Whether no message waits for another one, as it does in a stream of NCCL."""
        if self.is_unordered and device.type != "cpu":
            raise InputError(
                f"the stages are on {device}, and gloo is to send between them",
                hint='init_process_group("cpu:gloo,cuda:nccl") takes NCCL for that',
            )
        self._group = group
        self._replicas = replicas
        self._dealt = dealt or DealtWeights(frozenset(), None)
        self.device = device
        self._leads = True
        """Whether this rank speaks for its stage."""
        self._leaving: deque[Transit] = deque()
        others = [each for each in (replicas, self._dealt.replicas) if each is not None]
        beside = {r for g in (*others, *around) for r in dist.get_process_group_ranks(g)}
        self._beside = sorted(beside - {dist.get_rank()})
        """Ranks that this one meets in the middle of an action."""
        every = [group, *others, *around]
        self.end = JointEnd(every, device.type, wait_s)
        """Ends a step that fails on all ranks."""
        self._streams: StreamWatch | None = None
        if not self.is_unordered and device.type != "cpu":
            self._streams = StreamWatch(wait_s, device, every, self.end.others_left)

    @property
    def loss_ranks(self) -> int:
        """How many ranks have losses of their own, of which the step's gradient is the mean."""
        return self.data_ranks

    def who(self, rank: int) -> str:
        """The rank that is at this place of the pipeline, among all ranks of the job."""
        return f"rank {self.job_rank(rank)}"

    def job_rank(self, rank: int) -> int:
        """The number among all ranks of the one at this place of the pipeline."""
        return dist.get_global_rank(self._group, rank)

    @contextmanager
    def inside(self, action: Callable[[], str]) -> Iterator[None]:
        """A context around an action, in which the ranks of a stage meet: what a transport raises
        there names it. Raises Unended."""
        try:
            yield
        except RuntimeError as error:
            if not self._beside or not from_communication(error):
                raise
            raise Unended(
                f"a collective of rank {dist.get_rank()} did not end, in {action()}, where it "
                f"meets {_ranks(self._beside)}: {error}",
                hint=self._hint,
            ) from error

    @contextmanager
    def together(self, explained: Callable[[str], str]) -> Iterator[None]:
        """A context around a step, which ends on all ranks or raises on all. `explained` gives what
        is to be said of an exchange that was waited for."""
        with self.end.for_all():
            streams = self._streams
            if streams is None:
                yield
                return
            try:
                with streams.watching():
                    yield
            except (RuntimeError, Unended):  # of a communicator that the watch has aborted
                if streams.late is None:
                    raise
            if streams.late is not None:
                what, reason = streams.late
                text = f"{what} did not end: {reason}{explained(what)}"
                raise Unended(text, hint=self._hint)

    def prepare(self, handovers: Handovers) -> None:
        """Get ready for what chunks hand to each other. Collective on the default group."""

    def first_look(self, batches: Sequence[Sequence[Tensor]]) -> None:
        """Check the micro-batches of a step over all ranks, where that is to be done."""

    def tell(self, count: int, ranks: Sequence[int]) -> None:
        """Tell ranks how many micro-batches this one has in a step, ahead of what else it sends. On
        NCCL nobody is told, as the host would have to wait for what is read."""
        if self.is_unordered and self._leads:
            for rank in ranks:
                what = f"the number of micro-batches to {self.who(rank)}"
                self.send([torch.tensor([count])], rank, what)

    def ask(self, ranks: Sequence[int]) -> "dict[int, Arrival]":
        """Be ready for what these ranks `tell`."""
        if not (self.is_unordered and self._leads):
            return {}
        return {rank: self.receive([torch.empty(1, dtype=torch.int64)], rank, "") for rank in ranks}

    def compare(self, told: "Arrival", count: int, rank: int, what: str) -> None:
        """Raise PeerError unless a rank has told this number. `what` is for errors."""
        (theirs,) = self.wait(
            replace(told, flights=tuple(replace(f, what=what) for f in told.flights))
        )
        if int(theirs) != count:
            places = dist.get_rank(), self.job_rank(rank)
            shapes = f"{count} micro-batches", f"{int(theirs)} micro-batches"
            hint = "give every rank of a pipeline the same micro-batches, as many in each step"
            refuse_difference(shapes, places, hint)

    def send_message(
        self, message: StageMessage, tensors: Sequence[Tensor], to: int, what: str
    ) -> None:
        """Give what a chunk hands over to a rank, as `send`."""
        self.send(tensors, to, what)

    def receive_message(
        self, message: StageMessage, like: Sequence[Tensor], source: int, what: str
    ) -> Arrival:
        """Be ready for what a chunk hands over, as `receive`."""
        return self.receive(like, source, what)

    def send(self, tensors: Sequence[Tensor], to: int, what: str) -> None:
        """Give tensors, which nobody changes any more, to a rank; `what` is for errors."""
        self._forget_gone()
        for tensor in tensors:
            if not tensor.numel():
                continue
            memory = _bytes_of(tensor)
            with self._said(what):
                work = dist.isend(memory, group=self._group, group_dst=to)
            self._leaving.append(self._under_way(work, memory, what))

    def _under_way(self, work: dist.Work | None, memory: Tensor, what: str) -> Transit:
        assert work is not None
        if self._streams is not None:
            self._streams.note(work, what)
        return Transit(work, memory, what)

    def _forget_gone(self) -> None:
        while self._leaving and self._leaving[0].work.is_completed():
            self._leaving.popleft()

    def receive(self, like: Sequence[Tensor], source: int, what: str) -> Arrival:
        """Be ready for tensors that lie in memory like these."""
        tensors, flights = [], []
        for each in like:
            tensor = self.empty(each)
            tensors.append(tensor)
            if not tensor.numel():
                continue
            memory = _bytes_of(tensor)
            with self._said(what):
                work = dist.irecv(memory, group=self._group, group_src=source)
            flights.append(self._under_way(work, memory, what))
        return Arrival(tuple(tensors), tuple(flights))

    def empty(self, like: Tensor) -> Tensor:
        """Memory of this rank for a value that is laid out so."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def wait(self, arrival: Arrival) -> tuple[Tensor, ...]:
        """The tensors of a message, once they are here. Raises Unended if they do not come."""
        for flight in arrival.flights:
            self._wait(flight)
        return arrival.tensors

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        while self._leaving:
            self._wait(self._leaving.popleft())

    def begin_sums(self, totals: Mapping[str, Tensor], what: str) -> "list[ReplicaSum]":
        """Begin to add up these gradients, by parameter, over the ranks that hold the same ones,
        which all do so in the same order."""
        dealt = self._dealt
        alike = [total for name, total in totals.items() if name not in dealt.names]
        own = [total for name, total in totals.items() if name in dealt.names]
        found = []
        for tensors, group in ((alike, self._replicas), (own, dealt.replicas)):
            if not tensors or group is None:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            with self._said(what):
                work = dist.all_reduce(flat, group=group, async_op=True)
            found.append(ReplicaSum(tuple(tensors), self._under_way(work, flat, what)))
        return found

    def end_sum(self, begun: "ReplicaSum") -> None:
        """Put the sums into the tensors."""
        self._wait(begun.flight)
        sizes = [tensor.numel() for tensor in begun.tensors]
        for tensor, part in zip(begun.tensors, begun.flight.memory.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def averaged(self, losses: Tensor) -> Tensor:
        """The losses that the ranks of this stage tell the others."""
        return losses

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here."""
        with self._said(what):
            self._ended(dist.barrier(group=self._group, async_op=True))

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank. Plain data only."""
        found: list[Any] = [None] * dist.get_world_size(self._group)
        with self._said("a gathering of the ranks of the pipeline"):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def add_up(self, tensor: Tensor, what: str) -> None:
        """Replace a tensor by its sum over the pipeline. All its ranks call it."""
        with self._said(what):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        self._wait(self._under_way(work, tensor, what))

    def share(self, tensor: Tensor, source: int, what: str) -> None:
        """Give every rank what `tensor` holds on rank `source`. All ranks call it."""
        with self._said(what):
            work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        self._wait(self._under_way(work, tensor, what))

    def _wait(self, flight: Transit) -> None:
        with self._said(flight.what):
            self._ended(flight.work)

    def _ended(self, work: Work | None) -> None:
        """Wait for an operation, on gloo no longer than the bound. The wait of NCCL is one of its
        stream, and in a step `StreamWatch` bounds it."""
        assert work is not None
        if self.is_unordered:
            work.wait(self.end.timeout)
        else:
            work.wait()

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """Raises what a transport raises as an error that says what was waited for."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise Unended(
                f"{what} did not end: {text}",
                hint=self._hint,
            ) from error

    @property
    def _hint(self) -> str:
        return (
            "the other rank has died, stalled or left: see the end of its output; "
            f"compile_step(wait_s={self.end.wait_s:g}) bounds how long a rank waits"
        )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {listed(numbers)}"


def as_traced(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, in memory as the other side expects it."""
    return restrided(tensor, like.stride())
