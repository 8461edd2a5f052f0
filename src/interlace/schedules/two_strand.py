"""Two strands: F1, F2|B1, F3|B2, ..., FM|B(M-1), BM (DHelix, arXiv 2411.15871).

The collectives of the forward run under the compute of the backward beside it, and the other way
round. Only the first forward and the last backward have no other strand beside them.
"""

from interlace.errors import InputError
from interlace.ir.actions import Action, backward, forward, together
from interlace.schedules.declared import declare


@declare(settles=2)
def two_strand(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Raises InputError for fewer than two micro-batches, and for several chunks or ranks of a
    pipeline, which `folded` takes."""
    if micro_batches < 2:
        raise InputError(
            f"two strands need at least two micro-batches per step, not {micro_batches}",
            hint="give the step two micro-batches or more (in a run file train.micro_batches), or "
            "set strands to 1",
        )
    if chunks != 1 or ranks != 1:
        what = f"one chunk on a rank, not {chunks}" if chunks != 1 else f"one stage, not {ranks}"
        raise InputError(f"two_strand runs {what}", hint="try folded")
    middle = [together(forward(k + 1), backward(k)) for k in range(1, micro_batches)]
    actions = (together(forward(1)), *middle, together(backward(micro_batches)))
    return (actions,)
