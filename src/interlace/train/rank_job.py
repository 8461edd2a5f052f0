"""What a run file comes to on one rank: checked and settled before anything is built."""

from dataclasses import dataclass

import torch.distributed as dist

from interlace.config import ParallelConfig, RunConfig
from interlace.degrees import of_rank, resolve_layout, stages_of, vocabulary_divisor
from interlace.models.hugging_face_config import overridden_shape, published_shape
from interlace.rules import check, check_renewal
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
    vocabulary_divisor: int
    """Of what the rows of an embedding are a multiple, alike on all ranks."""
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
    found = published_shape(given)
    note = overridden_shape(given, found)
    check_renewal(found)
    schedule = find(found.pipeline.schedule)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    asked = resolve_layout(found, world_size)
    return RankJob(
        config=of_rank(asked, rank),
        asked=asked,
        layouts=stages_of(asked),
        vocabulary_divisor=vocabulary_divisor(asked),
        schedule=schedule,
        note=note,
        rank=rank,
        world_size=world_size,
    )
