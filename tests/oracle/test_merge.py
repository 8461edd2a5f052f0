"""Proves that `merge` is exact on small graphs, and that no order beats the lower bound.

Brute force simulates all orders of pairs of strands of up to four operators each.
"""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from test_list_scheduling import best_ns

from interlace.ir.graph import OpGraph
from interlace.ir.plan import check
from interlace.search.bounds import lower_bound_ns
from interlace.search.chains import main_operators, split
from interlace.search.evaluator import Evaluator
from interlace.search.job_memory import Room
from interlace.search.memory import Liveness, peak_bytes
from interlace.search.merge import order_merge
from interlace.search.merge_chains import merge_chains
from interlace.search.polish import polish
from interlace.search.problem import Problem
from interlace.search.segment_pairs import (
    block_ns,
    legal,
    order_segment_pairs,
    pair_segments,
    segments,
)
from interlace.sim.lanes import simulate
from strategies import op_graphs, orders_of, pair_graphs, solo_times


def length_ns(problem: Problem, order: Sequence[str]) -> int:
    return simulate(problem.graph, order, problem.solo_ns, issue_ns=problem.issue_ns).length_ns


@settings(max_examples=1000, deadline=None)
@given(
    data=st.data(),
    graph=st.one_of(op_graphs(operators=(1, 6)), pair_graphs(operators=(1, 3))),
    issue_ns=st.integers(0, 3),
)
def test_merge_is_the_optimum_of_small_graphs(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """Equal to brute force over every order; the bound is below both."""
    problem = Problem(graph, data.draw(solo_times(graph)), issue_ns)
    order = order_merge(problem)
    check(order, graph, "plan")
    optimum = best_ns(graph, problem.solo_ns, issue_ns)
    assert length_ns(problem, order) == optimum
    assert lower_bound_ns(problem) <= optimum


@settings(max_examples=25, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(4, 14)), issue_ns=st.integers(0, 3))
def test_larger_plans_are_sound(data: st.DataObject, graph: OpGraph, issue_ns: int) -> None:
    """Valid, between the bound and any random order, and the same every time."""
    problem = Problem(graph, data.draw(solo_times(graph)), issue_ns)
    order = order_merge(problem)
    check(order, graph, "plan")
    assert order == order_merge(problem)
    rival = data.draw(orders_of(graph))
    assert lower_bound_ns(problem) <= length_ns(problem, order) <= length_ns(problem, rival)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(1, 8)), issue_ns=st.integers(0, 3))
def test_the_evaluator_agrees_with_the_simulator(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """On any order; and polishing never makes one longer."""
    problem = Problem(graph, data.draw(solo_times(graph)), issue_ns)
    order = data.draw(orders_of(graph))
    evaluator = Evaluator(graph, problem.solo_ns, issue_ns)
    found = evaluator.length_ns(order)
    assert found == length_ns(problem, order)
    better = polish(evaluator, evaluator.numbers(order), evaluations=2000)
    check(evaluator.order(better), graph, "polished")
    assert length_ns(problem, evaluator.order(better)) <= found


@settings(max_examples=100, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(1, 8)), issue_ns=st.integers(0, 3))
def test_merged_chains_hold_every_operator_once(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """In an order that respects dependencies, no longer than the merge announces."""
    problem = Problem(graph, data.draw(solo_times(graph)), issue_ns)
    chains = split(problem, data.draw(st.integers(1, 40)))
    values = Liveness(graph)
    limit = data.draw(st.none() | st.integers(0, sum(values.size)))
    room = None if limit is None else Room.within(limit, chains, values)
    reach = data.draw(st.integers(0, 3))
    merged = merge_chains(chains, graph.lanes[1:], width=8, reach=reach, room=room)
    if merged is None:
        assert room is not None
        return
    order, announced = merged
    assert {n for c in chains for p in c.pieces for n in p.operators} == main_operators(graph)
    check(order, graph, "merged")
    assert length_ns(problem, order) <= announced
    assert limit is None or peak_bytes(graph, order) <= limit


@settings(max_examples=1000, deadline=None)
@given(
    data=st.data(),
    graph=pair_graphs(operators=(1, 4)),
    issue_ns=st.integers(0, 3),
    parts=st.integers(1, 3),
    beside=st.booleans(),
    barrier_ns=st.integers(0, 2),
)
def test_the_published_search_is_the_best_monotone_pairing(
    data: st.DataObject, graph: OpGraph, issue_ns: int, parts: int, *, beside: bool, barrier_ns: int
) -> None:
    """Equal to brute force over all ways to pair the segments in order, and no operator comes
    before what it reads; the simulation takes as long."""
    problem = Problem(graph, data.draw(solo_times(graph)), issue_ns)
    first, second = segments(problem, parts, beside=beside)

    def block(*pair: tuple[str, ...]) -> int:
        return block_ns(problem, pair) + barrier_ns

    def best(i: int, j: int) -> int:
        if not i and not j:
            return 0
        found = []
        if i:
            found.append(best(i - 1, j) + block(first[i - 1]))
        if j:
            found.append(best(i, j - 1) + block(second[j - 1]))
        if i and j and legal(problem, first[i - 1], second[j - 1]):
            found.append(best(i - 1, j - 1) + block(first[i - 1], second[j - 1]))
        return min(found)

    blocks = pair_segments(problem, first, second, barrier_ns)
    assert blocks.length_ns == best(len(first), len(second))
    check(blocks.order, graph, "pairs")
    timeline = simulate(
        graph,
        blocks.order,
        problem.solo_ns,
        issue_ns=issue_ns,
        barriers=blocks.barriers,
        barrier_ns=barrier_ns,
    )
    assert timeline.length_ns == blocks.length_ns
    assert order_segment_pairs(problem).length_ns >= lower_bound_ns(problem)
