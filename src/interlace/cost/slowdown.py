"""From times alone and together to slow-down factors. Arithmetic only."""

from interlace.ir.costs import Together

LARGEST_FACTOR = 3.0
"""A larger one is no slow-down but a wait for a core, or an overlap too short to see."""
SHARED_BELOW = 0.5
"""Two lanes with a lower overlap effectiveness are taken to share one link."""


def transfer_factor(alone_ns: float, beside_ns: float, overlapped_ns: float) -> float:
    """Slow-down of a transfer that took `alone_ns` alone, and `beside_ns` with compute beside it
    for `overlapped_ns` of them.

    It goes on at 1 / f of its speed while overlapped, so overlapped / f + (beside - overlapped) =
    alone. Noise can bring f below 1, which is taken as 1.
    """
    if overlapped_ns <= 0:
        return 1.0
    done_ns = max(alone_ns - beside_ns + overlapped_ns, overlapped_ns / LARGEST_FACTOR)
    return max(1.0, overlapped_ns / done_ns)


def compute_factor(alone_ns: float, beside_ns: float) -> float:
    """Slow-down of an operator that takes `alone_ns` alone and `beside_ns` beside a transfer; 1 if
    none of its calls was."""
    if alone_ns <= 0 or beside_ns <= 0:
        return 1.0
    return min(LARGEST_FACTOR, max(1.0, beside_ns / alone_ns))


def shared_links(pairs: tuple[Together, ...]) -> dict[str, str]:
    """Link by lane, for lanes that share one with another."""
    link: dict[str, str] = {}
    for pair in pairs:
        if pair.oef >= SHARED_BELOW:
            continue
        names = {link.get(lane, lane) for lane in (pair.first, pair.second)}
        members = {lane for lane, name in link.items() if name in names}
        members |= {pair.first, pair.second}
        link |= dict.fromkeys(members, "+".join(sorted(members)))
    return link
