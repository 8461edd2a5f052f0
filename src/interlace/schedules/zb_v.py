"""ZB-V: a folded model whose backward is cut in two (zero bubble, arXiv 2401.10241, section 6).

Where F, I and W, the times of one chunk's passes, are equal, no rank waits between its first pass
and its last one, if m >= 2p. No rank keeps the values of more than 2p chunks, as the first one does
in 1F1B.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import RankWriter, folded_chunks, need_chunks


@declare(settles=2, proposed=True)
def zb_v(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r and 2p - 1 - r."""
    need_chunks("zb_v", chunks, 2)
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    front, back = folded_chunks(rank, ranks)
    behind = ranks - rank
    rule = max(micro_batches, 2 * ranks)  # the rule is for at least so many
    whole_front = front.forward, front.input, front.weight
    whole_back = back.forward, back.input, back.weight
    writer = RankWriter(micro_batches)
    writer.run(front.forward, times=2 * behind - 1)
    writer.run_in_turn(back.forward, front.forward, times=rank)
    writer.run_in_turn(*whole_back, times=behind)
    ahead = 2 * behind - 1 + rank
    writer.run_in_turn(*whole_front, *whole_back, times=rule - ahead)
    writer.run_in_turn(front.input, front.weight, *whole_back, times=ahead - rank - behind)
    writer.run_in_turn(front.input, back.input, times=rank)
    writer.run_in_turn(front.input, front.weight, times=behind)
    writer.run(back.weight, times=rank)
    writer.run_weights()
    return writer.actions
