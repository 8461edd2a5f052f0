"""Proves that plans respect a memory bound whenever some order does, at no avoidable cost.

Brute force looks at all orders of graphs of up to six operators.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from test_list_scheduling import all_orders
from test_merge import length_ns

from interlace.ir.graph import OpGraph
from interlace.ir.plan import check
from interlace.search.evaluator import Evaluator
from interlace.search.memory import Alive, Liveness, peak_bytes, peak_of
from interlace.search.merge import order_merge
from interlace.search.polish import Moves, lower_peak, polish
from interlace.search.problem import Problem
from interlace.search.tight import smallest_peak
from interlace.search.window import Windowed
from interlace.search.window_memory import WindowedMemory
from strategies import op_graphs, orders_of, pair_graphs, solo_times

SMALL = st.one_of(op_graphs(operators=(1, 6)), pair_graphs(operators=(1, 3)))


@settings(max_examples=500, deadline=None)
@given(data=st.data(), graph=SMALL, issue_ns=st.integers(0, 3))
def test_a_bounded_plan_is_the_shortest_that_fits(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """Whenever an order fits, the plan does, and none that fits is shorter. The smallest peak is
    that of all orders."""
    solo_ns = data.draw(solo_times(graph))
    orders = list(all_orders(graph))
    peaks = [peak_bytes(graph, order) for order in orders]
    bound = data.draw(st.sampled_from(sorted(set(peaks)))) - data.draw(st.integers(0, 1))
    problem = Problem(graph, solo_ns, issue_ns, memory_bytes=max(1, bound))
    order = order_merge(problem)
    check(order, graph, "plan")
    lowest, peak = smallest_peak(problem)
    assert peak == peak_bytes(graph, lowest) == min(peaks)
    fitting = [o for o, used in zip(orders, peaks, strict=True) if used <= problem.memory_bytes]
    if fitting:
        assert peak_bytes(graph, order) <= problem.memory_bytes
        best = min(length_ns(problem, fitting_order) for fitting_order in fitting)
        assert length_ns(problem, order) == best
    else:
        assert peak_bytes(graph, order) == peak > problem.memory_bytes


@settings(max_examples=40, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(6, 20)), issue_ns=st.integers(0, 3))
def test_larger_plans_fit_where_the_lowest_peak_does(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """And a bound that does not bind does not change the plan."""
    solo_ns = data.draw(solo_times(graph))
    free = order_merge(Problem(graph, solo_ns, issue_ns))
    most = peak_bytes(graph, free)
    least = smallest_peak(Problem(graph, solo_ns, issue_ns))[1]
    bound = data.draw(st.integers(min(least, most), most))
    bounded = Problem(graph, solo_ns, issue_ns, memory_bytes=max(1, bound))
    order = order_merge(bounded)
    check(order, graph, "plan")
    assert peak_bytes(graph, order) <= bounded.memory_bytes
    if bounded.memory_bytes >= most:
        assert order == free


@settings(max_examples=150, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(2, 12)), issue_ns=st.integers(0, 3))
def test_a_changed_window_counts_like_the_whole_order(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """Length, waits and bytes alive at every position, after any number of moves made or not."""
    world = Evaluator(graph, data.draw(solo_times(graph)), issue_ns)
    values = Liveness(graph)
    current = Windowed(world, world.numbers(data.draw(orders_of(graph))))
    memory = WindowedMemory(values, current, data.draw(st.integers(0, 2**41)))
    everywhere = list(range(len(graph.operators)))
    moves = Moves(current, random.Random(data.draw(st.integers(0, 99))), lambda: everywhere)
    for _ in range(25):
        low, window = moves.draw()
        if window:
            moved = current.order.copy()
            moved[low : low + len(window)] = window
            check(world.order(moved), graph, "moved")
            change, attempt = memory.attempt(low, window), current.attempt(low, window)
            assert attempt.length == world.length(moved)[0]
            if data.draw(st.booleans()):
                memory.keep(change)
                current.keep(attempt)
            else:
                current.drop(attempt)
    assert (current.length, current.waits()) == world.length(current.order)
    alive = Alive(values)
    assert memory.during == [alive.issue(i) for i in current.order]
    assert memory.excess == sum(max(0, used - memory.bound) for used in memory.during)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(2, 12)), issue_ns=st.integers(0, 3))
def test_polishing_never_makes_memory_worse(
    data: st.DataObject, graph: OpGraph, issue_ns: int
) -> None:
    """Below a bound it stays below; and a lower peak costs no time."""
    world = Evaluator(graph, data.draw(solo_times(graph)), issue_ns)
    values = Liveness(graph)
    order = world.numbers(data.draw(orders_of(graph)))
    length, peak = world.length(order)[0], peak_of(values, order)
    polished = polish(world, order, evaluations=2000, values=values, bound=peak)
    assert peak_of(values, polished) <= peak
    assert world.length(polished)[0] <= length
    lower = lower_peak(world, order, values, evaluations=2000, longest_ns=length)
    assert peak_of(values, lower) <= peak
    assert world.length(lower)[0] <= length
    check(world.order(lower), graph, "lower")
