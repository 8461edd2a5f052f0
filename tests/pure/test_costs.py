"""Proves that a cost table gives what it holds, says what it estimates, and refuses the rest."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_ir_graph import CHAIN, operator

from interlace.errors import InputError
from interlace.ir.costs import (
    CostTable,
    LinkFit,
    OperatorCost,
    PairCost,
    Together,
    compute_factor,
    cost_of,
    fit_line,
    overlap_effectiveness,
    shared_links,
    transfer_factor,
)
from interlace.ir.graph import Kind, OpGraph

TIMES = {"a": 100, "b": 200, "c": 300}
TABLE = CostTable(
    operators={key: cost_of(CHAIN.by_id[key], ns) for key, ns in TIMES.items()},
    source="profile",
    graph_digest=CHAIN.digest,
)


def graph_of(*operators: object) -> OpGraph:
    return OpGraph("forward", tuple(operators), (), ())


def test_times_by_operator() -> None:
    """Operators are found by their key, whatever they are called."""
    renamed = graph_of(replace(CHAIN.by_id["a"], id="x"), replace(CHAIN.by_id["a"], id="y"))
    assert TABLE.of(CHAIN) == TIMES
    assert TABLE.of(renamed) == {"x": 100, "y": 100}
    assert TABLE.estimated(CHAIN) == ()


def test_an_operator_that_was_not_measured_is_refused() -> None:
    """The message counts keys and names the first."""
    graph = graph_of(operator("a"), operator("q"), operator("p"), operator("z", key="q"))
    with pytest.raises(InputError, match=r"no time for 2 operators .*the first is 'p'"):
        TABLE.of(graph)
    assert TABLE.estimated(graph) == ("q", "p", "z")


def measured(target: str, kind: Kind, flops: int, moved: int, ns: int) -> OperatorCost:
    return OperatorCost(ns, 0, kind, target, "compute", moved, flops)


def test_compute_is_estimated_from_operators_of_the_same_target() -> None:
    """1 us + 2 ns per 1000 flops, on a shape in between and on one beyond; others do not count."""
    table = CostTable(
        operators={
            "small": measured("mm", Kind.MATMUL, 10**6, 10, 3_000),
            "large": measured("mm", Kind.MATMUL, 10**7, 10, 21_000),
            "other": measured("bmm", Kind.MATMUL, 10**6, 10, 900_000),
        },
        source="profile",
    )
    graph = graph_of(
        operator("middle", target="mm", flops=5 * 10**6),
        operator("beyond", target="mm", flops=10**8),
        operator("copy", target="mm", flops=0, bytes_in=0, bytes_out=0, key="small"),
    )
    assert table.of(graph, interpolate=True) == {"middle": 11_000, "beyond": 201_000, "copy": 3_000}
    assert table.estimated(graph) == ("middle", "beyond")


def test_a_target_that_was_never_measured_takes_its_kind() -> None:
    """Operators without flops are compared by bytes, and never with those that have flops."""
    table = CostTable(
        operators={
            "one": measured("add", Kind.ELEMENTWISE, 0, 1_000, 1_000),
            "flops": measured("odd", Kind.ELEMENTWISE, 5, 5, 10**9),
        },
        source="profile",
    )
    silu = operator("s", target="silu", kind=Kind.ELEMENTWISE, flops=0, bytes_in=3000, bytes_out=0)
    assert table.of(graph_of(silu), interpolate=True) == {"s": 3_000}
    with pytest.raises(InputError, match=r"'m' .* has no matmul operator"):
        table.of(graph_of(operator("m")), interpolate=True)


def test_collectives_are_estimated_from_the_fit_of_their_lane() -> None:
    """By bytes of the full tensor: an all-gather's output, a reduce-scatter's input."""
    table = CostTable(
        operators={"rs": OperatorCost(700, 0, Kind.REDUCE_SCATTER, "rs", "tp", 700, 0)},
        source="profile",
        fits=(LinkFit(Kind.ALL_GATHER, "dp", 9e9, 0), LinkFit(Kind.ALL_GATHER, "tp", 50.0, 0.5)),
    )
    gather = operator("g", kind=Kind.ALL_GATHER, lane="tp", bytes_in=100, bytes_out=200)
    scatter = operator("s", kind=Kind.REDUCE_SCATTER, lane="tp", bytes_in=1400, bytes_out=700)
    assert table.of(graph_of(gather, scatter), interpolate=True) == {"g": 150, "s": 1400}
    reduce = operator("r", kind=Kind.ALL_REDUCE, lane="tp")
    with pytest.raises(InputError, match="has no all_reduce operator on lane 'tp'"):
        table.of(graph_of(reduce), interpolate=True)


def test_contention_takes_the_worst_lane() -> None:
    """The simulator knows kinds; pairs that were not measured do not slow down."""
    pairs = (
        PairCost(Kind.MATMUL, Kind.ALL_GATHER, "tp", 1.1, 1.0, 0.9),
        PairCost(Kind.MATMUL, Kind.ALL_GATHER, "dp", 1.0, 1.3, 0.9),
    )
    contention = replace(TABLE, pairs=pairs, links={"tp": "nic", "dp": "nic"}).contention
    assert contention.factors == {(Kind.MATMUL, Kind.ALL_GATHER): (1.1, 1.3)}
    assert contention.links == {"tp": "nic", "dp": "nic"}


def test_the_hash_covers_what_plans_depend_on() -> None:
    """Times, slow-downs, links and fits, but not where the table was made."""
    changes = [
        replace(TABLE, issue_ns=4),
        replace(TABLE, operators={"a": TABLE.operators["a"]}),
        replace(TABLE, pairs=(PairCost(Kind.MATMUL, Kind.ALL_GATHER, "tp", 1.1, 1.0, 0.9),)),
        replace(TABLE, links={"tp": "nic"}),
        replace(TABLE, fits=(LinkFit(Kind.ALL_GATHER, "tp", 1.0, 1.0),)),
    ]
    assert len({TABLE.digest, *(each.digest for each in changes)}) == 1 + len(changes)
    assert replace(TABLE, machine="other", lane_pairs=()).digest == TABLE.digest


@given(
    at_zero=st.floats(0, 1e6),
    slope=st.floats(1, 1e3),
    powers=st.sets(st.integers(0, 15), min_size=2),
)
def test_a_line_is_found_again(at_zero: float, slope: float, powers: set[int]) -> None:
    """Through points on a line the fit is that line, at sizes that differ a billionfold."""
    samples = [(4**power, at_zero + slope * 4**power) for power in powers]
    line = fit_line(samples)
    assert line is not None
    for work, time in samples:
        assert line.at(work) == pytest.approx(time, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=8))
@example([(0, 94906266), (1, 0)])
def test_no_fit_is_negative(samples: list[tuple[int, int]]) -> None:
    """Whatever was measured: neither a negative latency nor a negative bandwidth."""
    line = fit_line(samples)
    assert line is not None
    assert line.at_zero >= 0
    assert line.slope >= 0
    assert fit_line([]) is None


@given(alone=st.floats(1e3, 1e9), factor=st.floats(1.0, 2.9), share=st.floats(0.2, 1.0))
def test_a_slow_down_is_recovered(alone: float, factor: float, share: float) -> None:
    """A transfer of which the part `share` ran beside compute at 1 / factor of its speed."""
    beside = alone * (1 - share) + alone * share * factor
    assert transfer_factor(alone, beside, alone * share * factor) == pytest.approx(factor)
    assert compute_factor(alone, alone * factor) == pytest.approx(factor)


def test_noise_gives_no_speed_up() -> None:
    """Faster together than alone counts as not slowed down; a time of 0 as not measured."""
    assert transfer_factor(100, 90, 90) == 1.0
    assert transfer_factor(100, 200, 0) == 1.0
    assert compute_factor(100, 90) == 1.0
    assert compute_factor(100, 0) == 1.0
    assert transfer_factor(1, 1e6, 1e6) == compute_factor(1, 1e6) == 3.0


def test_overlap_effectiveness() -> None:
    """The published formula: 1 hides the shorter one, 0 nothing, below 0 is a loss."""
    assert overlap_effectiveness(10, 4, 10) == 1.0
    assert overlap_effectiveness(10, 4, 14) == 0.0
    assert overlap_effectiveness(10, 4, 16) == -0.5
    assert overlap_effectiveness(10, 0, 10) == 0.0


def test_lanes_that_slow_each_other_share_a_link() -> None:
    """Chains of sharing make one link; lanes that overlap have links of their own."""
    pairs = (
        Together("cp", "dp", 10, 10, 20),
        Together("cp", "tp", 10, 10, 10),
        Together("dp", "ep", 10, 10, 18),
    )
    links = shared_links(pairs)
    assert set(links) == {"cp", "dp", "ep"}
    assert len(set(links.values())) == 1
    assert shared_links(pairs[1:2]) == {}
