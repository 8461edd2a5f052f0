"""PipelineExecutor: what one rank of a pipeline runs in a step, between what it sends and receives.

Receives are posted where the schedule has them, which is when the message leaves its rank, or a
little earlier where the transport allows it, and an action waits only for what it reads itself.
Sends are never waited for before the end of a step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interlace.graphs.dropout import no_dropout
from interlace.graphs.parts import SAVED, GraphPart
from interlace.ir.actions import Action, Direction
from interlace.ir.graph import OpGraph
from interlace.ir.plan import Plan
from interlace.ir.stage_messages import Item, Receive, Send, StageMessage, Wiring
from interlace.runtime.executor import Batch, StepExecutor, StepRun
from interlace.runtime.handovers import Carried, Handovers
from interlace.runtime.joint_end import Unended
from interlace.runtime.pipeline_record import ActionWatch, PipelineRecord, build_record
from interlace.runtime.recorder import Recorder
from interlace.runtime.stage_link import Arrival, ReplicaSum, StageLink, as_traced
from interlace.schedules.sends_receives import with_early_receives
from interlace.schedules.stage import StageSchedule
from interlace.search.memory import chunk_bytes

_EARLY = 2
"""Actions by which receives are posted earlier on gloo; a choice, as much memory as two messages
of each kind."""


class PipelineExecutor(StepExecutor):
    """Runs the chunks of this rank, and exchanges what chunks hand to each other."""

    def __init__(
        self,
        parts: Mapping[str, GraphPart],
        plan: Plan,
        op_graphs: Mapping[str, OpGraph],
        constants: Mapping[tuple[str, str], Tensor],
        *,
        schedule: StageSchedule,
        handovers: Handovers,
        link: StageLink,
        loss: Tensor,
    ) -> None:
        """As `StepExecutor`; `loss` is a fake tensor like the loss of a micro-batch."""
        handovers.check()
        super().__init__(
            parts, plan, op_graphs, constants, schedule=schedule, data_ranks=link.loss_ranks
        )
        self.handovers = handovers
        self.link = link
        self.watch: ActionWatch | None = None
        """Notes times of the next step, where one is wanted."""
        self._stage = schedule
        self._loss = loss
        self._items: dict[int, tuple[tuple[Item, ...], Wiring]] = {}
        self._forwards: dict[int, tuple[tuple[Item, ...], Wiring]] = {}
        """By number of micro-batches: what a step runs, and what an evaluation does."""

    def step(self, batches: Sequence[Batch], recorder: Recorder | None = None) -> list[Tensor]:
        """Losses of all micro-batches, on all ranks; gradients of their mean are added to the
        buffers. Raises Unended, naming message, action and rank, if another rank does not do its
        part; what this rank raises itself ends the step on all others."""
        count = len(batches)
        items, wiring = self._listed(count)
        self._tangent.fill_(self._weight(count))
        run = _PipelineRun(self, [self._as_traced(batch) for batch in batches], recorder, wiring)
        with self.link.together(run.explained), self.plain_operators():
            run.all(items)
            run.end_sums()
            self.results = run.given()
            self._share_gradients()
            self.link.finish()
            return self._losses(run.losses, count)

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Losses of these micro-batches, on all ranks, forward only; so many at a time as the
        schedule runs. Every rank calls it. Raises InputError as `StepExecutor.evaluate`."""
        self._check_draws()
        most = self._stage.most or max(1, len(batches))
        losses: list[Tensor] = []
        results: list[tuple[Tensor, ...]] = []
        for start in range(0, max(1, len(batches)), most):
            losses += self._evaluated(batches[start : start + most])
            results += self.results
        self.results = results
        return losses

    def _evaluated(self, batches: Sequence[Batch]) -> list[Tensor]:
        count = len(batches)
        if count not in self._forwards:
            forwards = self._received_early(self._stage.forward_items(count))
            self._forwards[count] = forwards, self._stage.wiring(count)
        items, wiring = self._forwards[count]
        inputs = [(*self._as_traced(batch), no_dropout()) for batch in batches]
        run = _ForwardRun(self, inputs, None, wiring)
        with self.link.together(run.explained), self.plain_operators():
            run.all(items)
            self.results = run.given()
            self.link.finish()
            return self._losses(run.losses, count)

    def _listed(self, count: int) -> tuple[tuple[Item, ...], Wiring]:
        if count not in self._items:
            self._step_actions(count)
            items = self._received_early(self._stage.items(count))
            self._items[count] = items, self._stage.wiring(count)
        return self._items[count]

    def lists(self, count: int) -> tuple[tuple[Action, ...], ...]:
        """The actions of all ranks in a step of so many micro-batches."""
        return self._stage.lists(count)

    def _received_early(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        return with_early_receives(items, _EARLY) if self.link.is_unordered else items

    @contextmanager
    def watched(self) -> Iterator[ActionWatch]:
        """Times of the step inside, which all ranks of the pipeline begin together."""
        self.link.meet("the start of a recorded step")
        self.watch = watch = ActionWatch(self._tangent.device)
        watch.begin()
        try:
            yield watch
        finally:
            self.watch = None
        watch.end()

    def record(self, watch: ActionWatch, count: int) -> PipelineRecord:
        """What all ranks did in a step of so many micro-batches. Collective over the pipeline."""
        lists, chunks = self.lists(count), len(self.handovers.rank_of)
        memory = {
            chunk: chunk_bytes(self.op_graphs, chunk if chunks > 1 else None)
            for chunk in range(chunks)
            if self.handovers.rank_of[chunk] == self.handovers.rank
        }
        return build_record(watch, memory, lists, self.link, self.handovers)

    def passes(self, count: int) -> Counter[int]:
        """How many backwards, whole or halves, each chunk of this rank runs in a step."""
        items, _ = self._listed(count)
        return Counter(
            slot.strand.chunk or 0
            for item in items
            if isinstance(item, Action)
            for slot in item.slots
            if slot.strand.direction == Direction.BACKWARD
        )

    def _share_gradients(self) -> None:
        """The sum of the gradients of a weight that several ranks hold, from the one that added it
        up. In the same order on all ranks."""
        handovers = self.handovers
        arrivals = []
        for name in handovers.shared:
            holders, owner = handovers.holders(name), handovers.owner(name)
            if handovers.rank not in holders:
                continue
            total = self.constant("gradient", name)
            what = f"the gradient of {name!r} from {self.link.who(owner)}"
            if handovers.rank != owner:
                arrivals.append((total, self.link.receive([total], owner, what)))
                continue
            for rank in holders:
                if rank != owner:
                    self.link.send([total], rank, f"{what} to {self.link.who(rank)}")
        for total, arrival in arrivals:
            total.copy_(self.link.wait(arrival)[0])

    def _losses(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:
        """Those of the rank that has the last chunk, on all ranks."""
        source = self.handovers.rank_of[-1]
        losses = torch.empty(count, dtype=self._loss.dtype, device=self._tangent.device)
        if source == self.handovers.rank:
            losses = self.link.averaged(torch.stack([own[number] for number in sorted(own)]))
        what = f"the losses of the step from {self.link.who(source)}"
        self.link.share(losses, source, what)
        return list(losses.unbind())


class _PipelineRun(StepRun):
    def __init__(
        self,
        executor: PipelineExecutor,
        batches: Sequence[Batch],
        recorder: Recorder | None,
        wiring: Wiring,
    ) -> None:
        super().__init__(executor, batches, recorder)
        self.link = executor.link
        self._watch = executor.watch
        self._lists = executor.lists
        self.handovers = executor.handovers
        self._wiring = wiring
        self._told: dict[int, Arrival] = {}
        """How many micro-batches other ranks have, until that is compared."""
        self._arrivals: dict[StageMessage, Arrival] = {}
        self._asked: dict[str, StageMessage] = {}
        """Messages that were asked for, by what errors call that."""
        self._sums: list[ReplicaSum] = []
        self._left_of_chunk = executor.passes(len(batches))
        self._kept_by: dict[tuple[int, Any], int] = {}
        """How many messages will still take a value that no strand of this rank reads."""

    def all(self, items: Sequence[Item]) -> None:
        """Run a list."""
        to = {item.rank for item in items if isinstance(item, Send)}
        source = {item.rank for item in items if isinstance(item, Receive)}
        self.link.tell(len(self.batches), sorted(to))
        self._told = self.link.ask(sorted(source))
        for item in items:
            self.item(item)
        for rank in sorted(self._told):
            self._compare(rank, f"the number of micro-batches of {self.link.who(rank)}")

    def _compare(self, rank: int, what: str) -> None:
        """Whether a rank has as many micro-batches as this one, when this one waits for it."""
        if rank in self._told:
            self.link.compare(self._told.pop(rank), len(self.batches), rank, what)

    def item(self, item: Item) -> None:
        """Run one item of the list."""
        if isinstance(item, Action):
            self._act(item)
            if self.link.data_ranks > 1:
                self._begin_sums(item)
        elif isinstance(item, Send):
            self._send(item)
        else:
            like = [value.like for value in self._values(item.message)]
            if like:
                # gloo refuses to begin a receive from a rank that has closed its connection.
                with self._saying_who_makes(item.message):
                    what = f"receive {item.message} from {self.link.who(item.rank)}"
                    self._asked[what] = item.message
                    self._arrivals[item.message] = self.link.receive_message(
                        item.message, like, item.rank, what
                    )

    def _act(self, action: Action) -> None:
        watch = self._watch
        turn = watch.now() if watch is not None else 0
        for message in self._wiring.needed(action):
            self._take_in(message)
        ready = watch.now() if watch is not None else 0
        with self.link.inside(lambda: self._numbered(self.link.rank, action)):
            self.action(action)
        if watch is not None:
            watch.noted.append((turn, ready, watch.now()))

    def end_sums(self) -> None:
        """Wait for the sums over replicas."""
        for begun in self._sums:
            self.link.end_sum(begun)

    def _begin_sums(self, action: Action) -> None:
        """Sum the gradients of a chunk over replicas as soon as its last backward has run."""
        for slot in action.slots:
            chunk = slot.strand.chunk or 0
            if slot.strand.direction == Direction.FORWARD:
                continue
            self._left_of_chunk[chunk] -= 1
            if self._left_of_chunk[chunk]:
                continue
            names = [n for n in sorted(self.handovers.owners) if self.handovers.owners[n] == chunk]
            if names:
                totals = {name: self.executor.constant("gradient", name) for name in names}
                what = f"the sum of the gradients of chunk {chunk} over replicas"
                self._sums += self.link.begin_sums(totals, what)

    def _values(self, message: StageMessage) -> tuple[Carried, ...]:
        route = message.direction, message.source, message.to
        return self.handovers.messages.get(route, ())

    def _take_in(self, message: StageMessage) -> None:
        if message not in self._arrivals:
            return
        rank = self._wiring.rank_of[message.source]
        with self._saying_who_makes(message):
            self._compare(rank, f"receive {message} from {self.link.who(rank)}")
            tensors = self.link.wait(self._arrivals.pop(message))
        for value, tensor in zip(self._values(message), tensors, strict=True):
            self.handed[message.micro_batch, value.binding] = tensor

    @contextmanager
    def _saying_who_makes(self, message: StageMessage) -> Iterator[None]:
        """Adds to the error of a message that does not come which action makes it."""
        try:
            yield
        except Unended as error:
            raise Unended(f"{error.message}; {self._made_by(message)}", hint=error.hint) from error

    def explained(self, what: str) -> str:
        """Which action makes what this rank has asked for; empty for anything else."""
        return f"; {self._made_by(self._asked[what])}" if what in self._asked else ""

    def _made_by(self, message: StageMessage) -> str:
        """Which action of which rank makes a message."""
        rank = self._wiring.rank_of[message.source]
        for action in self._lists(len(self.batches))[rank]:
            if message in self._wiring.sent(action):
                return f"{self.link.who(rank)} makes it in {self._numbered(rank, action)}"
        raise AssertionError(f"nobody makes {message}")

    def _numbered(self, rank: int, action: Action) -> str:
        """An action, and its place in the list of its rank."""
        actions = self._lists(len(self.batches))[rank]
        if action not in actions:  # a forward of an evaluation
            return f"its action {action}"
        return f"its action {actions.index(action) + 1}, {action}"

    def _send(self, item: Send) -> None:
        message, tensors = item.message, []
        for value in self._values(message):
            key = message.micro_batch, value.binding
            tensors.append(as_traced(self.handed[key], value.like))
            if value.binding in self.executor.readers:
                continue
            left = self._kept_by.pop(key, self._takers(message, value)) - 1
            if left:
                self._kept_by[key] = left
            else:
                del self.handed[key]
        if tensors:
            what = f"send {message} to {self.link.who(item.rank)}"
            self.link.send_message(message, tensors, item.rank, what)

    def _takers(self, message: StageMessage, value: Carried) -> int:
        """The messages that take this value."""
        return sum(
            any(other.binding == value.binding for other in values)
            for (way, source, _), values in self.handovers.messages.items()
            if (way, source) == (message.direction, message.source)
        )


class _ForwardRun(_PipelineRun):
    """Forwards without their backwards."""

    def action(self, action: Action) -> None:
        """Run a forward in traced order, and drop what its backward would read."""
        (slot,) = action.slots
        label = slot.strand.label
        lowered = self.executor.alone(label)
        self.run(lowered, {label: slot.micro_batch})
        for _, name in lowered.outputs:
            if name.role == SAVED:
                del self.handed[slot.micro_batch, name]
