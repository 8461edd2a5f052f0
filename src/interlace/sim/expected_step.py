"""How long a step takes on average, where the times of its operators vary.

A step in which every operator takes its average is shorter than the average step: where a transfer
is late, or what runs beside it, the rank waits, and gets nothing back where one is early.
"""

from collections.abc import Mapping
from random import Random
from statistics import NormalDist, fmean

from interlace.ir.costs import CostTable
from interlace.ir.graph import Operator, OpGraph
from interlace.ir.plan import Plan
from interlace.sim.simulated_step import simulate_step

STEPS = 4
"""How many are drawn; a choice. Each is the sum of thousands of times, so they differ little."""
_QUARTILES = 2 * NormalDist().inv_cdf(0.75)
"""Interquartile range of a normal distribution, in standard deviations; of a gamma distribution
about as much."""


def expected_step_ns(
    plan: Plan,
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    micro_batches: int,
    *,
    of_means_ns: int | None = None,
) -> float:
    """Mean length of simulated steps, in ns. Every operator that is run takes a time from a gamma
    distribution, which has nothing below 0, with the mean that was measured for its key and the
    standard deviation of a normal one with the measured interquartile range; times that were
    computed do not vary. Equal input gives an equal result.

    A step's length is a convex function of the times (sums, and the later of two), so by Jensen's
    inequality its mean is not below the length for mean times, `of_means_ns`, which is simulated if
    it is not given, and is the result where the draws come out shorter."""
    draw = Random(0)

    def drawn(op: Operator, ns: int) -> int:
        cost = costs.operators.get(op.key)
        if cost is None or not cost.spread_ns or not ns:
            return ns
        variance = (cost.spread_ns / _QUARTILES) ** 2
        return round(draw.gammavariate(ns * ns / variance, variance / ns))

    if of_means_ns is None:
        of_means_ns = simulate_step(plan, graphs, costs, micro_batches, brief=True).length_ns
    if not any(cost.spread_ns for cost in costs.operators.values()):
        return of_means_ns
    steps = (simulate_step(plan, graphs, costs, micro_batches, drawn=drawn) for _ in range(STEPS))
    return max(of_means_ns, fmean(step.length_ns for step in steps))
