"""ZB-H2: forwards enough ahead, and gradients of weights late enough, that no rank waits between
its first pass and its last one (zero bubble, arXiv 2401.10241, section 2.2).

    rank 0:    F1 F2 F3 I1 W1 F4 I2 W2 ...         I: gradients of inputs, W: of weights
    rank p-1:  F1 I1 F2 I2 F3 I3 W1 F4 I4 W2 ...   (both of two ranks)

Rank r runs 2 (p - r) - 1 forwards first and the weights' gradients 2r micro-batches late. Where
F, I and W, the times of a stage's passes, are equal and m >= 2p - 1, a step is 3m + p - 1 of them,
as rank r begins r of them late and ends as late. Every rank keeps the values of 2p - 1
micro-batches, nearly twice as many as the first one does in 1F1B. Searches of layouts do not try
it, as ZB-V has no bubble either and keeps half as much.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter, need_chunks


@declare(settles=2)
def zb_h2(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Rank r has chunk r."""
    need_chunks("zb_h2", chunks, 1)
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    chunk = ChunkPasses.of(rank, ranks)
    writer = RankWriter(micro_batches)
    writer.run(chunk.forward, times=2 * (ranks - rank) - 1)
    for number in range(micro_batches):
        writer.run(chunk.input)
        if number >= 2 * rank:
            writer.run(chunk.weight)
        writer.run(chunk.forward)
    writer.run_weights()
    return writer.actions
