"""Proves that the formulas for decomposed collectives are what the simulator makes of the pieces.

Each test builds the graph that one rank would run, piece by piece, and simulates it in its order.
Ranks are alike, so a rank's receive ends when its own send does.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.sim.decomposed import (
    by_expert_ns,
    compute_only_ns,
    decomposed_ns,
    overhead_ns,
    slicing_ns,
    vanilla_ns,
)
from interlace.sim.lanes import simulate

RATIOS = (0, 60, 100, 101, 130, 400)
"""Time of a transfer while a slice computes in 100 ns."""
RANKS = st.integers(1, 8)
PIECES = st.integers(1, 5)
TIMES = st.integers(0, 10_000)


class Pieces:
    """A graph under construction, and how long its operators take."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.times: dict[str, int] = {}

    def add(self, name: str, kind: Kind, time_ns: int, *inputs: str, lane: str = "tp") -> str:
        self.operators.append(
            Operator(
                id=name,
                kind=kind,
                target="t",
                lane=COMPUTE_LANE if kind in (Kind.MATMUL, Kind.ELEMENTWISE) else lane,
                inputs=inputs,
                reads=(),
                key=name,
                bytes_in=8,
                bytes_out=8,
                flops=0,
            )
        )
        self.times[name] = time_ns
        return name

    def length_ns(self) -> int:
        graph = OpGraph("forward", tuple(self.operators), (), ())
        return simulate(graph, graph.order, self.times).length_ns


def gather_ring(compute_ns: int, transfer_ns: int, ranks: int, pieces: int) -> Pieces:
    """Own slices first; what has arrived is sent on before it is computed with."""
    made = Pieces()
    for step in range(ranks):
        arrived = [[f"send {step - 1} {p}"] if step else [] for p in range(pieces)]
        for p in range(pieces):
            if step == 0 and ranks > 1:
                made.add(f"send 0 {p}", Kind.SEND, transfer_ns)
        for p in range(pieces):
            if 0 < step < ranks - 1:
                made.add(f"send {step} {p}", Kind.SEND, transfer_ns, *arrived[p])
            made.add(f"mm {step} {p}", Kind.MATMUL, compute_ns, *arrived[p])
    return made


def scatter_ring(
    compute_ns: int, transfer_ns: int, ranks: int, pieces: int, *, straight: bool = False
) -> Pieces:
    """Own slices last. Around the ring sums travel; `straight` to the owner, who adds at the
    end."""
    made = Pieces()
    for step in range(ranks):
        for p in range(pieces):
            result = made.add(f"mm {step} {p}", Kind.MATMUL, compute_ns)
            if step and not straight:
                received = f"send {step - 1} {p}"
                result = made.add(f"add {step} {p}", Kind.ELEMENTWISE, 0, result, received)
            if step < ranks - 1:
                made.add(f"send {step} {p}", Kind.SEND, transfer_ns, result)
    if straight:
        for op in [op for op in made.operators if op.kind is Kind.SEND]:
            made.add(f"add {op.id}", Kind.ELEMENTWISE, 0, op.id)
    return made


def scatter_both_ways(half_compute_ns: int, half_transfer_ns: int, ranks: int) -> Pieces:
    """Half-slices travel in opposite directions, each on links of its own."""
    made = Pieces()
    for step in range(ranks):
        for way in ("right", "left"):
            result = made.add(f"mm {step} {way}", Kind.MATMUL, half_compute_ns)
            if step:
                received = f"send {step - 1} {way}"
                result = made.add(f"add {step} {way}", Kind.ELEMENTWISE, 0, result, received)
            if step < ranks - 1:
                made.add(f"send {step} {way}", Kind.SEND, half_transfer_ns, result, lane=way)
    return made


@pytest.mark.parametrize("transfer_ns", RATIOS)
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_formula_is_what_the_pieces_take(ranks: int, pieces: int, transfer_ns: int) -> None:
    """Gather and scatter, around the ring and straight: all exactly t_c + max(...)."""
    expected = decomposed_ns(100, transfer_ns, ranks=ranks, pieces=pieces)
    assert gather_ring(100, transfer_ns, ranks, pieces).length_ns() == expected
    assert scatter_ring(100, transfer_ns, ranks, pieces).length_ns() == expected
    straight = scatter_ring(100, transfer_ns, ranks, pieces, straight=True)
    assert straight.length_ns() == expected


