"""How long a collective and its matmul take: one after the other, data sliced, decomposed.

CommFuse (arXiv 2604.24013) cuts the rows of N ranks into N * pieces slices and sends each slice
under the compute of another. `compute_ns` and `transfer_ns` are always those of ONE slice, of which
each rank computes N * pieces and sends (N - 1) * pieces. The same formulas hold for the gather form
(own slice first), for the scatter form (own slice last, additions free) and for sends that travel
a ring or go straight to their owner, on ranks that start together.
"""

PIECES = (1, 2, 4)
"""Of a rank's slice, tried where their number is left open."""
SLICES = 4
"""Of data slicing where their number is left open."""
EXPERT_GROUPS = (2, 4)
"""Tried where the number of groups of experts is left open."""
LEAST_GAIN = 0.03
"""Of the plain time, below which a choice leaves a collective whole: what slices cost beside their
matmuls is not known."""


def compute_only_ns(compute_ns: int, *, ranks: int, pieces: int = 1) -> int:
    """All slices, nothing sent."""
    _check(compute_ns, 0, ranks, pieces)
    return ranks * pieces * compute_ns


def vanilla_ns(compute_ns: int, transfer_ns: int, *, ranks: int, pieces: int = 1) -> int:
    """The collective, then the matmul, or the other way round."""
    _check(compute_ns, transfer_ns, ranks, pieces)
    return pieces * (ranks * compute_ns + (ranks - 1) * transfer_ns)


def slicing_ns(compute_ns: int, transfer_ns: int, *, ranks: int, slices: int) -> int:
    """Data slicing (Megatron, MindSpeed): a pipeline of `slices` collectives and matmuls.

    The times are those of a decomposition with one piece per rank. One collective of the `slices`
    has nothing beside it: the first of a gather, the last of a scatter. Slices are computed as fast
    as the whole, which is what this leaves out. Rounded to whole ns.
    """
    _check(compute_ns, transfer_ns, ranks, slices)
    compute, transfer = ranks * compute_ns, (ranks - 1) * transfer_ns
    return round(max(compute, transfer) + min(compute, transfer) / slices)


def decomposed_ns(
    compute_ns: int,
    transfer_ns: int,
    *,
    ranks: int,
    pieces: int = 1,
    bidirectional: bool = False,
) -> int:
    """t_c + max((N m - 1) t_c, (N - 1) m t_p), with one piece t_c + (N - 1) max(t_c, t_p).

    `bidirectional` sends the halves of each slice in opposite directions over links of their own,
    which halves t_p; where both directions leave by one link, as behind a switch, it is False.
    Rounded up to whole ns.
    """
    _check(compute_ns, transfer_ns, ranks, pieces)
    sent = (ranks - 1) * pieces * transfer_ns
    if bidirectional:
        sent = -(-sent // 2)
    return compute_ns + max((ranks * pieces - 1) * compute_ns, sent)


def by_expert_ns(compute_ns: int, exchange_ns: int, *, groups: int) -> int:
    """A layer of experts by groups: each one's rows arrive, are computed, and go back.

    One exchange is under way at a time; all to experts are before the first one back. The times are
    those of one group, alike for all.
    """
    _check(compute_ns, exchange_ns, 1, groups)
    computed = returned = 0
    for group in range(groups):
        computed = max(computed, (group + 1) * exchange_ns) + compute_ns
        returned = max(returned, computed, groups * exchange_ns) + exchange_ns
    return returned


def overhead_ns(
    compute_ns: int,
    transfer_ns: int,
    *,
    ranks: int,
    pieces: int = 1,
    bidirectional: bool = False,
    filler_ns: int = 0,
) -> int:
    """What `decomposed_ns` takes above compute alone.

    `filler_ns` is other compute of the rank, such as weight gradients, that runs before the last
    slice is waited for.
    """
    whole = decomposed_ns(
        compute_ns, transfer_ns, ranks=ranks, pieces=pieces, bidirectional=bidirectional
    )
    alone = compute_only_ns(compute_ns, ranks=ranks, pieces=pieces)
    return max(0, whole - alone - filler_ns)


def _check(compute_ns: int, transfer_ns: int, ranks: int, parts: int) -> None:
    assert compute_ns >= 0, f"a slice cannot take {compute_ns} ns"
    assert transfer_ns >= 0, f"a transfer cannot take {transfer_ns} ns"
    assert ranks >= 1, f"{ranks} ranks compute nothing"
    assert parts >= 1, f"{parts} slices leave nothing to compute"
