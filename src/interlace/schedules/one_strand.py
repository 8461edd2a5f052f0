"""One micro-batch after the other: F1, B1, F2, B2, ... What plain gradient accumulation does."""

from interlace.ir.actions import Action, backward, forward, together


def one_strand(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """For each rank the same: every micro-batch forward, then backward, chunk by chunk."""
    numbers: list[int | None] = list(range(chunks)) if chunks > 1 else [None]
    actions = [
        together(slot)
        for index in range(1, micro_batches + 1)
        for slot in (
            *(forward(index, chunk) for chunk in numbers),
            *(backward(index, chunk) for chunk in reversed(numbers)),
        )
    ]
    return (tuple(actions),) * ranks
