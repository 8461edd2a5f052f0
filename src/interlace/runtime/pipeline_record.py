"""What all ranks of a pipeline did in a step, and what the simulator makes of the same times.

The times of passes, and of what a rank does between them to send and receive, are those of the
recorded step itself, and those of messages of messages that are sent for it with nothing else under
way. So the prediction says what order and waiting cost, and where it differs from the step,
something else happened: messages that slowed each other down, or a rank that was held up once.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from interlace.ir.actions import Action, Direction, Share, Strand
from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.stage_messages import Edge, StageMessage
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.runtime.handovers import ChunkRoute, Handovers
from interlace.runtime.stage_link import StageLink
from interlace.sim.dealt_step import simulate_dealt
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import ACTION, END, MEASURED, ComparedStep, PipelineStep

_PINGS = 5
"""Messages of each kind that are timed; the median counts."""


class ActionWatch:
    """Notes when actions of this rank waited, began and ended, in ns of one clock. On a GPU it
    waits for the device at each of them, so the step is slower than without."""

    def __init__(self, device: torch.device) -> None:
        self.noted: list[tuple[int, int, int]] = []
        """By action: when it was its turn, when its messages were there, and its end."""
        self.began = self.ended = 0
        """Of the whole step."""
        self._device = device

    def begin(self) -> None:
        """The step begins."""
        self.began = self.now()

    def end(self) -> None:
        """It has ended."""
        self.ended = self.now()

    def now(self) -> int:
        """Nanoseconds, once the device has done everything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()


@dataclass(frozen=True, kw_only=True)
class PipelineRecord(ComparedStep):
    """A step that all ranks of a pipeline ran, and the times that its simulation is made from."""

    costs: PipelineCosts
    """Means of passes and medians of messages, as measured."""


@dataclass(frozen=True)
class _Seen:
    """What a rank tells the others."""

    host: str
    began: int
    noted: Sequence[tuple[int, int, int]]
    ended: int
    memory: Mapping[int, tuple[int, int]]

    @property
    def before_ns(self) -> int:
        """From the start of the step to the first action."""
        return self.noted[0][0] - self.began

    @property
    def behind_ns(self) -> int:
        """From the end of the last action to that of the step."""
        return self.ended - self.noted[-1][2]


def build_record(
    watch: ActionWatch,
    memory: Mapping[int, tuple[int, int]],
    actions: Sequence[Sequence[Action]],
    link: StageLink,
    handovers: Handovers,
) -> PipelineRecord:
    """The record of a step that this rank has watched, with the bytes that its chunks keep
    (`chunk_bytes`). Collective over the pipeline."""
    seen = link.gather(_Seen(platform.node(), watch.began, watch.noted, watch.ended, memory))
    ranks = tuple(tuple(own) for own in actions)
    hops = _hops(link, handovers, watch)
    lasted, behind = _times(ranks, seen)
    costs = _costs(seen, lasted, behind, hops, handovers)
    predicted = simulate_dealt(ranks, costs, lasted, behind)
    # Processes of one host have one clock. Clocks of hosts differ, but all left a barrier then.
    began = [each.began for each in seen]
    if len({each.host for each in seen}) == 1:
        began = [min(began)] * len(began)
    timelines = tuple(
        Timeline(MEASURED, rank, _spans(ranks[rank], each, began[rank]))
        for rank, each in enumerate(seen)
    )
    measured = PipelineStep(timelines, predicted.peak_bytes, predicted.peak_chunks)
    return PipelineRecord(actions=ranks, measured=measured, predicted=predicted, costs=costs)


def _spans(actions: Sequence[Action], seen: _Seen, origin: int) -> tuple[Span, ...]:
    spans = []
    for action, (turn, ready, end) in zip(actions, seen.noted, strict=True):
        slot = action.slots[0]
        of = {"strand": str(slot.strand.direction), "micro_batch": slot.micro_batch}
        if ready > turn:
            spans.append(Span(str(action), WAIT, COMPUTE_LANE, turn - origin, ready - origin, **of))
        spans.append(Span(str(action), ACTION, COMPUTE_LANE, ready - origin, end - origin, **of))
    last = seen.noted[-1][2]
    spans.append(Span(END, END, COMPUTE_LANE, last - origin, seen.ended - origin))
    return tuple(spans)


_Times = Mapping[str, Sequence[int]]
"""By phase: ns of each time that it ran."""


