"""What a run showed, in words and rows of text: the content of the report's sections."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from interlace.ir.actions import is_phase, steady_phase
from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.report.load import RunRecord
from interlace.report.tables import MODE_NAMES
from interlace.sim.pipeline_step import ComparedStep
from interlace.text import bits_per_token, milliseconds, number, percent

_LONGEST_WAITS = 10
"""Rows of `longest_waits`; a choice."""
_PLAN_LINES = 80
"""Lines of a plan that the report shows; a choice that keeps the page short."""
_PER_BYTE, _PER_TOKEN = "bits per byte", "bits per token"
"""Units of a loss, where the bytes of the text are known and where they are not."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A number at the top of the report."""

    label: str
    value: str
    note: str = ""


def headline(record: RunRecord) -> str:
    """The one sentence: what was gained, and whether the losses are the same."""
    if record.comparison is None and record.pipeline is not None:
        bubble = percent(record.pipeline.measured.bubble_fraction)
        ranks = len(record.pipeline.actions)
        return f"The {ranks} ranks of a pipeline compute nothing in {bubble} of a step"
    if record.comparison is None:
        return "Two ways of running were not compared in this run"
    return f"{gain_sentence(record)}; {_identity(record.comparison)}"


def gain_sentence(record: RunRecord) -> str:
    """How two strands compare with the first other way that was measured."""
    comparison = record.comparison or {}
    for key, base in (("speedup_vs_eager", "eager"), ("speedup_vs_one_strand", "1")):
        gain = comparison.get(key)
        if gain is None:
            continue
        name, ratio = MODE_NAMES[base], gain["median"]
        if gain["min"] < 1 < gain["max"]:
            return f"Two strands and {name} take equally long, within the spread of the steps"
        if ratio >= 1:
            return f"A step is {ratio:.2f} times faster with two strands than with {name}"
        return f"A step is {1 / ratio:.2f} times slower with two strands than with {name}"
    return "Two strands were not compared with another way of running"


def _identity(comparison: dict[str, Any]) -> str:
    identical = comparison.get("losses_identical")
    if identical is None:
        return "whether losses are identical was not checked"
    if identical:
        return "losses are identical to one strand, bit for bit"
    return "losses DIFFER from one strand"


def facts(record: RunRecord) -> list[Fact]:
    """Step times, hidden fraction, held-out result; only what was measured."""
    found: list[Fact] = []
    comparison = record.comparison
    if comparison:
        modes = comparison["modes"]
        for mode in ("eager", "1", "2"):
            if mode in modes:
                times = modes[mode]["step_ms"]
                spread = f"{number(min(times))} to {number(max(times))}"
                value = f"{number(median(times))} ms"
                found.append(Fact(f"step: {MODE_NAMES[mode]}", value, spread))
        hidden = modes.get("2", {}).get("hidden_fraction")
        if hidden is not None:
            exposed = modes["2"].get("exposed_ms")
            note = "" if exposed is None else f"{number(exposed)} ms per step stay exposed"
            found.append(Fact("hidden by two strands", percent(hidden), note))
        if comparison.get("losses_identical") is not None:
            value = "yes" if comparison["losses_identical"] else "NO"
            note = f"{comparison['steps']} steps, two strands against one"
            found.append(Fact("losses identical", value, note))
    held_out = points(record, "evaluate")
    if held_out:
        step, bits = held_out[-1]
        found.append(Fact(f"held-out {loss_unit(record)}", f"{bits:.3f}", f"after step {step:,}"))
    return found


def loss_unit(record: RunRecord) -> str:
    """`bits per byte`; `bits per token` of a run on token ids, whose text is not known."""
    entries = [*record.of("step"), *record.of("evaluate")]
    known = not entries or any(entry.get("bits_per_byte") is not None for entry in entries)
    return _PER_BYTE if known else _PER_TOKEN


def points(record: RunRecord, event: str) -> list[tuple[int, float]]:
    """(step, loss in `loss_unit`) of `step` or `evaluate` events that have both."""
    entries = record.of(event)
    if loss_unit(record) == _PER_BYTE:
        pairs = [(entry["step"], entry.get("bits_per_byte")) for entry in entries]
        return [(step, bits) for step, bits in pairs if bits is not None]
    pairs = [(entry["step"], entry.get("loss")) for entry in entries]
    return [(step, bits_per_token(loss)) for step, loss in pairs if loss is not None]


WAIT_HEADER = ("operator", "strand", "micro-batches", "waits", "exposed ms", "longest ms")
"""Columns of `longest_waits`."""


def longest_waits(timeline: Timeline) -> list[tuple[str, ...]]:
    """The operators whose waits add up to most, as rows under WAIT_HEADER, longest first."""
    by_operator: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.spans:
        if span.kind == WAIT and span.duration_ns:
            by_operator.setdefault((span.name, span.strand), []).append(span)

    def total(spans: Iterable[Span]) -> int:
        return sum(span.duration_ns for span in spans)

    ranked = sorted(by_operator.items(), key=lambda item: total(item[1]), reverse=True)
    return [
        (
            name,
            strand or "-",
            _ranges({span.micro_batch for span in spans if span.micro_batch}) or "-",
            f"{len(spans):,}",
            milliseconds(total(spans)),
            milliseconds(max(span.duration_ns for span in spans)),
        )
        for (name, strand), spans in ranked[:_LONGEST_WAITS]
    ]


