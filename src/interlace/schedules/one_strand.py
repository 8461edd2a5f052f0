"""One micro-batch after the other: F1, B1, F2, B2, ... What plain gradient accumulation does."""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter


@declare(settles=2)
def one_strand(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Every micro-batch forward, then backward, chunk by chunk. On several ranks, of which rank r
    has the chunks r, r + ranks, ..., only one of them computes at a time: what others are compared
    with."""
    total = ranks * chunks
    return tuple(
        _rank(
            [ChunkPasses.of(number, total) for number in range(rank, total, ranks)], micro_batches
        )
        for rank in range(ranks)
    )


def _rank(own: list[ChunkPasses], micro_batches: int) -> tuple[Action, ...]:
    writer = RankWriter(micro_batches)
    forwards = [chunk.forward for chunk in own]
    backwards = [chunk.backward for chunk in reversed(own)]
    writer.run_in_turn(*forwards, *backwards, times=micro_batches)
    return writer.actions
