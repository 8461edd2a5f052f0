"""Eager 1F1B: 1F1B with twice as many forwards ahead, so that transfers run beside compute
(arXiv 2211.05322; papers 2.5).

    rank p-2:  F1 F2 F3 B1 F4 B2 B3 B4
    rank p-1:  F1 B1 F2 B2 F3 B3 F4 B4

With F, B the times of a stage's passes and c that of a transfer, the period is
max(F + B, (p (F + B) + 2 (p - 1) c) / (2p - 1)): transfers are hidden while c <= (F + B) / 2. Rank
r keeps the values of at most 2 (p - r) - 1 micro-batches, where 1F1B keeps p - r.
"""

from interlace.ir.actions import Action
from interlace.schedules.declared import declare
from interlace.schedules.one_f_one_b import in_turn
from interlace.schedules.rank_writer import ChunkPasses, need_chunks


@declare(settles=2, proposed=True)
def eager_one_f_one_b(
    ranks: int, micro_batches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Rank r has chunk r, and runs 2 (p - r) - 1 forwards before its first backward."""
    need_chunks("eager_one_f_one_b", chunks, 1)
    return tuple(
        in_turn(ChunkPasses.of(rank, ranks), 2 * (ranks - rank) - 1, micro_batches)
        for rank in range(ranks)
    )
