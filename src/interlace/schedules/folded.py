"""A folded model on one rank: the front half of one micro-batch's forward beside the back half of
another's backward, then the other way round (DHelix's W shape with one stage; papers 1.6, p = 1).

    F0 F1, F0|B1 F1|B0, F0|B1 F1|B0, ..., B1 B0          0: front half, 1: back half

With F, B the times of a chunk's passes and FB that of two side by side, m micro-batches take
2 (F + B) + 2 (m - 1) FB. At most 3 halves of a micro-batch's values are alive at a time.
"""

from interlace.errors import InputError
from interlace.ir.actions import Action, backward, forward, together

FRONT, BACK = 0, 1
"""Numbers of the two chunks: the half that comes first in a forward, and the other one."""


def folded(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Action, ...], ...]:
    """Raises InputError for several ranks, whose stages a pipeline would connect, and for another
    number of chunks than two."""
    if ranks != 1 or chunks != 2:
        raise InputError(
            f"folded runs two chunks on one rank, not {chunks} on {ranks}",
            hint="fold the graphs in two; stages on several ranks need a pipeline",
        )
    actions = [together(forward(1, FRONT)), together(forward(1, BACK))]
    for k in range(1, micro_batches):
        actions += [
            together(forward(k + 1, FRONT), backward(k, BACK)),
            together(forward(k + 1, BACK), backward(k, FRONT)),
        ]
    actions += [together(backward(micro_batches, BACK)), together(backward(micro_batches, FRONT))]
    return (tuple(actions),)
