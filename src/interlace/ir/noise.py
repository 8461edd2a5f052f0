"""Which measured times are not to be trusted: what other work on the machine leaves in a table.

A table carries what it takes to judge it: the spread of repeats, the times of pairs alone and
together, the fits of links with what copying the same bytes in memory took. So whoever reads one,
also from a file, comes to the same judgement, and so do all ranks.
"""

from collections.abc import Iterable
from dataclasses import replace

from interlace.ir.costs import CostTable, LinkFit, OperatorCost, PairCost, Together

LARGEST_SPREAD = 0.5
"""Interquartile range over time, all operators together. On two cores a quiet machine gave 0.2 to
0.3, one on which two other processes computed 0.55 to 1.2."""
LEAST_OEF, MOST_OEF = -1.0, 1.25
"""Two things at once take no less time than the longer one alone, which is 1; a quarter more is
left to chance. At 0 they take turns. Where one core computes and copies what the link carries,
turns cost up to the half of the shorter one more (-0.5); -1 is twice that."""
LARGEST_ERROR = 1.0
"""A size whose time is off its line by a factor of two."""
_NAMED = 3
"""So many noisy operators are named; a choice, enough to look for a cause."""


def relative_spread(operators: Iterable[OperatorCost]) -> float:
    """Interquartile range over time of what was measured alone, weighted by time."""
    costs = list(operators)
    total_ns = sum(cost.solo_ns for cost in costs)
    return sum(cost.spread_ns for cost in costs) / total_ns if total_ns else 0.0


def excess_of_spread(table: CostTable) -> float:
    """By how much the spread of `table` is too large; 0 if it is not."""
    return max(0.0, relative_spread(table.operators.values()) - LARGEST_SPREAD)


def excess_of_oef(pair: PairCost | Together) -> float:
    """By how much an overlap effectiveness is beyond what is possible; 0 if it is not."""
    return max(0.0, pair.oef - MOST_OEF, LEAST_OEF - pair.oef)


def excess_of_fit(fit: LinkFit) -> float:
    """By how much a fitted link is beyond what is possible; 0 if it is not. One whose time does
    not grow with bytes, or that has no latency, is none."""
    if not fit.ns_per_byte or not fit.latency_ns:
        return LARGEST_ERROR + fit.largest_error
    too_fast = max(0.0, fit.copy_ns_per_byte / fit.ns_per_byte - 1)
    return max(too_fast, fit.largest_error - LARGEST_ERROR, 0.0)


def noise_of(table: CostTable) -> tuple[str, ...]:
    """What is wrong with the times of `table`, in words; empty if nothing looks wrong. Computed
    tables have no noise."""
    if not table.source.startswith("profile"):
        return ()
    found = []
    if excess_of_spread(table):
        spread = relative_spread(table.operators.values())
        found.append(
            f"repeats of an operator spread over {100 * spread:.0f} % of its time (interquartile "
            f"range; {100 * LARGEST_SPREAD:.0f} % is usual at most)"
        )
    strange = [
        f"{name} {pair.oef:.2f}" for name, pair in _named_pairs(table) if excess_of_oef(pair)
    ]
    if strange:
        found.append(
            f"overlap effectiveness outside of {LEAST_OEF:g} to {MOST_OEF:g}: {_listed(strange)}"
        )
    fits = [_words(fit) for fit in table.fits if excess_of_fit(fit)]
    return (*found, *fits)


def without_noise(table: CostTable) -> CostTable:
    """`table` without what is noisy in it, to be measured again. If the times alone are, all is
    gone: the rest was measured with the operators on which a step spends most time."""
    if not noise_of(table):
        return table
    if excess_of_spread(table):
        return replace(
            table, operators={}, pairs=(), fits=(), lane_pairs=(), compute_pairs=(), links={}
        )
    return replace(
        table,
        pairs=tuple(pair for pair in table.pairs if not excess_of_oef(pair)),
        fits=tuple(fit for fit in table.fits if not excess_of_fit(fit)),
        lane_pairs=tuple(pair for pair in table.lane_pairs if not excess_of_oef(pair)),
        compute_pairs=tuple(pair for pair in table.compute_pairs if not excess_of_oef(pair)),
    )


def _named_pairs(table: CostTable) -> list[tuple[str, PairCost | Together]]:
    named: list[tuple[str, PairCost | Together]] = [
        (f"{pair.compute} with {pair.collective} on {pair.lane}", pair) for pair in table.pairs
    ]
    together = (*table.lane_pairs, *table.compute_pairs)
    return named + [(f"{pair.first} with {pair.second}", pair) for pair in together]


def _words(fit: LinkFit) -> str:
    name = f"{fit.kind} on {fit.lane}"
    if not fit.ns_per_byte:
        return f"{name} does not take longer for more bytes"
    if not fit.latency_ns:
        return f"{name} takes no time for no bytes"
    if fit.copy_ns_per_byte > fit.ns_per_byte:
        return (
            f"{name} at {1e3 / fit.ns_per_byte:,.0f} MB/s is faster than a copy in memory, "
            f"{1e3 / fit.copy_ns_per_byte:,.0f} MB/s"
        )
    return f"{name} is off its line by {100 * fit.largest_error:.0f} %"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
