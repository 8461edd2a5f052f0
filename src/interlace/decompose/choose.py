"""Choose for each site whether and how it is decomposed, from the times of its slices.

    plain        the collective, then its matmuls, or the other way round
    decomposed   T = t_c + max((N m - 1) t_c, (N - 1) m t_p), see sim.decomposed

for slices that take t_c to compute and t_p to send, N ranks and m pieces per rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from interlace.decompose.sites import Site, blocks_of
from interlace.errors import InputError
from interlace.graphs.trace import StrandGraph
from interlace.sim.decomposed import (
    EXPERT_GROUPS,
    LEAST_GAIN,
    PIECES,
    SLICES,
    by_expert_ns,
    decomposed_ns,
)

BY_EXPERT = "by_expert"
"""The variant of sites that are cut by groups of experts."""

Way = tuple[str, int]
"""Variant and pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceTimes:
    """One slice on the slowest rank."""

    compute_ns: int
    """All matmuls of the site, on the rows of one slice."""
    send_ns: int
    """From rank to rank, all ranks at once; of a group of experts one exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteTimes:
    """What a site takes as it is, and what its slices take."""

    plain_ns: int
    slices: Mapping[Way, SliceTimes]


Times = Callable[[StrandGraph, Site, Sequence[Way]], SiteTimes]
"""Times of a site for each way, equal on all ranks. Called on all ranks in the same order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a run asks for, as in `[overlap]` of run files."""

    variant: str
    """`auto` or one of `sites.VARIANTS`."""
    pieces: int = 0

    def __post_init__(self) -> None:
        if self.pieces < 0:
            raise InputError(
                f"overlap.pieces = {self.pieces} is negative",
                hint="set it to the number of slices per rank, or to 0 to let costs decide",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a site runs."""

    site: Site
    variant: str = ""
    """Empty: the collective stays whole."""
    pieces: int = 0
    reason: str = ""
    """Why it stays whole, or has other pieces than were asked for."""
    plain_ns: int = 0
    chosen_ns: int = 0
    """Predicted times; 0 where nothing was left to choose."""


def choose(
    strand: StrandGraph,
    site: Site,
    request: Request,
    times: Times,
    attention: Site | None = None,
) -> Choice:
    """The fastest of the ways that `request` allows; with `auto` also the plain collective, and
    `attention`, the same site with the attention in front of it."""
    ways = ways_of(site, request)
    if request.variant != "auto" and len(ways) == 1:
        return Choice(
            site=site, variant=ways[0][0], pieces=ways[0][1], reason=_misfit(site, ways[0], request)
        )
    found = times(strand, site, ways)
    predicted = {way: predicted_ns(site, way, found.slices[way]) for way in ways}
    variant, pieces = best = min(ways, key=predicted.__getitem__)
    if request.variant == "auto" and predicted[best] > found.plain_ns * (1 - LEAST_GAIN):
        gain = 1 - predicted[best] / max(found.plain_ns, 1)
        reason = f"the best way ({variant}, {pieces}) would gain {gain:.0%}"
        return Choice(site=site, reason=reason, plain_ns=found.plain_ns, chosen_ns=found.plain_ns)
    if attention is not None and request.variant == "auto" and ("ring", 1) in found.slices:
        split_ns = with_attention_ns(site, attention, found.slices["ring", 1])
        if split_ns < predicted[best] - found.plain_ns * LEAST_GAIN:
            site, variant, pieces = attention, "ring", 1
            predicted[best] = split_ns
    return Choice(
        site=site,
        variant=variant,
        pieces=pieces,
        reason=_misfit(site, (variant, pieces), request),
        plain_ns=found.plain_ns,
        chosen_ns=predicted[best],
    )


def _misfit(site: Site, way: Way, request: Request) -> str:
    if not request.pieces or way[1] == request.pieces:
        return ""
    what = f"{site.experts} experts of a rank" if site.experts else f"{site.rows} rows"
    return f"{request.pieces} pieces do not fit {what}"


def with_attention_ns(site: Site, attention: Site, slices: SliceTimes) -> int:
    """How long the site takes if the attention in front of it hides its sends too, without the
    attention's own time, at the rate of the matmuls."""
    compute_ns = round(slices.compute_ns * attention.flops / max(site.flops, 1))
    whole = decomposed_ns(compute_ns, slices.send_ns, ranks=site.ranks)
    return whole - (compute_ns - slices.compute_ns) * site.ranks


def ways_of(site: Site, request: Request) -> list[Way]:
    """The ways of `request` that fit a site. Between two ranks all rings are one way, and experts
    are cut in one way whatever the variant."""
    if site.kind == "expert_exchange":
        wanted = [request.pieces] if request.pieces else list(EXPERT_GROUPS)
        return [(BY_EXPERT, each) for each in sorted({min(n, site.experts) for n in wanted})]
    if request.variant == "slicing":
        return [("slicing", blocks_of(site.rows, request.pieces or SLICES))]
    variants = [request.variant]
    if request.variant == "auto":
        variants = ["ring", "bidirectional"] if site.ranks > 2 and site.rows > 1 else ["ring"]
    pieces = [request.pieces] if request.pieces else [p for p in PIECES if p <= site.rows]
    if site.kind == "matmul_reduce":
        pieces = sorted({blocks_of(site.rows, count) for count in pieces})
    return [(variant, min(count, site.rows)) for variant in variants for count in pieces]


def predicted_ns(site: Site, way: Way, slices: SliceTimes) -> int:
    """How long a site takes in one way."""
    _, pieces = way
    compute, send, ranks = slices.compute_ns, slices.send_ns, site.ranks
    if site.kind == "expert_exchange":
        return by_expert_ns(compute, send, groups=pieces)
    if site.kind == "matmul_reduce":
        # Blocks are scattered one after the other; the gather of each runs under the next one.
        sent = (ranks - 1) * (2 * pieces - 1) * send
        hidden = compute + max((ranks * pieces - 1) * compute, sent)
        return hidden + (ranks - 1) * send
    return decomposed_ns(compute, send, ranks=ranks, pieces=pieces)
