"""Simulate a step of a pipeline: every action of every rank, and the messages between them.

An action begins when its rank is free and what it reads has arrived, and takes the time of its
passes, or of the pair if two strands run side by side. A message leaves when the action that made
it ends; a link between two ranks carries one message at a time in each direction, beside compute.
Handing messages over may take time of the rank itself.
Times are those of whole passes, so this says what the order of actions costs, and
`sim.simulated_step` what happens inside of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.garbage import no_collections
from interlace.ir.actions import Action
from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.stage_messages import chain
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.sim.listed_actions import ActionTimes, ListedActions, Taken
from interlace.sim.pipeline_costs import PipelineCosts

MEASURED = "measured"
"""Label of timelines of a step that was run, and not simulated."""
ACTION = "action"
"""Kind of the spans in which a rank computes."""
END = "end"
"""Name and kind of the span of what a step does behind its last actions."""
MESSAGE = "message"
"""Kind of the spans on a link, on the lane of its sender `to N`."""


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


@no_collections()
def simulate_pipeline(
    ranks: Sequence[Sequence[Action]], costs: PipelineCosts, label: str = "predicted"
) -> PipelineStep:
    """The step that these actions make. They are sound (`schedules.verify`)."""
    edges = chain(len(costs.chunks)) if costs.edges is None else costs.edges
    return simulate_listed(ListedActions(ranks, edges), costs, label)


@no_collections()
def simulate_listed(
    listed: ListedActions,
    costs: PipelineCosts,
    label: str = "predicted",
    taken: Taken | None = None,
) -> PipelineStep:
    """The step that listed actions make; `taken` as in `ListedActions.times`."""
    peaks = listed.peaks(costs)
    return PipelineStep(
        _timelines(listed, listed.times(costs, taken), costs.behind_ns, label),
        tuple(most for most, _ in peaks),
        tuple(count for _, count in peaks),
    )


def _timelines(
    listed: ListedActions, times: ActionTimes, behind_ns: int, label: str
) -> tuple[Timeline, ...]:
    phases = [_names(action) for action in listed.phases.actions]
    hops = [(f"{hop.direction}_{hop.source}>{hop.to}", str(hop.direction)) for hop in listed.hops]
    spans: list[list[Span]] = [[] for _ in listed.ranks]
    for each, start, waited, end in zip(
        listed.order, times.starts, times.waited, times.ends, strict=True
    ):
        own, slots = spans[each.rank], listed.ranks[each.rank][each.index].slots
        texts, strand = phases[each.phase]
        name = " | ".join(
            [f"{text} {slot.micro_batch}" for text, slot in zip(texts, slots, strict=True)]
        )
        number = slots[0].micro_batch
        if waited:
            own.append(Span(name, WAIT, COMPUTE_LANE, start - waited, start, strand, number))
        own.append(Span(name, ACTION, COMPUTE_LANE, start, end, strand, number))
        for sent in each.sent:
            message, direction = hops[sent.hop]
            own.append(
                Span(
                    f"{message} {sent.micro_batch}", MESSAGE, f"to {sent.to}",
                    times.leave[sent.number], times.arrive[sent.number],
                    direction, sent.micro_batch, issue_ns=end,
                )
            )  # fmt: skip
    if behind_ns:
        last = max(span.end_ns for own in spans for span in own)
        for own in spans:
            own.append(Span(END, END, COMPUTE_LANE, last, last + behind_ns))
    return tuple(Timeline(label, rank, tuple(each)) for rank, each in enumerate(spans))


def _names(action: Action) -> tuple[list[str], str]:
    """(the text of each strand, what timelines call all of them)."""
    strands = [slot.strand for slot in action.slots]
    return [each.text for each in strands], "+".join(dict.fromkeys(each.shown for each in strands))


def _busy_ns(timeline: Timeline) -> int:
    return sum(span.duration_ns for span in timeline.spans if span.kind == ACTION)
