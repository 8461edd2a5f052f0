"""GPipe: all forwards, then all backwards (arXiv 1811.06965); with several chunks on a rank chunk
by chunk, breadth first.

    F1 F2 F3 F4 B1 B2 B3 B4

With F, B the times of a stage's passes, a step of m micro-batches on p ranks takes
(m + p - 1) (F + B), and each rank keeps m micro-batches' values.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter


@declare(any_chunks=True)
def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r, r + ranks, r + 2 ranks, ..."""
    return tuple(_rank(rank, ranks, micro_batches, chunks) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    total = ranks * chunks
    own = [ChunkPasses.of(number, total) for number in range(rank, total, ranks)]
    writer = RankWriter(micro_batches)
    for chunk in own:
        writer.run(chunk.forward, times=micro_batches)
    for chunk in reversed(own):
        writer.run(chunk.backward, times=micro_batches)
    return writer.actions
