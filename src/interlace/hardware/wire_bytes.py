"""Bytes on the wire of a collective, by ring algorithms: the one formula that all models share.

For n ranks and a full tensor of S bytes (gathered, before a scatter, or what one rank sends) each
rank sends

    all-gather, reduce-scatter, all-to-all   (n-1)/n S
    all-reduce                               2 (n-1)/n S
    broadcast, send                          S
"""

from interlace.ir.graph import Kind


def share_sent(kind: Kind, ranks: int) -> float:
    """What each rank sends, as a fraction of the full tensor."""
    if kind in (Kind.BROADCAST, Kind.SEND):
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if kind is Kind.ALL_REDUCE else share


def wire_bytes(kind: Kind, full_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends for a collective on a tensor of `full_bytes`."""
    return share_sent(kind, ranks) * full_bytes


def wire_bytes_by_link(
    kind: Kind, full_bytes: float, ranks: int, hosts: int, local: int
) -> tuple[float, float]:
    """Bytes that one device sends (inside its host, to other hosts), with `local` ranks per host.

    A gathered or reduced tensor crosses into each host once, shared among the ports of its `local`
    devices; pieces of an all-to-all have one reader each and cross for every rank. A send has one
    reader; where ranks are on several hosts, the last device of each sends to another host.
    """
    if kind is Kind.ALL_TO_ALL:
        return full_bytes * (local - 1) / ranks, full_bytes * (ranks - local) / ranks
    inside = wire_bytes(kind, full_bytes, local) * (local > 1)
    across = wire_bytes(kind, full_bytes, hosts) * (hosts > 1)
    return inside, across if kind is Kind.SEND else across / local
