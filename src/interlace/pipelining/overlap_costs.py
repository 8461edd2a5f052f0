"""Times of stages that differ from rank to rank."""

from collections.abc import Sequence
from statistics import fmean

import torch.distributed as dist

from interlace.ir.costs import CostTable, cost_of
from interlace.measure.alone import sampled
from interlace.measure.start_up import open_profiler
from interlace.pipelining.traced_stage import TracedStage
from interlace.ranks.small_collectives import gather_json


def stage_costs(stages: Sequence[TracedStage], device_type: str, repeats: int) -> CostTable:
    """Every operator of these stages alone, in the mean over the ranks that have it, so ranks with
    equal stages get equal tables. Gradients are left alone.

    Collective on the default group, whose ranks have equally many stages."""
    solo: dict[str, float] = {}
    spreads: dict[str, float] = {}
    issues = [0.0]
    for stage in stages:
        constants = stage.constants()
        profiler = open_profiler(stage.strands, stage.example, device_type, constants)
        found = sampled(profiler.run_once, profiler.graphs, repeats)
        solo, spreads = found.solo | solo, found.spreads | spreads
        issues.append(found.issue)
    every = gather_json([solo, spreads, max(issues)], dist.group.WORLD)
    operators = {
        op.key: op for s in stages for g in s.strands.op_graphs.values() for op in g.operators
    }
    return CostTable(
        operators={
            key: cost_of(
                operators[key],
                round(fmean(times[key] for times, _, _ in every if key in times)),
                round(max(ranges[key] for _, ranges, _ in every if key in ranges)),
            )
            for key in sorted(solo)
        },
        source="profile",
        issue_ns=round(fmean(issue for _, _, issue in every)),
    )
