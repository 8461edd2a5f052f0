"""A plan and what is predicted for it as one JSON document, for programs (docs/guides/plan.md)."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from interlace.ir.timeline import WAIT, Timeline
from interlace.report.plan_figures import Comparison, Figures, PlanFigures

VERSION = 2
"""Version of the document; it goes up when keys change their meaning."""
_LONGEST = 10
"""Waits that are listed for each phase, the longest first."""


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
