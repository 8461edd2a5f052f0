"""Which stages a schedule puts on which rank."""

from collections.abc import Sequence
from typing import Any

from interlace.errors import InputError
from interlace.ir.stage_messages import chunks_of
from interlace.schedules.finder import MOST, Schedule, ScheduleFunction, find


def found_for(schedule: str | ScheduleFunction, ranks: int, stages: int) -> Schedule:
    """The schedule with as many chunks on a rank as there are stages for it.

    Raises InputError if they do not divide, or the schedule does not run so many."""
    if stages % ranks:
        raise InputError(
            f"{stages} stages cannot be divided by {ranks} ranks",
            hint="give every rank as many stages",
        )
    found, chunks = find(schedule), stages // ranks
    if chunks == found.chunks:
        return found
    function: Any = found.function

    def with_chunks(ranks: int, micro_batches: int, chunks: int = chunks) -> Any:
        return function(ranks=ranks, micro_batches=micro_batches, chunks=chunks)

    with_chunks.__module__, with_chunks.__qualname__ = function.__module__, function.__qualname__
    return Schedule(found.name, with_chunks)


def stages_of(schedule: Schedule, ranks: int, rank: int) -> list[int]:
    """The numbers of a rank's stages, from the first."""
    rank_of = chunks_of(schedule.of_ranks(ranks, MOST))
    return sorted(stage for stage, at in rank_of.items() if at == rank)


def refuse_other_stages(schedule: Schedule, given: Sequence[int], ranks: int, rank: int) -> None:
    """Raise InputError unless these are the stages that the schedule puts on this rank."""
    wanted = stages_of(schedule, ranks, rank)
    if sorted(given) != wanted:
        raise InputError(
            f"rank {rank} has the stages {sorted(given)}, and schedule {schedule.name!r} puts "
            f"{wanted} there",
            hint=f"build PipelineStage(module, index, ...) for each index of {wanted}",
        )
