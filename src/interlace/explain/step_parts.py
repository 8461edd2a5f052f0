"""Where in a step each kernel and collective was launched: step, forward or backward, micro-batch.

Backward is what the host launched while autograd ran a node of the backward (operators called
`autograd::engine::evaluate_function`), recomputation included. What is launched after the last of
them is the end of the step; everything else is forward. Each change from backward to forward
begins a micro-batch, so several forwards of a pipeline's warm-up count as one.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from interlace.explain.rank_trace import Communicated, Computed, Pass, StepPlace
from interlace.explain.step_choice import ChosenSteps
from interlace.ir import interval_sets as sets
from interlace.ir.interval_sets import Interval


@dataclass(frozen=True, slots=True)
class HostTimes:
    """When the host was inside the backward, by thread, and inside an optimizer's step."""

    backwards: Mapping[str, Sequence[Interval]]
    optimizers: Sequence[Interval]


def placed(
    computed: Sequence[Computed],
    communicated: Sequence[Communicated],
    chosen: ChosenSteps,
    times: HostTimes,
    *,
    by_start: bool,
) -> tuple[tuple[Computed, ...], tuple[Communicated, ...]]:
    """What belongs to the chosen steps, each with its place, in order of starts. `by_start`: what
    starts within the only step, rather than what was launched in it."""
    backward = sets.union(each for ranges in times.backwards.values() for each in ranges)
    picked = _Steps(chosen, by_start=by_start)
    by_step: dict[int, tuple[list[Computed], list[Communicated]]] = {}
    for each in computed:
        step = picked.of(each)
        if step >= 0:
            by_step.setdefault(step, ([], []))[0].append(each)
    for each in communicated:
        step = picked.of(each)
        if step >= 0:
            by_step.setdefault(step, ([], []))[1].append(each)
    own: list[Computed] = []
    sent: list[Communicated] = []
    for step, (work, talk) in by_step.items():
        parts = _Parts(step, work, backward)
        own += parts.computed
        sent += [replace(each, place=parts.place(each, backward)) for each in talk]
    return (
        tuple(sorted(own, key=lambda each: (each.start_ns, each.end_ns))),
        tuple(sorted(sent, key=lambda each: (each.start_ns, each.end_ns))),
    )


class _Steps:
    """Finds the chosen step of something."""

    def __init__(self, chosen: ChosenSteps, *, by_start: bool) -> None:
        self.starts = [step.start_ns for step in chosen.marked]
        self.index = {step: i for i, step in enumerate(chosen.steps)}
        self.marked = chosen.marked
        self.by_start = by_start
        self.whole = chosen.whole

    def of(self, each: Computed | Communicated) -> int:
        """Its index among the chosen steps, -1 if it belongs to none of them."""
        if self.by_start:
            step = self.marked[0]
            return 0 if step.start_ns <= each.start_ns < step.end_ns else -1
        found = max(0, bisect_right(self.starts, each.launched_ns) - 1)
        step = self.marked[found]
        inside = step.start_ns <= each.launched_ns < step.end_ns
        return self.index.get(step, -1) if inside or self.whole else -1


class _Parts:
    """The compute of one step in order of launch, with its places."""

    def __init__(self, step: int, work: Sequence[Computed], backward: Sequence[Interval]) -> None:
        ordered = sorted(work, key=lambda each: (each.launched_ns, each.start_ns))
        inside = [_holds(backward, each.launched_ns) for each in ordered]
        last = max((i for i, is_inside in enumerate(inside) if is_inside), default=-1)
        self.launched = [each.launched_ns for each in ordered]
        self.places: list[StepPlace] = []
        micro_batch, before = 1, False
        for i, is_inside in enumerate(inside):
            if last < 0:
                self.places.append(StepPlace(step))
            elif i > last:
                self.places.append(StepPlace(step, Pass.END))
            else:
                micro_batch += before and not is_inside
                before = is_inside
                part = Pass.BACKWARD if is_inside else Pass.FORWARD
                self.places.append(StepPlace(step, part, micro_batch))
        self.computed = [replace(e, place=p) for e, p in zip(ordered, self.places, strict=True)]
        self.step = step

    def place(self, each: Communicated, backward: Sequence[Interval]) -> StepPlace:
        """Of a collective: backward if launched inside of it. Else that of the compute launched
        before it, and between a backward and a forward that of the forward."""
        at = bisect_right(self.launched, each.launched_ns)
        before = self.places[at - 1] if at else None
        after = self.places[at] if at < len(self.places) else None
        nearest = before or after
        if nearest is None or nearest.part == Pass.UNKNOWN:
            return StepPlace(self.step)
        if _holds(backward, each.launched_ns):
            backwards = [p for p in (before, after) if p is not None and p.part == Pass.BACKWARD]
            micro_batch = backwards[0].micro_batch if backwards else nearest.micro_batch
            return StepPlace(self.step, Pass.BACKWARD, micro_batch)
        if before is not None and before.part == Pass.BACKWARD:
            if after is not None and after.part == Pass.FORWARD:
                return after
            return StepPlace(self.step, Pass.END)
        return nearest


def _holds(ranges: Sequence[Interval], at_ns: int) -> bool:
    """Whether a moment lies in a set."""
    i = bisect_right(ranges, (at_ns, 1 << 62)) - 1
    return i >= 0 and ranges[i][0] <= at_ns < ranges[i][1]
