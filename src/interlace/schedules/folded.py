"""Folded (the W shape): each rank has a chunk of the front half of the model and one of the back
half, and runs the forward of one beside the backward of the other (DHelix, arXiv 2411.15871;
papers 1.6).

    down k:  forward k on the front chunk   | backward k-p on the back chunk     towards rank p-1
    up k:    forward k on the back chunk    | backward k-p on the front chunk    towards rank 0

Downs and ups run as forwards and backwards of 1F1B. With F, B the times of one chunk's passes and
FB that of two side by side, m micro-batches on p ranks take 2p (F + B) + 2 (m - 1) FB if m >= 2p,
and each rank keeps the values of at most 2p + 1 chunks. On one rank this is two strands, of halves.
"""

from interlace.ir.actions import Action, Strand
from interlace.schedules.declared import declare
from interlace.schedules.rank_writer import RankWriter, folded_chunks, need_chunks


@declare(settles=4, proposed=True)
def folded(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Rank r has the chunks r and 2p - 1 - r. Raises InputError for another number than two."""
    need_chunks("folded", chunks, 2)
    ahead = [ranks - rank for rank in range(ranks)]
    return tuple(w_shape(rank, micro_batches, ahead) for rank in range(ranks))


def w_shape(rank: int, micro_batches: int, ahead: list[int]) -> tuple[Action, ...]:
    """What a rank runs if each runs so many downs before its first up; `ahead` falls with the rank.
    The backward of a micro-batch goes down as many steps behind its forward as rank 0 is ahead."""
    front, back = folded_chunks(rank, len(ahead))
    late = ahead[0]
    writer = RankWriter(micro_batches)

    def step(number: int, forward: Strand, backward: Strand) -> None:
        first = [forward] if number < micro_batches else []
        writer.run(*first, *([backward] if number >= late else []))

    steps, downs = micro_batches + late, 0
    for ups in range(steps):
        while downs < min(steps, ups + ahead[rank]):
            step(downs, front.forward, back.backward)
            downs += 1
        step(ups, back.forward, front.backward)
    return writer.actions
