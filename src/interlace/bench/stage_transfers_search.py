"""The order that is searched for a case of the bench of stages, from what chunks took in it."""

from collections.abc import Sequence

import torch.distributed as dist

from interlace.ir.actions import Direction, Share, Strand
from interlace.runtime.pipeline_record import PipelineRecord
from interlace.schedules.listed import ListedSchedule
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.search.pipelines.pipeline_search import search_pipeline


def searched_schedule(
    record: PipelineRecord, names: Sequence[str], micro_batches: int, memory_bytes: int
) -> ListedSchedule:
    """A pipeline of the chunks of a recorded step, by their names, whose ranks keep at most so
    much, from times of passes, of what ranks do behind them, and of messages. Rank 0 searches.
    Collective on the default group."""
    found: list[ListedSchedule | None] = [None]
    if dist.get_rank() == 0:
        problem = PipelineProblem(
            units=_units(record, names),
            ranks=len(record.actions),
            micro_batches=micro_batches,
            memory_bytes=memory_bytes,
        )
        found = [search_pipeline(problem).schedule]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def _units(record: PipelineRecord, names: Sequence[str]) -> tuple[ModelUnit, ...]:
    costs = record.costs
    longest = max(costs.messages_ns.values())  # of an edge inside of a rank nothing is known

    def behind(chunk: int, direction: Direction, share: Share = Share.WHOLE) -> int:
        return costs.between_ns.get(Strand(direction, chunk, share).text, 0)

    return tuple(
        ModelUnit(
            name=name,
            forward_ns=cost.forward_ns + behind(chunk, Direction.FORWARD),
            input_ns=cost.input_ns + behind(chunk, Direction.BACKWARD, Share.INPUT),
            weight_ns=cost.weight_ns + behind(chunk, Direction.BACKWARD, Share.WEIGHT),
            boundary_ns=costs.messages_ns.get((chunk, chunk + 1), longest),
            saved_bytes=cost.saved_bytes,
            kept_bytes=cost.kept_bytes,
        )
        for chunk, (name, cost) in enumerate(zip(names, costs.chunks, strict=True))
    )