def _ranges(numbers: set[int]) -> str:
    """`1-3, 5` for {1, 2, 3, 5}."""
    ordered = sorted(numbers)
    if not ordered:
        return ""
    runs = [[ordered[0], ordered[0]]]
    for before, after in pairwise(ordered):
        if after == before + 1:
            runs[-1][1] = after
        else:
            runs.append([after, after])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def without_partner(timeline: Timeline) -> str:
    """How much of two strands' exposed time lies where a strand had no partner, as a sentence."""
    last = max((span.micro_batch for span in timeline.spans), default=0)
    waits = [span for span in timeline.spans if span.kind == WAIT]
    total = sum(span.duration_ns for span in waits)
    if not last or not total:
        return ""
    alone = sum(
        span.duration_ns
        for span in waits
        if (span.strand, span.micro_batch) in {("forward", 1), ("backward", last)}
    )
    return (
        f"Of {milliseconds(total)} ms exposed, {milliseconds(alone)} ms "
        f"({percent(alone / total)}) lie in the first forward and the last backward, which have "
        "no partner to hide under; more micro-batches per step make that share smaller."
    )


RANK_HEADER = (
    "way of running",
    "rank",
    "step ms",
    "communication ms",
    "issuing ms",
    "exposed ms",
    "hidden",
)
"""Columns of `rank_rows`."""


def issuing_ns(timeline: Timeline) -> int:
    """Time that the compute lane spends to start collectives, which counts as no wait."""
    spans = (span for span in timeline.spans if span.lane == COMPUTE_LANE)
    return sum(span.duration_ns for span in spans if span.kind in COLLECTIVES)


def rank_rows(record: RunRecord) -> list[tuple[str, ...]]:
    """One row per recorded mode and rank under RANK_HEADER."""
    return [
        (
            MODE_NAMES.get(mode, mode),
            str(rank),
            milliseconds(timeline.length_ns),
            milliseconds(timeline.communication_ns()),
            milliseconds(issuing_ns(timeline)),
            milliseconds(timeline.exposed_ns()),
            percent(timeline.hidden_fraction()),
        )
        for mode, by_rank in record.timelines.items()
        for rank, timeline in by_rank.items()
    ]


def plan_excerpt(text: str) -> tuple[str, int]:
    """The head of a plan and the start of its interleaved phase, and how many lines are left."""
    lines = text.splitlines()
    titles = {line.split()[1]: i for i, line in enumerate(lines) if line.startswith("phase ")}
    starts = {name: i for name, i in titles.items() if is_phase(name)}  # else of another version
    start = starts[steady_phase(starts)] if starts else 3
    chosen: Sequence[str] = [*lines[:2], "", *lines[start : start + _PLAN_LINES]]
    return "\n".join(chosen), max(0, len(lines) - len(chosen))


def flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested tables as (dotted name, value as TOML writes it or nearly so)."""
    rows: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        else:
            shown = value if isinstance(value, str) else repr(value)
            rows.append((prefix + key, shown))
    return rows


def pipeline_sentence(compared: ComparedStep) -> str:
    """What the picture of a pipeline's step comes to."""
    measured, predicted = compared.measured, compared.predicted
    waited = [percent(ns / measured.step_ns) for ns in measured.bubble_ns]
    return (
        f"The last step took {milliseconds(measured.step_ns)} ms. "
        f"Ranks computed nothing in {', '.join(waited)} of it. Simulated from the times of its own "
        f"passes and messages it takes {milliseconds(predicted.step_ns)} ms, "
        f"{compared.predicted_over_measured:.2f} times that."
    )


def expert_sentence(steps: list[dict[str, Any]]) -> str:
    """How evenly tokens were dealt to experts, from the first step to the last that say it."""
    first, last = (f"{step['expert_imbalance']:.2f}" for step in (steps[0], steps[-1]))
    dropped = max(step.get("expert_dropped", 0.0) for step in steps)
    lost = (
        f"at most {100 * dropped:.1f} % of the choices of a step were dropped"
        if dropped
        else "no choice was dropped"
    )
    return (
        f"The busiest expert of a layer got {first} times the mean in step {steps[0]['step']}, and "
        f"{last} times in step {steps[-1]['step']}; {lost}. The picture has all layers together."
        f"{_skew_sentence(steps)}"
    )


def _skew_sentence(steps: list[dict[str, Any]]) -> str:
    """What uneven load costs, of the last recorded step that says it."""
    told = [step for step in steps if "expert_skew_ms" in step]
    if not told:
        return ""
    step = told[-1]
    compute, lost, whole = (step[key] for key in ("expert_compute_ms", "expert_skew_ms", "step_ms"))
    return (
        f" In step {step['step']} the rank with the most rows got "
        f"{step['expert_rank_imbalance']:.2f} times the mean of all ranks. The matmuls of experts "
        f"took {number(compute)} ms in the mean of ranks, so the others waited at least "
        f"{number(lost)} ms of {number(whole)} for it ({percent(lost / whole)})."
    )
