"""`interlace plan` of a pipeline: its schedule and all others, simulated on one traced model."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path

from interlace.compiled import StepSettings
from interlace.config import RunConfig
from interlace.hardware.cluster import Cluster
from interlace.report.stage_tables import stages_json, stages_summary
from interlace.runtime.memory_limit import constant_bytes, memory_limits
from interlace.schedules.finder import find, names
from interlace.schedules.schedule_text import write_schedule
from interlace.search.pipelines.pipeline_search import WITHOUT_NUMBA, can_anneal
from interlace.train.fake_trace import describe_model, shape_of, trace_fake
from interlace.train.plan_costs import OperatorTimes
from interlace.train.plan_output import give, say, timed, write
from interlace.train.searched_stages import search_stages
from interlace.train.stage_plans import StagePlanner, eager_enough, machine_for, steps_of_all


@dataclass(frozen=True, slots=True)
class PipelineWish:
    """Asks for a pipeline that is made for the model."""

    memory_gib: float = 0.0
    """Most that a rank may hold and keep; 0 is the memory of the cluster, or else no limit."""

    def memory_bytes(self, cluster: Cluster | None) -> int:
        """The limit in bytes; 0 for none."""
        return round((self.memory_gib or (cluster.memory_gib if cluster else 0)) * 2**30)


def plan_stages(
    config: RunConfig,
    times: OperatorTimes,
    output: Path | None,
    *,
    json: Path | None,
    picture: Path | None,
    wish: PipelineWish | None,
) -> int:
    """Simulate a pipeline by its schedule and by all others; the plan is a list of actions, of the
    schedule of the run file or of the one that is wished for."""
    own, cluster = find(config.pipeline.schedule), times.cluster
    (_, layers, _), ranks = shape_of(config), config.parallel.ranks
    with timed(f"tracing {layers} layers, one of {ranks} ranks"):
        strands = trace_fake(config, cluster).all
    costs, origin = times.of(config, strands)
    say(f"costs: {origin}")
    held = constant_bytes(config.parallel, config.train.dtype, strands.module, None)
    limits = memory_limits(config.plan, held)
    settings = StepSettings(plan=config.plan, overlap=config.overlap, limits=limits)
    machine = machine_for(config, cluster)
    planner = StagePlanner(config, strands, costs, settings, machine, strands.data)
    with timed("simulating schedules"):
        chosen = planner.step(own, config.pipeline.split_at)
        steps, left_out = steps_of_all(planner, map(find, names()), chosen)
        steps += eager_enough(planner, steps)
    limit = 0 if wish is None else wish.memory_bytes(cluster)
    if wish is not None:
        with timed("searching for a pipeline of this model"):
            chosen = search_stages(planner, limit)
        steps.append(chosen)
    steps.sort(key=lambda each: each.step.step_ns)
    count = config.train.micro_batches
    say(f"\n{stages_summary(chosen, steps, count, limit_bytes=limit)}\n")
    if wish is not None:
        say(f'[pipeline]\nschedule = "{output or "FILE.txt"}"  # it says where chunks begin\n')
        if not can_anneal():
            say(f"{WITHOUT_NUMBA}\n")
    for reason in left_out.values():
        say(f"left out: {reason}")
    if json is not None:
        data = stages_json(chosen, steps, left_out, costs=origin, run=config.as_dict())
        write(json, (json_format.dumps(data, indent=1) + "\n").encode())
    if picture is not None:
        from interlace.report.pipeline_picture import pipeline_png  # noqa: PLC0415  matplotlib

        title = f"{chosen.schedule}: {describe_model(config)}"
        write(picture, pipeline_png(chosen.actions, chosen.step, title=title))
    text = write_schedule(chosen.actions, chosen.split_at)
    give(text, output)
    return 0
