"""Proves that no order beats the lower bound where compute and transfers slow each other down.

Brute force simulates all orders of pairs of strands of up to three operators under contention.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from test_list_scheduling import all_orders

from interlace.ir.costs import Contention
from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.search.bounds import contention_bound_ns, lower_bound_ns
from interlace.search.problem import Problem
from interlace.sim.lanes import simulate
from strategies import LINKS, pair_graphs, solo_times

_FACTORS = st.sampled_from((1.0, 1.1, 1.5, 2.0, 3.0))


@st.composite
def contentions(draw: st.DrawFn, graph: OpGraph) -> Contention:
    """Slow-downs for some pairs of kinds; the links may be one, or their queues."""
    kinds = sorted({op.kind for op in graph.operators})
    pairs = [(k, c) for k in kinds for c in kinds if k not in COLLECTIVES and c in COLLECTIVES]
    chosen = [pair for pair in pairs if draw(st.integers(0, 3))]
    factors = {pair: (draw(_FACTORS), draw(_FACTORS)) for pair in chosen}
    keys = sorted({op.key for op in graph.collectives})
    return Contention(
        factors,
        dict.fromkeys(LINKS, "cable") if draw(st.booleans()) else {},
        {LINKS[1]: LINKS[0]} if draw(st.booleans()) else {},
        {key: draw(st.sampled_from((0, 1, 100))) for key in keys},
    )


@settings(max_examples=400, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(1, 3)), issue_ns=st.integers(0, 3))
def test_no_order_beats_the_bound_under_contention(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """And contention never makes the bound smaller."""
    solo_ns = data.draw(solo_times(graph, longest_ns=1000))
    contention = data.draw(contentions(graph))
    problem = Problem(graph, solo_ns, issue_ns, contention=contention)
    best = min(
        simulate(graph, order, solo_ns, issue_ns=issue_ns, contention=contention).length_ns
        for order in all_orders(graph)
    )
    assert lower_bound_ns(replace(problem, contention=None)) <= lower_bound_ns(problem) <= best


def test_a_link_that_stops_for_compute_cannot_be_hidden() -> None:
    """1 ms of matmul at half its speed beside 1 ms of gather at 1/1.5 of its: the gather takes
    1.5 ms, in which 0.75 ms of the matmul are done, and 0.25 ms of matmul follow.
    """

    def operator(name: str, kind: Kind, lane: str) -> Operator:
        return Operator(name, kind, "t", lane, (), (), name, 0, 0, 0)

    mm = operator("mm", Kind.MATMUL, COMPUTE_LANE)
    gather = operator("gather", Kind.ALL_GATHER, "tp")
    graph = OpGraph("forward", (gather, mm), (), ())
    contention = Contention({(Kind.MATMUL, Kind.ALL_GATHER): (2.0, 1.5)}, {})
    problem = Problem(graph, {"mm": 10**6, "gather": 10**6}, contention=contention)
    best = simulate(graph, graph.order, problem.solo_ns, contention=contention).length_ns
    assert best == 1_750_000
    assert 0.99 * best < contention_bound_ns(problem) <= best
