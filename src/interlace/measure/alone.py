"""Measure every operator and every collective of a chunk alone, on the real machine.

The forward and the backward graph run one after the other with real data, each collective
waited for at once, so that nothing overlaps. Ranks then agree on the mean over all ranks; the time
of a collective runs from its issue to its end. A rank that is early sees its own waiting in that,
so what ranks lose by not being in step is part of a collective's time, and the sum is that of a
real step (with the fastest rank's times predictions were 3 to 5 % short).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import OpGraph
from interlace.ir.timeline import WAIT, Timeline
from interlace.measure.repeats import of_places, typical
from interlace.ranks.small_collectives import largest, mean

WARM_UP = 2
"""Runs that are not counted before the repeats that are; a choice."""


def measure(
    run_once: Callable[[], Timeline],
    graphs: Mapping[str, OpGraph],
    *,
    repeats: int,
    machine: str,
    graph_digest: str,
    group: dist.ProcessGroup | None = None,
) -> CostTable:
    """The times alone of `graphs`, by strand name. `run_once` runs both graphs, recorded.

    Collective on all ranks of `group`, by default of the job; every rank returns the same table.
    """
    found = sampled(run_once, graphs, repeats)
    operators = {op.key: op for graph in graphs.values() for op in graph.operators}
    solo, spreads = mean(found.solo, group), largest(found.spreads, group=group)
    issue = mean({"issue": found.issue}, group)["issue"]
    return CostTable(
        operators={key: cost_of(operators[key], solo[key], spreads[key]) for key in solo},
        source="profile",
        issue_ns=issue,
        graph_digest=graph_digest,
        machine=machine,
    )


@dataclass(frozen=True)
class Samples:
    """Times in ns that one rank measured, by operator key."""

    solo: dict[str, float]
    spreads: dict[str, float]
    """Interquartile ranges over repeats."""
    issue: float
    """For which starting a collective held the compute lane; 0 if none was started."""


def sampled(
    run_once: Callable[[], Timeline], graphs: Mapping[str, OpGraph], repeats: int
) -> Samples:
    """What this rank sees in so many runs. The ranks of the collectives in `graphs` run at the same
    time, and no others."""
    samples: dict[str, dict[tuple[str, str], list[int]]] = {}
    issues: list[int] = []
    for repeat in range(WARM_UP + repeats):
        timeline = run_once()
        if repeat < WARM_UP:
            continue
        for span in timeline.spans:
            if span.kind == WAIT or span.name not in graphs[span.strand].by_id:
                continue
            op = graphs[span.strand].by_id[span.name]
            if span.lane != op.lane:
                issues.append(span.duration_ns)
            else:
                places = samples.setdefault(op.key, {})
                places.setdefault((span.strand, span.name), []).append(
                    span.end_ns - (span.issue_ns if op.is_collective else span.start_ns)
                )
    found = {key: of_places(list(places.values())) for key, places in samples.items()}
    return Samples(
        {key: solo for key, (solo, _) in found.items()},
        {key: spread for key, (_, spread) in found.items()},
        typical(issues) if issues else 0,
    )
