"""A lower bound that knows how much compute and transfers slow each other down.

Let W_k be the work of compute kind k, W their sum, I the time spent issuing, C_c the work of one
link in collectives of kind c, C their sum, and y_kc the part of W_k that is done while a transfer
of kind c is under way. That takes a_kc times as long as alone, or longer, and the link meanwhile
does at most 1/b_kc of what it could. So the length T of any order obeys

    T >= W + I + sum of y_kc (a_kc - 1)                 the compute lane is busy for so long,
    T >= C + sum of y_kc a_kc (1 - 1/b_kc)              the link is busy for so long,
    T >= W + C + sum of y_kc (a_kc - 1 - a_kc / b_kc)   both together, less what coincides,
    sum over c of y_kc <= W_k.

Weights p, q, r >= 0 that add up to 1 combine the first three lines into one, whose minimum over y
is a sum over kinds. The same holds with z_kc, the part of C_c that is done beside kind k, for y_kc:
a and b change places in the sums. Any weights give a valid bound, so a grid of weights is tried.
"""

from collections.abc import Iterable
from itertools import product

import numpy as np

from interlace.ir.graph import COMPUTE_LANE, Kind, Operator
from interlace.search.problem import Problem

PARTS = 40
"""Weights are multiples of 1 / PARTS."""
ROUNDING_NS = 2e-3
"""What a simulated operator may lose to rounding."""


def contention_bound_ns(problem: Problem) -> int:
    """The largest such bound over links; 0 without contention."""
    contention = problem.contention
    if contention is None or not contention.factors:
        return 0
    links: dict[str, list[Operator]] = {}
    for op in problem.graph.collectives:
        links.setdefault(contention.links.get(op.lane, op.lane), []).append(op)
    compute = [op for op in problem.graph.operators if op.lane == COMPUTE_LANE]
    bounds = [_link_bound_ns(problem, compute, own) for own in links.values()]
    lost = 1 + ROUNDING_NS * len(problem.graph.operators)
    return max(0, int(max(bounds, default=0) - lost))


def _link_bound_ns(problem: Problem, compute: list[Operator], collectives: list[Operator]) -> float:
    contention = problem.contention
    assert contention is not None
    work, transfer = _by_kind(problem, compute), _by_kind(problem, collectives)
    if not work or not transfer:
        return 0
    pairs = [contention.factors.get(pair, (1.0, 1.0)) for pair in product(work, transfer)]
    shape = (len(work), len(transfer))
    a = np.array([factors[0] for factors in pairs]).reshape(shape)
    b = np.array([factors[1] for factors in pairs]).reshape(shape)
    of_kind, of_link = np.array(list(work.values())), np.array(list(transfer.values()))
    total, link = of_kind.sum(), of_link.sum()
    issuing = problem.issue_ns * len(problem.graph.collectives)
    weights = np.array(
        [(p, q, PARTS - p - q) for p in range(PARTS + 1) for q in range(PARTS + 1 - p)]
    )
    p, q, r = (weights / PARTS).T
    fixed = p * (total + issuing) + q * link + r * (total + link)
    slope = p[:, None, None] * (1 - 1 / a) + q[:, None, None] * (1 - 1 / b)
    slope = slope + r[:, None, None] * (1 - 1 / a - 1 / b)
    by_compute = (np.minimum(0, (slope * a).min(axis=2)) * of_kind).sum(axis=1)
    by_link = (np.minimum(0, (slope * b).min(axis=1)) * of_link).sum(axis=1)
    return float((fixed + np.maximum(by_compute, by_link)).max())


def _by_kind(problem: Problem, operators: Iterable[Operator]) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for op in operators:
        found[op.kind] = found.get(op.kind, 0) + problem.solo_ns[op.id]
    return {kind: ns for kind, ns in found.items() if ns}
