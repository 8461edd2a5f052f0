"""Plan one phase with a search chosen by name."""

from collections.abc import Callable

from interlace.errors import InputError, nearest
from interlace.ir.plan import PhasePlan
from interlace.search.chains import strand_of
from interlace.search.exact import order_exact
from interlace.search.list_scheduling import list_schedule
from interlace.search.memory import peak_bytes
from interlace.search.problem import Problem
from interlace.sim.strands import simulate

FORWARD = "forward"


def _list(problem: Problem) -> tuple[str, ...]:
    strands = {strand_of(op.id) for op in problem.graph.operators}
    scaled = FORWARD if FORWARD in strands else ""
    phase = list_schedule(
        problem.graph, problem.solo_ns, issue_ns=problem.issue_ns, scaled_strand=scaled
    )
    return phase.order


SEARCHES: dict[str, Callable[[Problem], tuple[str, ...]]] = {"exact": order_exact, "list": _list}


def plan_phase(problem: Problem, search: str) -> PhasePlan:
    """The order that `search` finds. The same problem always gives the same order.

    Raises InputError for an unknown search, or if the order needs more memory than allowed.
    """
    if search not in SEARCHES:
        raise InputError(f"unknown search {search!r}", hint=nearest(search, SEARCHES))
    order = SEARCHES[search](problem)
    peak = peak_bytes(problem.graph, order)
    if problem.memory_bytes and peak > problem.memory_bytes:
        raise InputError(
            f"phase {problem.graph.name!r} needs {peak:,} bytes for values of its graphs, "
            f"{peak - problem.memory_bytes:,} more than the bound of {problem.memory_bytes:,}",
            hint="raise the bound, lower train.micro_batch_size, or use one strand",
        )
    timeline = simulate(problem.graph, order, problem.solo_ns, issue_ns=problem.issue_ns)
    return PhasePlan(order, timeline.length_ns, timeline.exposed_ns())