@given(RANKS, PIECES, TIMES, TIMES)
def test_any_times_fit_the_formula(
    ranks: int, pieces: int, compute_ns: int, transfer_ns: int
) -> None:
    """Also at random, with compute or transfers that take no time."""
    expected = decomposed_ns(compute_ns, transfer_ns, ranks=ranks, pieces=pieces)
    assert gather_ring(compute_ns, transfer_ns, ranks, pieces).length_ns() == expected
    assert scatter_ring(compute_ns, transfer_ns, ranks, pieces).length_ns() == expected


@pytest.mark.parametrize("transfer_ns", RATIOS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_two_directions_halve_the_transfers(ranks: int, transfer_ns: int) -> None:
    """With links of their own: a slice of 200 ns may be sent for 400 ns and still be hidden."""
    made = scatter_both_ways(100, transfer_ns, ranks)
    formula = decomposed_ns(200, 2 * transfer_ns, ranks=ranks, bidirectional=True)
    assert made.length_ns() == formula
    assert decomposed_ns(200, 400, ranks=ranks, bidirectional=True) == ranks * 200


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("transfer_ns", [0, 400, 800, 1600])
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_slicing_leaves_one_collective_alone(
    ranks: int, transfer_ns: int, slices: int
) -> None:
    """A pipeline of k: the last reduce-scatter is a tail, the first all-gather a head."""
    compute, transfer = ranks * 800 // slices, (ranks - 1) * transfer_ns // slices
    tail, head = Pieces(), Pieces()
    for k in range(slices):
        made = tail.add(f"mm {k}", Kind.MATMUL, compute)
        tail.add(f"scatter {k}", Kind.REDUCE_SCATTER, transfer, made)
        head.add(f"gather {k}", Kind.ALL_GATHER, transfer)
    for k in range(slices):
        head.add(f"mm {k}", Kind.MATMUL, compute, f"gather {k}")
    expected = slicing_ns(800, transfer_ns, ranks=ranks, slices=slices)
    assert tail.length_ns() == expected
    assert head.length_ns() == expected
    if slices == 1:
        assert expected == vanilla_ns(800, transfer_ns, ranks=ranks)


@given(RANKS, PIECES, TIMES, TIMES)
def test_no_way_beats_its_lanes_and_none_loses_to_vanilla(
    ranks: int, pieces: int, compute_ns: int, transfer_ns: int
) -> None:
    """Between the longer lane and both lanes in turn; slices * pieces add up."""
    ours = decomposed_ns(compute_ns, transfer_ns, ranks=ranks, pieces=pieces)
    alone = compute_only_ns(compute_ns, ranks=ranks, pieces=pieces)
    assert max(alone, (ranks - 1) * pieces * transfer_ns) <= ours
    assert ours <= vanilla_ns(compute_ns, transfer_ns, ranks=ranks, pieces=pieces)


def test_overhead_is_what_compute_does_not_cover() -> None:
    """N = 4: 3 * (150 - 100) are exposed; filler takes its share; at t_p <= t_c nothing is."""
    assert overhead_ns(100, 150, ranks=4) == 150
    assert overhead_ns(100, 150, ranks=4, filler_ns=60) == 90
    assert overhead_ns(100, 150, ranks=4, filler_ns=200) == 0
    assert overhead_ns(100, 100, ranks=4) == 0
    assert overhead_ns(100, 150, ranks=4, bidirectional=True) == 0
    assert slicing_ns(100, 100, ranks=4, slices=8) - 400 == pytest.approx(300 / 8, abs=1)


@pytest.mark.parametrize(
    "arguments", [{"ranks": 0}, {"ranks": 2, "pieces": 0}, {"ranks": 2, "compute_ns": -1}]
)
def test_times_and_counts_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    """A caller's mistake ends at once, not in a time."""
    known: dict[str, Any] = {"compute_ns": 1, "transfer_ns": 1, **arguments}
    with pytest.raises(AssertionError):
        decomposed_ns(**known)


@pytest.mark.parametrize(
    ("compute_ns", "exchange_ns", "groups", "expected"),
    [
        (100, 40, 1, 180),  # nothing beside anything
        (50, 20, 2, 20 + 100 + 20),  # compute hides all but the first and the last exchange
        (20, 50, 2, 4 * 50),  # the link is never idle
        (30, 30, 4, 8 * 30),
        (0, 10, 3, 60),
    ],
)
def test_groups_of_experts_follow_each_other(
    compute_ns: int, exchange_ns: int, groups: int, expected: int
) -> None:
    """One exchange at a time; a group computes when its rows are there."""
    assert by_expert_ns(compute_ns, exchange_ns, groups=groups) == expected
