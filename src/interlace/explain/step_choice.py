"""Which steps of a trace are looked at."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.explain.kineto_events import Range
from interlace.explain.rank_trace import MarkedStep

MARK = "ProfilerStep"
"""Name of the annotations that torch.profiler writes for each `prof.step()`, before a number."""
_MS = 1_000_000
"""Nanoseconds of a millisecond."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """What the user asked for; as it is, all steps marked by `prof.step()` but the last."""

    mark: str = MARK
    """Name of the annotations that are steps, without a number behind `#`."""
    numbers: tuple[int, int] | None = None
    """First and last number of the steps to look at."""
    between_ms: tuple[float, float] | None = None
    """A range in milliseconds from the first event, which counts as one step."""

    @staticmethod
    def of(mark: str = "", steps: str = "", between: str = "") -> "StepChoice":
        """From the words of the command line: `steps` is `5` or `5-8`, `between` `120:480` in
        milliseconds. Raises InputError for anything else."""
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", steps.strip())
        if steps and numbers is None:
            raise InputError(f"--steps {steps} is no range of steps", hint="--steps 5, --steps 5-8")
        span = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", between.strip())
        if between and (span is None or float(span[1]) >= float(span[2])):
            raise InputError(
                f"--between {between} is no range of time",
                hint="--between 120:480, in milliseconds from the first event of the trace",
            )
        if between and (steps or mark):
            raise InputError("--between leaves no step to choose", hint="leave --steps, --mark out")
        chosen = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else None
        if chosen and chosen[0] > chosen[1]:
            raise InputError(f"--steps {steps} ends before it begins", hint="--steps 5-8")
        window = (float(span[1]), float(span[2])) if span else None
        return StepChoice(mark or MARK, chosen, window)


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """All marked steps of one file, and which of them count."""

    steps: tuple[MarkedStep, ...]
    left_out: str
    """What was left out and why; empty if nothing was."""
    marked: tuple[MarkedStep, ...]
    """All marked steps in order, so that what was launched in each can be told."""


def choose_steps(
    marks: Mapping[str, Sequence[Range]], first_ns: int, choice: StepChoice, source: str
) -> ChosenSteps:
    """The steps of a file. Raises InputError if it has none that fit.

    Without a choice the last marked step is left out if there are others, as
    HolisticTraceAnalysis does: its kernels may still have run when the profiler stopped.
    """
    if choice.between_ms:
        start, end = (first_ns + round(each * _MS) for each in choice.between_ms)
        step = MarkedStep(f"{choice.between_ms[0]:g} to {choice.between_ms[1]:g} ms", start, end)
        return ChosenSteps((step,), "", (step,))
    marked = _marked(marks, choice.mark)
    if not marked:
        raise _no_marks(marks, choice, source)
    if choice.numbers is not None:
        low, high = choice.numbers
        chosen = tuple(step for step in marked if low <= _number(step.name) <= high)
        if not chosen:
            known = f"{_number(marked[0].name)} to {_number(marked[-1].name)}"
            raise InputError(
                f"{source} has no step {low} to {high}", hint=f"it has the steps {known}"
            )
        return ChosenSteps(chosen, "", marked)
    if len(marked) == 1:
        return ChosenSteps(marked, "", marked)
    reason = f"{marked[-1].name}, the last one of the trace, is left out: it may not be whole"
    return ChosenSteps(marked[:-1], reason, marked)


def _marked(marks: Mapping[str, Sequence[Range]], mark: str) -> tuple[MarkedStep, ...]:
    found: list[tuple[int, str, int]] = []
    for name, ranges in marks.items():
        if name == mark or re.fullmatch(re.escape(mark) + r"\s*#\s*\d+", name):
            found += [(start, name, end) for start, end in ranges]
    found.sort()
    numbered = len({name for _, name, _ in found}) == len(found)
    steps = [
        MarkedStep(name if numbered else f"{name}#{index}", start, end)
        for index, (start, name, end) in enumerate(found)
    ]
    return tuple(steps)


def _number(name: str) -> int:
    found = re.search(r"#\s*(\d+)$", name)
    return int(found[1]) if found else 0


def _no_marks(names: Iterable[str], choice: StepChoice, source: str) -> InputError:
    others = sorted(name for name in names if name)[:5]
    marks = f"; its annotations are {', '.join(others)}" if others else ""
    return InputError(
        f"{source} has no step marks: no annotation {choice.mark!r}{marks}",
        hint="call prof.step() after each step while profiling, or name the annotation around your "
        "step with --mark NAME, or choose a time with --between 120:480 (ms)",
    )
