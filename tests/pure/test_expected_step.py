"""The mean step of operators whose times vary, against what probability says of it."""

from math import pi, sqrt
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sim import graph

from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import OpGraph
from interlace.schedules.finder import sequential
from interlace.sim.expected_step import expected_step_ns
from interlace.sim.simulated_step import simulate_step
from strategies import op_graphs

NS, SIGMA = 1_000_000, 100_000
IQR = round(SIGMA * 2 * NormalDist().inv_cdf(0.75))


def table(graphs: dict[str, OpGraph], spread_ns: int) -> CostTable:
    operators = {op.key: cost_of(op, NS, spread_ns) for g in graphs.values() for op in g.operators}
    return CostTable(operators=operators, source="by hand")


def test_a_transfer_beside_compute_that_is_as_long() -> None:
    """Compute and transfer of 1 ms each that vary by 0.1 ms, both to be over before the next
    operator: the later of two normal times is sigma / sqrt(pi) behind their mean."""
    forward = graph(("a", "tp", ""), ("b", "compute", ""), ("c", "compute", "a"))
    graphs = {"forward": forward, "backward": OpGraph("backward", (), (), ())}
    plan, count = sequential(graphs), 400
    assert simulate_step(plan, graphs, table(graphs, IQR), count).length_ns == 2 * NS * count
    expected = expected_step_ns(plan, graphs, table(graphs, IQR), count)
    assert expected / count == pytest.approx(2 * NS + SIGMA / sqrt(pi), rel=0.005)


def test_one_after_the_other_takes_the_sum_of_means() -> None:
    """Nothing waits for anything, so late and early even out."""
    forward = graph(("a", "compute", ""), ("b", "compute", "a"))
    graphs = {"forward": forward, "backward": OpGraph("backward", (), (), ())}
    expected = expected_step_ns(sequential(graphs), graphs, table(graphs, IQR), 400)
    assert expected / 400 == pytest.approx(2 * NS, rel=0.005)


@given(data=st.data())
def test_times_that_do_not_vary_give_the_simulated_step(data: st.DataObject) -> None:
    """Whatever the graphs; and equal input gives an equal result where they do."""
    graphs = {name: data.draw(op_graphs(name=name)) for name in ("forward", "backward")}
    plan = sequential(graphs)
    fixed, varying = table(graphs, 0), table(graphs, IQR)
    simulated = simulate_step(plan, graphs, fixed, 3)
    assert expected_step_ns(plan, graphs, fixed, 3) == simulated.length_ns
    first = expected_step_ns(plan, graphs, varying, 3)
    assert first == expected_step_ns(plan, graphs, varying, 3)
    assert first > 0
