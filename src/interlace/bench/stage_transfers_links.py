"""Ways to run a pipeline of stages that no product should have: transfers that everybody waits for,
and transfers that carry next to nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.ir.actions import Action
from interlace.ir.stage_messages import Edge, Item, Receive, Send, StageMessage, Wiring
from interlace.reshard.messages import Shards
from interlace.reshard.wire import Wire
from interlace.runtime.boundaries import Boundary
from interlace.runtime.handovers import Handovers
from interlace.runtime.laid_out_link import LaidOutLink
from interlace.runtime.stage_link import Transit, Work
from interlace.schedules.stage import StageSchedule
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import ACTION, simulate_pipeline


class BlockingLink(LaidOutLink):
    """Every send and receive is waited for where it stands. A send is over when the other side has
    said so: gloo takes it for sent once the kernel has it, while a GPU's stream is held until the
    receiver has nearly all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_unordered = False  # so that receives are not posted early

    def _begun(
        self, message: StageMessage, boundary: Boundary, shards: Shards, what: str
    ) -> Transit:
        transit = super()._begun(message, boundary, shards, what)
        self._wait(transit)
        wire = _wire(message, boundary, self._messages)
        operations = boundary.program.operations
        with self._said(what):
            said = [
                (wire.receive if sends else wire.send)(torch.zeros(1), peer)
                for peer, sends in dict.fromkeys((each.peer, each.sends) for each in operations)
            ]
            for work in said:
                self._ended(work)
        return transit


class SignalLink(LaidOutLink):
    """Each message is one element from a rank of a stage to a rank of the other, and what arrives
    is zeros: the most that hiding transfers could reach."""

    def prepare(self, handovers: Handovers) -> None:
        """As ever; and which stage has which chunk."""
        super().prepare(handovers)
        self._stage_of = handovers.rank_of

    def _begun(
        self, message: StageMessage, boundary: Boundary, shards: Shards, what: str
    ) -> Transit:
        stages = [self._stage_of[chunk] for chunk in (message.source, message.to)]
        senders, receivers = (self._stages.meshes[stage].ranks for stage in stages)
        wire, own = _wire(message, boundary, self._messages), dist.get_rank()
        one = torch.zeros(1)
        works: list[dist.Work] = []
        for number, receiver in enumerate(receivers):
            sender = senders[number % len(senders)]
            if own == sender:
                works.append(wire.send(one, receiver))
            elif own == receiver:
                works.append(wire.receive(one, sender))
        for part in shards.destinations:
            if part is not None:
                part.zero_()  # what lay there before may be slow to compute with
        return Transit(_All(tuple(works)), one, what)


@dataclass(frozen=True)
class _All:
    """Several works as one."""

    works: Sequence[Work]

    def is_completed(self) -> bool:
        """Whether all are known to be over."""
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: timedelta | None = None) -> None:
        """One after the other."""
        for work in self.works:
            work.wait() if timeout is None else work.wait(timeout)


def _wire(message: StageMessage, boundary: Boundary, messages: int) -> Wire:
    """For messages of our own, by the tag of a message between stages."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return Wire(group=everyone, plan=message.micro_batch * messages + boundary.number)


class ClockedSchedule(StageSchedule):
    """The same actions, with messages where ranks are when they leave: by a clock, by which a
    backward takes twice as long as a forward. Who waits for every message loses least so, as in
    systems that exchange between the turns of their ranks."""

    @classmethod
    def of(cls, schedule: StageSchedule) -> "ClockedSchedule":
        """This schedule by the clock."""
        return cls(**{f.name: getattr(schedule, f.name) for f in fields(schedule) if f.init})

    def items(self, micro_batches: int) -> tuple[Item, ...]:
        """The actions of this rank with what it sends and receives between them."""
        assert self.edges is not None
        return by_the_clock(self.lists(micro_batches), self.edges)[self.rank]


def by_the_clock(
    ranks: Sequence[Sequence[Action]], edges: Collection[Edge]
) -> list[tuple[Item, ...]]:
    """The lists of all ranks with their messages: a send behind the action that makes it, a receive
    behind the action in which its rank is then."""
    wiring = Wiring(ranks, edges)
    chunk = ChunkCosts(forward_ns=1000, input_ns=1000, weight_ns=1000)
    costs = PipelineCosts(chunks=[chunk] * len(wiring.rank_of), edges=tuple(edges))
    spans = [
        [span for span in timeline.spans if span.kind == ACTION]
        for timeline in simulate_pipeline(ranks, costs).timelines
    ]
    placed: list[list[tuple[int, int, Item]]] = [
        [(index, 0, action) for index, action in enumerate(actions)] for actions in ranks
    ]
    ends = sorted(
        (span.end_ns, rank, index)
        for rank, own in enumerate(spans)
        for index, span in enumerate(own)
    )
    event = 0
    for at, rank, index in ends:
        for message in wiring.sent(ranks[rank][index]):
            event += 1
            to = wiring.rank_of[message.to]
            begun = sum(span.start_ns < at for span in spans[to]) - 1
            placed[rank].append((index, event, Send(message, to)))
            placed[to].append((begun, event, Receive(message, rank)))
    return [tuple(item for _, _, item in sorted(own, key=lambda each: each[:2])) for own in placed]
