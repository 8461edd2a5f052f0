"""Interleaved 1F1B: several chunks on each rank, so that the pipeline fills in smaller steps
(arXiv 2104.04473).

Micro-batches go through a rank's chunks in groups of as many as there are ranks. With F, B the
times of one chunk's passes and v chunks on each of p ranks, a step of m micro-batches takes
(v m + p - 1) (F + B) if p divides m: the bubble is 1 / v of that of 1F1B. Another number of
micro-batches runs as the next multiple of p without those that are missing.
"""

from interlace.errors import InputError
from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter


@declare(settles=2, proposed=True, any_chunks=True)
def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r, r + ranks, ... Raises InputError for one chunk on a rank."""
    if chunks < 2:
        raise InputError(
            f"interleaved runs at least two chunks on each rank, not {chunks}",
            hint="one chunk on each rank is one_f_one_b",
        )
    return tuple(_rank(rank, ranks, micro_batches, chunks) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    total = ranks * chunks
    own = [ChunkPasses.of(number, total) for number in range(rank, total, ranks)]
    groups = -(-micro_batches // ranks)
    forwards = [chunk.forward for chunk in own for _ in range(ranks)] * groups
    backwards = [chunk.backward for chunk in reversed(own) for _ in range(ranks)] * groups
    # The first backward can begin when a group has passed all chunks but the last, and each rank
    # before the last one waits two hops longer, one there and one back.
    ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1
    writer = RankWriter(micro_batches)
    for forward in forwards[:ahead]:
        writer.run(forward)
    for place, backward in enumerate(backwards):
        writer.run(backward)
        for forward in forwards[ahead + place : ahead + place + 1]:
            writer.run(forward)
    return writer.actions
