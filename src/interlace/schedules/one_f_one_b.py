"""1F1B: as soon as a rank has the gradient of a micro-batch it runs its backward, then the next
forward, so that few micro-batches are under way (PipeDream-Flush, arXiv 2006.09503).

    rank p-2:  F1 F2 B1 F3 B2 F4 B3 B4
    rank p-1:  F1 B1 F2 B2 F3 B3 F4 B4

With F, B the times of a stage's passes, a step of m micro-batches on p ranks takes
(m + p - 1) (F + B), as with GPipe; rank r keeps the values of at most p - r micro-batches. A
transfer that takes c makes the period F + B + 2c (p - 1) / p (papers 2.5).
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter, need_chunks


@declare(settles=2, proposed=True)
def one_f_one_b(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Rank r has chunk r, and runs p - r forwards before its first backward."""
    need_chunks("one_f_one_b", chunks, 1)
    return tuple(
        in_turn(ChunkPasses.of(rank, ranks), ranks - rank, micro_batches) for rank in range(ranks)
    )


def in_turn(chunk: ChunkPasses, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    """So many forwards ahead, then a backward and a forward in turn, then the last backwards."""
    writer = RankWriter(micro_batches)
    writer.run(chunk.forward, times=ahead)
    writer.run_in_turn(chunk.backward, chunk.forward, times=micro_batches)
    return writer.actions
