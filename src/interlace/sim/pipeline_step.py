"""Simulate a step of a pipeline: every action of every rank, and the messages between them.

An action begins when its rank is free and what it reads has arrived, and takes the time of its
passes, or of the pair if two strands run side by side. A message leaves when the action that made
it ends; a link between two ranks carries one message at a time in each direction, beside compute.
Handing messages over may take time of the rank itself.
Times are those of whole passes, so this says what the order of actions costs, and
`sim.simulated_step` what happens inside of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from interlace.ir.actions import Action, Direction, Share, Slot
from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.stage_messages import Edge, StageMessage, Wiring, chain
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.schedules.verify import order_of_run

MEASURED = "measured"
"""Label of timelines of a step that was run, and not simulated."""
ACTION = "action"
"""Kind of the spans in which a rank computes."""
END = "end"
"""Name and kind of the span of what a step does behind its last actions."""
MESSAGE = "message"
"""Kind of the spans on a link, on the lane of its sender `to N`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCosts:
    """What the passes of one chunk cost for one micro-batch."""

    forward_ns: int
    input_ns: int
    """Gradients of inputs."""
    weight_ns: int
    """Gradients of weights; a whole backward takes both."""
    saved_bytes: int = 0
    """What a forward keeps for its backward."""
    kept_bytes: int = 0
    """What of it, and of what the gradients of inputs made, the gradients of weights need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """What a step costs. Times of pairs and messages that are not given: the sum of both passes,
    and nothing."""

    chunks: Sequence[ChunkCosts]
    pairs_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase (`forward_0+backward_1`): the time of passes side by side."""
    messages_ns: Mapping[Edge, int] = field(default_factory=dict)
    """By edge: how long its tensors take from rank to rank, and their gradients back."""
    between_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase: how long its rank is busy behind it, handing over what was made and asking for what
    comes; nothing by default."""
    edges: tuple[Edge, ...] | None = None
    """Which chunk reads which; by default each the one before."""
    before_ns: tuple[int, ...] = ()
    """By rank: from the start of the step to its first action; nothing by default."""
    behind_ns: int = 0
    """From the end of the last action of all ranks to that of the step."""

    def action_ns(self, action: Action) -> int:
        """How long an action takes."""
        alone = sum(self._pass_ns(slot) for slot in action.slots)
        return self.pairs_ns.get(action.phase, alone) if len(action.slots) > 1 else alone

    def message_ns(self, message: StageMessage) -> int:
        """How long a message takes."""
        forward = message.direction == Direction.FORWARD
        edge = (message.source, message.to) if forward else (message.to, message.source)
        return self.messages_ns.get(edge, 0)

    def _pass_ns(self, slot: Slot) -> int:
        chunk = self.chunks[slot.strand.chunk or 0]
        if slot.strand.direction == Direction.FORWARD:
            return chunk.forward_ns
        first = chunk.input_ns if slot.strand.share != Share.WEIGHT else 0
        return first + (chunk.weight_ns if slot.strand.share != Share.INPUT else 0)


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """What a step of a pipeline would do."""

    timelines: tuple[Timeline, ...]
    """One for each rank."""
    peak_bytes: tuple[int, ...]
    """By rank: the most that saved values take at a time."""
    peak_chunks: tuple[int, ...]
    """By rank: the most forwards whose values are kept at a time."""

    @property
    def step_ns(self) -> int:
        """From the first start to the last end."""
        return max(timeline.length_ns for timeline in self.timelines)

    @property
    def bubble_ns(self) -> tuple[int, ...]:
        """By rank: the time of the step in which it does not compute."""
        return tuple(self.step_ns - _busy_ns(timeline) for timeline in self.timelines)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        return sum(self.bubble_ns) / (len(self.timelines) * self.step_ns) if self.step_ns else 0.0


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """A step of a pipeline, of all ranks, as it was measured and as it is simulated from the times
    of its own passes and messages."""

    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    measured: PipelineStep
    """Peaks are not measured, and are those of the simulation."""
    predicted: PipelineStep

    @property
    def predicted_over_measured(self) -> float:
        """Of the step's time."""
        return self.predicted.step_ns / self.measured.step_ns

    def summary(self) -> str:
        """Two lines for people."""
        steps = (("measured", self.measured), ("predicted", self.predicted))
        return "\n".join(
            f"{name:9}  step {step.step_ns / 1e6:8.1f} ms  bubble {step.bubble_fraction:6.1%}"
            for name, step in steps
        )


def simulate_pipeline(
    ranks: Sequence[Sequence[Action]], costs: PipelineCosts, label: str = "predicted"
) -> PipelineStep:
    """The step that these actions make. They are sound (`schedules.verify`)."""
    edges = chain(len(costs.chunks)) if costs.edges is None else costs.edges
    return ListedActions(ranks, edges).step(costs, label)


