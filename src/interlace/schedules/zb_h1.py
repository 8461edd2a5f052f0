"""ZB-H1: 1F1B whose backward is cut in two, so that the gradients of weights fill the time in which
a rank would wait at the end (zero bubble, arXiv 2401.10241).

    rank 0:    F1 F2 F3 I1 W1 F4 I2 W2 ...         I: gradients of inputs, W: of weights
    rank p-1:  F1 I1 F2 I2 F3 I3 W1 F4 I4 W2 ...

Rank r runs the weights' gradients r micro-batches late. With F, I, W the times of a stage, the
bubble is (p - 1) (F + I - W), and no rank keeps the values of more than p micro-batches, as the
first one does in 1F1B.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter, need_chunks


@declare(settles=2, proposed=True)
def zb_h1(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Rank r has chunk r."""
    need_chunks("zb_h1", chunks, 1)
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    chunk = ChunkPasses.of(rank, ranks)
    writer = RankWriter(micro_batches)
    writer.run(chunk.forward, times=ranks - rank)
    for number in range(micro_batches):
        writer.run(chunk.input)
        if number >= rank:
            writer.run(chunk.weight)
        writer.run(chunk.forward)
    writer.run_weights()
    return writer.actions
