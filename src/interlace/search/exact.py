"""Barrier-free search: best merge of the strands' main chains, fillers, then polish.

    1. split    each strand into a main chain and fillers (`chains`)
    2. merge    the chains by dynamic programming over their progress (`merge_chains`)
    3. fill     idle moments with weight gradients and other loose ends (`fill`)
    4. polish   the best few orders by moving single operators (`polish`)

Small problems are solved to proven optimality instead (`optimal`). Larger ones come with the
certified lower bound of `bounds`, so the gap to the optimum is known.
"""

from collections.abc import Sequence

from interlace.search.chains import split
from interlace.search.fill import insert_fillers
from interlace.search.list_scheduling import list_schedule
from interlace.search.memory import peak_bytes
from interlace.search.merge_chains import merge_chains
from interlace.search.optimal import order_optimal
from interlace.search.polish import Evaluator, polish
from interlace.search.problem import Problem

CUTS = (0.12, 0.25, 0.5)
"""Longest piece, as a share of the longest collective: how often strands may take turns."""
OVERSHOOTS = (0.0, 0.35, 0.8)
WIDTH = 4
MANY_PIECES = 200
"""Chains longer than this are merged within a band, since the grid grows with their product."""
BAND = 0.12
EVALUATIONS = 3_000_000
"""Polishing budget in operator evaluations, about a second of one core."""


def order_exact(problem: Problem) -> tuple[str, ...]:
    """The shortest order found that respects the memory bound, if any candidate does."""
    evaluator = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    listed = list_schedule(problem.graph, problem.solo_ns, issue_ns=problem.issue_ns)
    candidates = [*_candidates(problem), listed.order, problem.graph.order]
    allowed = [order for order in candidates if _fits(problem, order)] or candidates[-1:]

    def length(order: Sequence[str]) -> int:
        return evaluator.length([evaluator.number[name] for name in order])[0]

    best = min(allowed, key=length)
    if not problem.memory_bytes:
        proven = order_optimal(problem, best)
        if proven is not None:
            return proven
    polished = polish(
        problem.graph,
        best,
        problem.solo_ns,
        issue_ns=problem.issue_ns,
        evaluations=EVALUATIONS // max(1, len(best)),
    )
    return polished if _fits(problem, polished) else best


def _fits(problem: Problem, order: Sequence[str]) -> bool:
    return not problem.memory_bytes or peak_bytes(problem.graph, order) <= problem.memory_bytes


def _candidates(problem: Problem) -> list[tuple[str, ...]]:
    graph = problem.graph
    longest = max((problem.solo_ns[op.id] for op in graph.collectives), default=0)
    if not longest:
        return []
    found = []
    for cut in CUTS:
        chains, fillers = split(
            graph, problem.solo_ns, issue_ns=problem.issue_ns, longest_ns=int(cut * longest)
        )
        if len(chains) > 2:
            return []
        pieces = max(len(chain.pieces) for chain in chains)
        band = BAND if pieces > MANY_PIECES else 1.0
        main, _ = merge_chains(chains, graph.lanes[1:], width=WIDTH, band=band)
        found += [
            insert_fillers(
                graph, main, fillers, problem.solo_ns, issue_ns=problem.issue_ns, overshoot=share
            )
            for share in OVERSHOOTS
        ]
        if pieces > MANY_PIECES:
            break
    return found