def _times(ranks: Sequence[Sequence[Action]], seen: Sequence[_Seen]) -> tuple[_Times, _Times]:
    """How long actions lasted, and how long a rank was busy behind each but its last one."""
    lasted: dict[str, list[int]] = {}
    behind: dict[str, list[int]] = {}
    for actions, each in zip(ranks, seen, strict=True):
        own = each.noted
        for action, (_, ready, end) in zip(actions, own, strict=True):
            lasted.setdefault(action.phase, []).append(end - ready)
        for action, (_, _, end), (turn, _, _) in zip(actions, own, own[1:], strict=False):
            behind.setdefault(action.phase, []).append(turn - end)
    return lasted, behind


def _costs(
    seen: Sequence[_Seen],
    lasted: _Times,
    behind: _Times,
    hops: Mapping[Edge, int],
    handovers: Handovers,
) -> PipelineCosts:
    # A step is a sum of passes, so their mean stands for them; a median leaves out the slow ones.
    ns = {phase: round(fmean(each)) for phase, each in lasted.items()}
    between = {phase: round(fmean(each)) for phase, each in behind.items()}
    count = len(handovers.rank_of)
    memory = {chunk: size for each in seen for chunk, size in each.memory.items()}
    chunks = [
        _chunk(ns, chunk if count > 1 else None, memory.get(chunk, (0, 0)))
        for chunk in range(count)
    ]
    pairs = {phase: each for phase, each in ns.items() if "+" in phase}
    return PipelineCosts(
        chunks=chunks, pairs_ns=pairs, messages_ns=hops, between_ns=between, edges=handovers.edges,
        before_ns=tuple(each.before_ns for each in seen),
        behind_ns=min(each.behind_ns for each in seen),  # of the rank that waits for no other
    )  # fmt: skip


def _chunk(ns: Mapping[str, int], chunk: int | None, memory: tuple[int, int]) -> ChunkCosts:
    """The times of a chunk's passes; what never ran alone is 0, as nothing asks for it."""

    def of(direction: Direction, share: Share = Share.WHOLE) -> int:
        return ns.get(Strand(direction, chunk, share).text, 0)

    first, late = of(Direction.BACKWARD, Share.INPUT), of(Direction.BACKWARD, Share.WEIGHT)
    if not first and not late:
        first = of(Direction.BACKWARD)
    saved, kept = memory
    return ChunkCosts(
        forward_ns=of(Direction.FORWARD), input_ns=first, weight_ns=late, saved_bytes=saved,
        kept_bytes=kept,
    )  # fmt: skip


def _hops(link: StageLink, handovers: Handovers, watch: ActionWatch) -> dict[Edge, int]:
    """By edge between two ranks: how long what goes over it takes, there or back, the longer one.
    All ranks take part, one message at a time."""
    found: dict[Edge, int] = {}
    for route, values in handovers.messages.items():
        like = [value.like for value in values]
        times = [_ping(link, handovers, route, like, watch) for _ in range(_PINGS)]
        # The shortest answer: where a rank waits for a core, one can take longer than the message.
        there_and_back, answers = zip(*times, strict=True)
        took = round(median(there_and_back)) - min(answers) // 2
        edge = min(route[1:]), max(route[1:])
        found[edge] = max(found.get(edge, 0), took)
    return found


def _ping(
    link: StageLink,
    handovers: Handovers,
    route: ChunkRoute,
    like: Sequence[torch.Tensor],
    watch: ActionWatch,
) -> tuple[int, int]:
    """ns until an answer of one element to a message of this route is back, and ns of two such
    answers, there and back. Equal on all ranks."""
    way, first, second = route
    source, to = handovers.rank_of[first], handovers.rank_of[second]
    what = f"a message that is timed, from rank {source} to rank {to}"
    message = StageMessage(way, first, second, 0)
    word = [torch.zeros(1, device=link.device)]
    link.meet(what)
    whole = words = 0
    if link.rank == source:
        tensors = [link.empty(each) for each in like]
        began = watch.now()
        link.send_message(message, tensors, to, what)
        link.wait(link.receive(word, to, what))
        answered = watch.now()
        link.send(word, to, what)
        link.wait(link.receive(word, to, what))
        whole, words = answered - began, watch.now() - answered
    elif link.rank == to:
        link.wait(link.receive_message(message, like, source, what))
        link.send(word, source, what)
        link.wait(link.receive(word, source, what))
        link.send(word, source, what)
    link.finish()
    return max(link.gather((whole, words)))
