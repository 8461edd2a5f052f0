"""A schedule in one file: a forward runs beside the backward of the micro-batch two before it.

F1, F2, F3|B1, F4|B2, ..., B(M-1), BM. One micro-batch more is in flight than in `two_strand`.
"""

from interlace.ir.actions import Action, backward, forward, together


def two_ahead(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """For each rank the same tuple of actions; micro-batches count from 1."""
    first = min(2, micro_batches)
    actions = [together(forward(k)) for k in range(1, first + 1)]
    for k in range(1, micro_batches + 1):
        ahead = [forward(k + first)] if k + first <= micro_batches else []
        actions.append(together(*ahead, backward(k)))
    return (tuple(actions),) * ranks