class ListedActions:
    """The actions of all ranks in an order in which they can run, with their messages."""

    def __init__(self, ranks: Sequence[Sequence[Action]], edges: Sequence[Edge]) -> None:
        wiring = Wiring(ranks, edges)
        self._ranks = ranks
        self._order = []
        for rank, index in order_of_run(ranks, edges):
            action = ranks[rank][index]
            sent = [_Sent(each, wiring.rank_of[each.to]) for each in wiring.sent(action)]
            listed = _Numbers(action), wiring.needed(action), sent
            self._order.append((rank, index, *listed))
        self._first = {action.phase: action for own in ranks for action in own}
        """An action of each phase."""

    def step(
        self,
        costs: PipelineCosts,
        label: str = "predicted",
        taken: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> PipelineStep:
        """The step that they make. `taken` has, by rank and action, how long it takes and how long
        its rank is busy behind it, where that is not to be what `costs` says."""
        ranks = self._ranks
        free = list(costs.before_ns or [0] * len(ranks))
        times = {
            phase: (costs.action_ns(action), costs.between_ns.get(phase, 0))
            for phase, action in self._first.items()
        }
        links: dict[tuple[int, int], int] = {}
        arrived: dict[StageMessage, int] = {}
        spans: list[list[Span]] = [[] for _ in ranks]
        for rank, index, numbers, needed, sent in self._order:
            lasts, behind = times[numbers.phase] if taken is None else taken[rank][index]
            start = max([free[rank], *[arrived[message] for message in needed]])
            end = start + lasts
            if start > free[rank]:
                spans[rank].append(numbers.span(WAIT, COMPUTE_LANE, free[rank], start))
            spans[rank].append(numbers.span(ACTION, COMPUTE_LANE, start, end))
            free[rank] = end + behind
            for each in sent:
                begin = max(end, links.get((rank, each.to), 0))
                there = begin + costs.message_ns(each.message)
                arrived[each.message] = links[rank, each.to] = there
                spans[rank].append(each.span(begin, there, end))
        if costs.behind_ns:
            last = max(span.end_ns for own in spans for span in own)
            for own in spans:
                own.append(Span(END, END, COMPUTE_LANE, last, last + costs.behind_ns))
        peaks = [_peak(actions, costs) for actions in ranks]
        return PipelineStep(
            tuple(Timeline(label, rank, tuple(each)) for rank, each in enumerate(spans)),
            tuple(most for most, _ in peaks),
            tuple(count for _, count in peaks),
        )


def _peak(actions: Sequence[Action], costs: PipelineCosts) -> tuple[int, int]:
    """(bytes, forwards): the most that is kept at a time. What an action saves is there from its
    start, what it needs no more is freed at its end."""
    now, count, most, many = 0, 0, 0, 0
    for action in actions:
        ends = 0
        for slot in action.slots:
            chunk = costs.chunks[slot.strand.chunk or 0]
            share = slot.strand.share
            if slot.strand.direction == Direction.FORWARD:
                now, count = now + chunk.saved_bytes, count + 1
            elif share == Share.INPUT:
                now += max(0, chunk.kept_bytes - chunk.saved_bytes)
        most, many = max(most, now), max(many, count)
        for slot in action.slots:
            chunk = costs.chunks[slot.strand.chunk or 0]
            share = slot.strand.share
            if slot.strand.direction == Direction.BACKWARD:
                if share == Share.INPUT:
                    now -= max(0, chunk.saved_bytes - chunk.kept_bytes)
                else:
                    now -= chunk.kept_bytes if share == Share.WEIGHT else chunk.saved_bytes
                    ends += 1
        count -= ends
    return most, many


def _busy_ns(timeline: Timeline) -> int:
    return sum(span.duration_ns for span in timeline.spans if span.kind == ACTION)


class _Numbers:
    """What the spans of an action are called."""

    __slots__ = ("_micro_batch", "_name", "_strand", "phase")

    def __init__(self, action: Action) -> None:
        self.phase = action.phase
        self._name = str(action)
        self._strand = "+".join(dict.fromkeys(s.strand.shown for s in action.slots))
        self._micro_batch = action.slots[0].micro_batch

    def span(self, kind: str, lane: str, start: int, end: int) -> Span:
        return Span(self._name, kind, lane, start, end, self._strand, self._micro_batch)


class _Sent:
    """A message and the rank that it goes to."""

    __slots__ = ("_lane", "_name", "_strand", "message", "to")

    def __init__(self, message: StageMessage, to: int) -> None:
        self.message = message
        self.to = to
        self._name, self._lane, self._strand = str(message), f"to {to}", str(message.direction)

    def span(self, start: int, end: int, issue: int) -> Span:
        return Span(
            self._name, MESSAGE, self._lane, start, end, self._strand, self.message.micro_batch,
            issue_ns=issue,
        )  # fmt: skip
