"""What a run file comes to on one rank: checked and settled before anything is built."""

from dataclasses import dataclass

import torch.distributed as dist

from interlace.config import ParallelConfig, RunConfig
from interlace.degrees import of_rank, resolve_layout, stages_of
from interlace.errors import InputError
from interlace.models.hugging_face_config import overridden_shape, published_shape
from interlace.rules import check
from interlace.schedules.finder import Schedule, find


@dataclass(frozen=True, slots=True)
class RankJob:
    """What one rank is to do. What is built afterwards takes its values from here."""

    config: RunConfig
    """As this rank sees it: where stages of a pipeline are laid out each in its own way, with the
    layout and the micro-batches of its stage."""
    asked: RunConfig
    """As the run file has it, with the shape of a published model, alike on all ranks."""
    layouts: tuple[ParallelConfig, ...]
    """Those of stages that are laid out each in its own way."""
    schedule: Schedule
    """In which order stages of a pipeline run micro-batches."""
    note: str
    """Which values of the run file a published model has replaced; empty for none."""
    rank: int
    world_size: int


def job_of_rank(given: RunConfig) -> RankJob:
    """The only place where a rank checks its run file. The process group exists.

    Raises InputError for values that can never work, or not on these ranks.
    """
    check(given)
    schedule = find(given.pipeline.schedule)
    found = published_shape(given)
    _check_renewal(found)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    asked = resolve_layout(found, world_size)
    return RankJob(
        config=of_rank(asked, rank),
        asked=asked,
        layouts=stages_of(asked),
        schedule=schedule,
        note=overridden_shape(given, found),
        rank=rank,
        world_size=world_size,
    )


def _check_renewal(config: RunConfig) -> None:
    """Refuse `train.renew_plan_at` where it has nothing to look at, or nothing to do."""
    plan, experts, share = config.plan, config.model.experts, config.train.renew_plan_at
    for name, value, wrong in (
        ("model.experts.count", experts.count, not experts.count),
        ("strands", config.strands, config.strands != "2"),
        ("parallel.pipeline", config.parallel.pipeline, config.parallel.pipeline > 1),
        ("plan.file", plan.file, plan.file),
        ("plan.cluster", plan.cluster, plan.cluster),
    ):
        if share and wrong:
            raise InputError(
                f"train.renew_plan_at = {share} measures two strands again when the load of "
                f"experts drifts, and {name} = {value!r}",
                hint=f"leave train.renew_plan_at out, or change {name}",
            )
