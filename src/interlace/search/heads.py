"""Choose how much of the forward strand runs one action ahead.

Without a head every phase starts and ends empty: both strands wait for their first collective
at once, and the last collectives have nothing to run under. With a head that ends with a
collective, one strand computes while the other communicates from the first operator of a phase on
(modulo scheduling with the micro-batch as the iteration). A larger head keeps more values of
the next micro-batch, so among heads that are about as good the smallest is taken.
"""

from collections.abc import Callable, Mapping

from interlace.ir.actions import Direction, Share, Strand, labels_of, steady_phase, strands_of
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.schedules.finder import Schedule
from interlace.search.evaluator import Evaluator
from interlace.search.merge import order_quick
from interlace.search.problem import Problem

HEADS = 6
"""Collectives of the forward graph behind which a head may end: about a layer and a half."""
BUDGET = 3_000
"""Operators ordered in total while choosing. A deep model, which gains less from a head, takes the
one that ends behind the second collective: the gather of the first layer's input."""
NO_LONGER = 1.005
"""A head counts as good as the best one if the phase gets at most so many times as long."""


def choose_head(
    graphs: Mapping[str, OpGraph], schedule: Schedule, problem_of: Callable[[OpGraph], Problem]
) -> int:
    """Operators of the forward graph, in its own order, that should run one action ahead; 0 for
    none. `graphs` are those of the strands. Only of a rank with one chunk, and of a schedule that
    runs forward and backward side by side."""
    forwards = labels_of(graphs, Direction.FORWARD, Share.WHOLE)
    steady = steady_phase(schedule.phases(graphs, head=True))
    if len(forwards) > 1 or len(strands_of(steady)) < 2:
        return 0
    forward, backward = graphs[forwards[0]], graphs[Strand(Direction.BACKWARD).graph]
    ends = [i + 1 for i, op in enumerate(forward.operators) if op.is_collective][:HEADS]
    size = len(forward.operators) + len(backward.operators)
    heads = (0, *ends)[: BUDGET // size]
    if len(heads) < 2:
        return ends[1] if len(ends) > 1 else 0
    whole = steady_phase(schedule.phases(graphs))
    lengths = {}
    for head in heads:
        problem = problem_of(phase_graph(steady if head else whole, graphs, head))
        order = order_quick(problem)
        if order is not None:
            world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
            lengths[head] = world.length(world.numbers(order))[0]
    best = min(lengths.values(), default=0)
    return min((h for h, length in lengths.items() if length <= NO_LONGER * best), default=0)
