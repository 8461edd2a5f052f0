"""STP: a folded model in which a forward runs beside a backward of the same chunk, with more
forwards ahead than DualPipeV, so that nearly every pass has another beside it (arXiv 2510.27257).

With F, I, W the times of one chunk's passes, communication hidden, the bubble is
(p - 1) (F + I - W) where the three are equal. Rank 0 keeps the values of at most 3p + 1 chunks. The
last rank keeps up to 4p - 1: weights' gradients are added in the order of micro-batches here, so
those that wait make later ones wait.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter, folded_chunks, need_chunks


@declare(settles=4, proposed=True)
def stp(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r and 2p - 1 - r."""
    need_chunks("stp", chunks, 2)
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    front, back = folded_chunks(rank, ranks)
    behind = ranks - 1 - rank
    rule = max(micro_batches, 3 * ranks)  # the rule is for at least so many
    writer = RankWriter(micro_batches)
    writer.run(front.forward, times=2 * behind)
    writer.run_in_turn(front.forward, back.forward, times=rank + 1)
    writer.run(front.forward, times=rank + 1)
    for _ in range(behind):
        writer.run(back.forward, back.input)
        writer.run(front.forward, back.weight)
    _braid(writer, front, back, rank, 2 * (rule - 3 * ranks + 1) + 1)
    # From here on weights' gradients wait, so a backward adds those of an earlier micro-batch.
    for _ in range(2 * ranks - 2 - rank):
        writer.run_in_turn(front.input, front.weight)
        writer.run(back.forward, back.input)
    writer.run_in_turn(front.input, front.weight, back.input, back.weight, times=rank + 1)
    for _ in range(behind):
        writer.run_in_turn(front.input, front.weight)
        writer.run_weights(2)
    writer.run(front.input)
    writer.run_weights()
    return writer.actions


def _braid(
    writer: RankWriter, front: ChunkPasses, back: ChunkPasses, rank: int, whole: int
) -> None:
    """Back and front in turn, each chunk's forward beside its own backward; the last ones leave
    their weights' gradients for the end."""
    for number in range(whole + 2 * rank):
        chunk = front if number % 2 else back
        is_cut = number >= whole + rank
        writer.run(chunk.forward, chunk.input if is_cut else chunk.backward)
