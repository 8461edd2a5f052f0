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
from interlace.sim.pipeline_step import (
    ACTION,
    MEASURED,
    ChunkCosts,
    ComparedStep,
    PipelineCosts,
    PipelineStep,
    simulate_pipeline,
)

_PINGS = 5
"""Messages of each kind that are timed; the median counts."""


class ActionWatch:
    """Notes when actions of this rank waited, began and ended, in ns of one clock. On a GPU it
    waits for the device at each of them, so the step is slower than without."""

    def __init__(self, device: torch.device) -> None:
        self.noted: list[tuple[int, int, int]] = []
        """By action: when it was its turn, when its messages were there, and its end."""
        self._device = device

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


def build_record(
    watch: ActionWatch,
    actions: Sequence[Sequence[Action]],
    link: StageLink,
    handovers: Handovers,
) -> PipelineRecord:
    """The record of a step that this rank has watched. Collective over the pipeline."""
    of_ranks = link.gather((platform.node(), watch.noted))
    noted = [own for _, own in of_ranks]
    ranks = tuple(tuple(own) for own in actions)
    hops = _hops(link, handovers)
    costs = _costs(ranks, noted, hops, handovers)
    predicted = simulate_pipeline(ranks, costs)
    # Processes of one host have one clock. Clocks of hosts differ, but all left a barrier then.
    first = [own[0][0] for own in noted]
    if len({host for host, _ in of_ranks}) == 1:
        first = [min(first)] * len(first)
    timelines = tuple(
        Timeline(MEASURED, rank, _spans(ranks[rank], own, first[rank]))
        for rank, own in enumerate(noted)
    )
    measured = PipelineStep(timelines, predicted.peak_bytes, predicted.peak_chunks)
    return PipelineRecord(actions=ranks, measured=measured, predicted=predicted, costs=costs)


def _spans(
    actions: Sequence[Action], noted: Sequence[tuple[int, int, int]], origin: int
) -> tuple[Span, ...]:
    spans = []
    for action, (turn, ready, end) in zip(actions, noted, strict=True):
        slot = action.slots[0]
        of = {"strand": str(slot.strand.direction), "micro_batch": slot.micro_batch}
        if ready > turn:
            spans.append(Span(str(action), WAIT, COMPUTE_LANE, turn - origin, ready - origin, **of))
        spans.append(Span(str(action), ACTION, COMPUTE_LANE, ready - origin, end - origin, **of))
    return tuple(spans)


def _costs(
    ranks: Sequence[Sequence[Action]],
    noted: Sequence[Sequence[tuple[int, int, int]]],
    hops: Mapping[Edge, int],
    handovers: Handovers,
) -> PipelineCosts:
    lasted: dict[str, list[int]] = {}
    behind: dict[str, list[int]] = {}
    for actions, own in zip(ranks, noted, strict=True):
        for action, (_, ready, end) in zip(actions, own, strict=True):
            lasted.setdefault(action.phase, []).append(end - ready)
        for action, (_, _, end), (turn, _, _) in zip(actions, own, own[1:], strict=False):
            behind.setdefault(action.phase, []).append(turn - end)
    # A step is a sum of passes, so their mean predicts it; a median leaves out the slow ones.
    ns = {phase: round(fmean(each)) for phase, each in lasted.items()}
    between = {phase: round(fmean(each)) for phase, each in behind.items()}
    count = len(handovers.rank_of)
    chunks = [_chunk(ns, chunk if count > 1 else None) for chunk in range(count)]
    pairs = {phase: each for phase, each in ns.items() if "+" in phase}
    return PipelineCosts(
        chunks=chunks, pairs_ns=pairs, messages_ns=hops, between_ns=between, edges=handovers.edges
    )


def _chunk(ns: Mapping[str, int], chunk: int | None) -> ChunkCosts:
    """The times of a chunk's passes; what never ran alone is 0, as nothing asks for it."""

    def of(direction: Direction, share: Share = Share.WHOLE) -> int:
        return ns.get(Strand(direction, chunk, share).text, 0)

    first, late = of(Direction.BACKWARD, Share.INPUT), of(Direction.BACKWARD, Share.WEIGHT)
    if not first and not late:
        first = of(Direction.BACKWARD)
    return ChunkCosts(forward_ns=of(Direction.FORWARD), input_ns=first, weight_ns=late)


def _hops(link: StageLink, handovers: Handovers) -> dict[Edge, int]:
    """By edge between two ranks: how long what goes over it takes, there or back, the longer one.
    All ranks take part, one message at a time."""
    found: dict[Edge, int] = {}
    for route, values in handovers.messages.items():
        like = [value.like for value in values]
        times = [_ping(link, handovers, route, like) for _ in range(_PINGS)]
        edge = min(route[1:]), max(route[1:])
        found[edge] = max(found.get(edge, 0), round(median(times)))
    return found


def _ping(
    link: StageLink, handovers: Handovers, route: ChunkRoute, like: Sequence[torch.Tensor]
) -> int:
    """ns that a message of this route takes: until an answer of one element is back, less the time
    of that."""
    way, first, second = route
    source, to = handovers.rank_of[first], handovers.rank_of[second]
    what = f"a message that is timed, from rank {source} to rank {to}"
    message = StageMessage(way, first, second, 0)
    word = [torch.zeros(1, device=link.device)]
    link.meet(what)
    took = 0
    if link.rank == source:
        tensors = [link.empty(each) for each in like]
        began = time.perf_counter_ns()
        link.send_message(message, tensors, to, what)
        link.wait(link.receive(word, to, what))
        answered = time.perf_counter_ns()
        link.send(word, to, what)
        link.wait(link.receive(word, to, what))
        took = answered - began - (time.perf_counter_ns() - answered) // 2
    elif link.rank == to:
        link.wait(link.receive_message(message, like, source, what))
        link.send(word, source, what)
        link.wait(link.receive(word, source, what))
        link.send(word, source, what)
    link.finish()
    return max(0, *link.gather(took))
