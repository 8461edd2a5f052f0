"""DualPipeV: a folded model, forwards of one chunk beside backwards of the other, the backward cut
in two where a rank would wait (DeepSeek-V3, arXiv 2412.19437; the V form by Sea AI Lab).

With F, B, W the times of one chunk's forward, backward and weights' gradients, and FB that of a
forward and a backward side by side, the bubble is (p - 1) (FB + B - 3W) where F = B - W, and no
rank keeps the values of more than 2p + 1 chunks.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import ChunkPasses, RankWriter, folded_chunks, need_chunks


@declare(settles=4, proposed=True)
def dual_pipe_v(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r and 2p - 1 - r."""
    need_chunks("dual_pipe_v", chunks, 2)
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    front, back = folded_chunks(rank, ranks)
    behind = ranks - 1 - rank
    rule = max(micro_batches, 2 * ranks)  # the rule is for at least so many
    writer = RankWriter(micro_batches)
    writer.run(front.forward, times=2 * behind)
    writer.run_in_turn(front.forward, back.forward, times=rank + 1)
    writer.run_in_turn(back.input, back.weight, back.forward, times=behind)
    for number in range(rule - 2 * ranks + rank + 1):
        if number == 0 and behind == 0:
            writer.run_in_turn(front.forward, back.backward)  # the next rank's side is its own
        else:
            writer.run(front.forward, back.backward)
        writer.run(back.forward, front.backward)
    for _ in range(behind):
        writer.run(back.backward)
        writer.run(back.forward, front.backward)
    _drain(writer, front, back, rank)
    for _ in range(behind):
        writer.run_weights(1)
        writer.run(front.input)
    writer.run_weights()
    return writer.actions


def _drain(writer: RankWriter, front: ChunkPasses, back: ChunkPasses, rank: int) -> None:
    """The last backwards of both chunks; weights' gradients of the later half wait."""
    cut_from = rank + 1  # of 2 (rank + 1) backwards, back and front in turn
    for number in range(2 * (rank + 1)):
        chunk = front if number % 2 else back
        writer.run(chunk.input if number >= cut_from else chunk.backward)
