"""What `interlace plan` prints: searches side by side, the phases of a plan, memory of a rank. And
the same as one JSON document, for programs (docs/guides/plan.md)."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from interlace.ir.actions import steady_phase
from interlace.ir.timeline import WAIT, Timeline
from interlace.report.plan_figures import Comparison, Figures, PlanFigures
from interlace.text import aligned, milliseconds, number, percent, size

_HEADER = ("ms", "exposed ms", "hidden", "over bound", "memory")
"""Columns of predictions, as `_cells` fills them. Short: all tables are to fit 80 columns."""


def plan_summary(comparison: Comparison) -> str:
    """Tables of the whole step, of the phase of two micro-batches and of all phases of the chosen
    plan; then memory."""
    lines = [
        f"step of {comparison.best.micro_batches} micro-batches (* is the chosen plan)",
        step_table(comparison),
        "",
        "the phase of two micro-batches, one forward beside another backward",
        steady_table(comparison),
        "",
        f"phases of the chosen plan, each by itself (search {comparison.chosen})",
        phase_table(comparison),
        "",
        *memory_lines(comparison),
    ]
    lines += [f"search {name} gives no plan: {why}" for name, why in comparison.refused.items()]
    return "\n".join(lines)


def step_table(comparison: Comparison) -> str:
    """A row per search, below that of one strand, to which extra memory and speed-up compare."""
    rows = [("one strand", *_cells(comparison.one_strand.step), "", "")]
    for name, figures in comparison.searches.items():
        extra = _signed_percent(comparison.extra_memory(name))
        gain = f"{number(comparison.speed_up(name))}x"
        rows.append((_marked(name, comparison), *_cells(figures.step), extra, gain))
    return aligned(("search", *_HEADER, "extra", "gain"), rows, text_columns=1)


def steady_table(comparison: Comparison) -> str:
    """A row per search."""
    rows = [
        (_marked(name, comparison), *_cells(figures.phases[steady_phase(figures.phases)]))
        for name, figures in comparison.searches.items()
    ]
    return aligned(("search", *_HEADER), rows, text_columns=1)


def phase_table(comparison: Comparison) -> str:
    """A row per phase of the chosen plan."""
    best = comparison.best
    rows = [
        (name, f"{len(best.plan.phases[name].order):,}", *_cells(best.phases[name]))
        for name in best.phases
    ]
    return aligned(("phase", "operators", *_HEADER), rows, text_columns=1)


def memory_lines(comparison: Comparison) -> tuple[str, str]:
    """What a rank holds all the time, and what the second strand adds to the rest."""
    held = comparison.constant_bytes
    parts = ", ".join(f"{name} {size(count)}" for name, count in held.items() if count)
    one, two = (f.step.peak_bytes for f in (comparison.one_strand, comparison.best))
    of_values = _signed_percent(comparison.extra_memory(comparison.chosen))
    of_all = _signed_percent(comparison.extra_of_all_memory(comparison.chosen))
    return (
        f"memory of a rank, always: {size(sum(held.values()))} ({parts})",
        f"values of the graphs at the peak: {size(one)} with one strand, {size(two)} with two, "
        f"{of_values}; {of_all} of all memory",
    )


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        milliseconds(figures.predicted_ns),
        milliseconds(figures.exposed_ns),
        percent(figures.hidden_fraction) if figures.communication_ns else "-",
        percent(figures.over_bound),
        size(figures.peak_bytes),
    )


def _signed_percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def _marked(name: str, comparison: Comparison) -> str:
    return f"{name} *" if name == comparison.chosen else name


VERSION = 2
"""Version of the document; it goes up when keys change their meaning."""
_LONGEST = 10
"""Waits that are listed for each phase, the longest first; a choice."""


def plan_json(comparison: Comparison, *, costs: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Times are integer nanoseconds, sizes bytes, fractions plain numbers. `costs` says where the
    times come from, `run` is the run file."""
    best = comparison.best
    document = {
        "version": VERSION,
        "run": run,
        "costs": costs,
        "micro_batches": best.micro_batches,
        "chosen": comparison.chosen,
        "one_strand": _predictions(comparison.one_strand),
        "searches": {
            name: {
                **_predictions(figures),
                "speed_up": comparison.speed_up(name),
                "extra_memory_fraction": comparison.extra_memory(name),
                "extra_fraction_of_all_memory": comparison.extra_of_all_memory(name),
            }
            for name, figures in comparison.searches.items()
        },
        "refused": dict(comparison.refused),
        "constant_bytes": dict(comparison.constant_bytes),
        "plan": {**asdict(best.plan), "digest": best.plan.digest},
        "timelines": {name: _timeline(timeline) for name, timeline in best.timelines.items()},
    }
    return json.dumps(document, indent=1) + "\n"


def _predictions(figures: PlanFigures) -> dict[str, Any]:
    return {
        "step": _figures(figures.step),
        "phases": {name: _figures(phase) for name, phase in figures.phases.items()},
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        **asdict(figures),
        "hidden_fraction": figures.hidden_fraction,
        "gap_to_bound": figures.over_bound,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Length, collectives by kind and lane, and the longest waits for one."""
    waits = [span for span in timeline.spans if span.kind == WAIT]
    waits.sort(key=lambda span: (-span.duration_ns, span.start_ns))
    return {
        "length_ns": timeline.length_ns,
        "collectives": [
            {**asdict(row), "hidden_ns": row.hidden_ns} for row in timeline.collective_rows()
        ],
        "longest_waits": [
            {"for": span.name, "start_ns": span.start_ns, "wait_ns": span.duration_ns}
            for span in waits[:_LONGEST]
        ],
    }
