"""Proves that noisy times are recognised, measured again, said, and never more than that."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ir_store import COSTS

from interlace.ir.costs import CostTable, LinkFit, PairCost, Together, overlap_effectiveness
from interlace.ir.graph import Kind
from interlace.ir.noise import noise_of, relative_spread, without_noise
from interlace.measure.repeats import MOST_TRIES, least_noisy
from interlace.report.cost_tables import cost_summary

QUIET = replace(COSTS, lane_pairs=(Together("dp", "tp", 5, 7, 12),))


def pair(oef: float, compute: Kind = Kind.MATMUL) -> PairCost:
    """A pair of 1 ms and 2 ms whose time together gives that effectiveness."""
    together_ns = round(3e6 - oef * 1e6)
    assert overlap_effectiveness(1_000_000, 2_000_000, together_ns) == pytest.approx(oef)
    return PairCost(
        compute, Kind.ALL_GATHER, "tp", 1.0, 1.0, oef, 1_000_000, 2_000_000, together_ns
    )


def spread_over(share: float) -> CostTable:
    operators = {
        key: replace(cost, solo_ns=1000, spread_ns=round(1000 * share))
        for key, cost in QUIET.operators.items()
    }
    return replace(QUIET, operators=operators)


def fitted(latency_ns: float, ns_per_byte: float, error: float = 0.1) -> CostTable:
    fit = LinkFit(Kind.ALL_GATHER, "tp", latency_ns, ns_per_byte, error, copy_ns_per_byte=0.1)
    return replace(QUIET, fits=(fit,))


@pytest.mark.parametrize(
    "table",
    [
        QUIET,
        spread_over(0.5),
        *(replace(QUIET, pairs=(pair(oef),)) for oef in (-0.95, 0.0, 0.9, 1.0, 1.2)),
        fitted(50e3, 0.5),
        fitted(50e3, 0.1, error=0.9),
        replace(spread_over(9), source="analytic"),
    ],
)
def test_what_is_possible_is_no_noise(table: CostTable) -> None:
    """Slower together than in turn, as on one core, and links as fast as memory are possible."""
    assert noise_of(table) == ()
    assert without_noise(table) == table
    assert "warning" not in cost_summary(table)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (spread_over(0.9), "spread over 90 % of its time"),
        (replace(QUIET, pairs=(pair(0.9), pair(-29.0))), "matmul with all_gather on tp -29.00"),
        (replace(QUIET, pairs=(pair(2.41),)), "tp 2.41"),
        (replace(QUIET, lane_pairs=(Together("dp", "tp", 10, 10, 90),)), "dp with tp -7.00"),
        (replace(QUIET, compute_pairs=(Together("a", "b", 10, 10, 2),)), "a with b 1.80"),
        (fitted(50e3, 1 / 19.588), "at 19,588 MB/s is faster than a copy in memory, 10,000 MB/s"),
        (fitted(50e3, 0.0), "all_gather on tp does not take longer for more bytes"),
        (fitted(0.0, 0.5), "all_gather on tp takes no time for no bytes"),
        (fitted(50e3, 0.5, error=3.0), "off its line by 300 %"),
    ],
)
def test_what_is_not_possible_is_named(table: CostTable, said: str) -> None:
    """In words with the values, in the summary too; and what is left without it is not noisy."""
    [reason] = noise_of(table)
    assert said in reason
    assert f"warning: noisy times: {reason}" in cost_summary(table)
    assert noise_of(without_noise(table)) == ()


def test_only_what_is_noisy_is_taken_away() -> None:
    """Unless operators alone are: by their times the operators of pairs were chosen."""
    good, bad = pair(0.9), pair(-29.0, Kind.ATTENTION)
    table = replace(QUIET, pairs=(good, bad))
    assert without_noise(table) == replace(QUIET, pairs=(good,))
    left = without_noise(replace(spread_over(0.9), pairs=(good,)))
    assert (left.operators, left.pairs, left.fits, left.links) == ({}, (), (), {})
    assert left.graph_digest == QUIET.graph_digest


def test_spread_is_weighted_by_time() -> None:
    """A long operator that is steady outweighs a short one that is not."""
    first, second = QUIET.operators.values()
    steady = replace(first, solo_ns=9000, spread_ns=90)
    restless = replace(second, solo_ns=100, spread_ns=300)
    assert relative_spread([steady, restless]) == pytest.approx(390 / 9100)
    assert relative_spread([]) == 0.0


@given(st.lists(st.floats(0, 10), min_size=MOST_TRIES, max_size=MOST_TRIES))
def test_measured_again_until_quiet_but_not_for_ever(excesses: list[float]) -> None:
    """The first quiet result, else the least noisy of a bounded number."""
    samples = iter(excesses)
    found = least_noisy(lambda: next(samples), lambda excess: excess)
    taken = MOST_TRIES - len(list(samples))
    assert found == min(excesses[:taken])
    assert taken == next((n for n, each in enumerate(excesses, 1) if not each), MOST_TRIES)
