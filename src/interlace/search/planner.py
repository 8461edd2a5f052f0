"""Plan a phase, or a whole step, with a search chosen by name.

The head of a forward may run one phase ahead (decision 7): its length is chosen here too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from interlace.errors import InputError, nearest
from interlace.ir.actions import Direction, Share, Strand, labels_of, steady_phase, strands_of
from interlace.ir.costs import Contention, CostTable
from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.phases import phase_graph, whole_graph
from interlace.ir.plan import PhasePlan, Plan, check, without_heads
from interlace.ir.timeline import WAIT, Timeline
from interlace.old_words import present_search
from interlace.own_code import load_function
from interlace.schedules.finder import Schedule, of_strands
from interlace.search.contended import polish_contended
from interlace.search.evaluator import Evaluator
from interlace.search.list_scheduling import order_list
from interlace.search.memory import peak_bytes
from interlace.search.merge import order_merge, order_quick
from interlace.search.problem import MemoryLimits, Problem
from interlace.search.segment_pairs import order_segment_pairs
from interlace.search.tight import smallest_peak
from interlace.sim.lanes import simulate

MOST_HEADS = 6
"""Collectives of the forward graph behind which a head may end; a choice, about a layer and a
half."""
HEAD_BUDGET = 3_000
"""Operators ordered in total while choosing; a choice that bounds the time. A deep model, which
gains less from a head, takes the one that ends behind the second collective: the gather of the
first layer's input."""
AS_SHORT = 1.005
"""How many times as long as with the best head a phase may get, at most, for a head to count as
good as that one; a choice."""


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
    ends = [i + 1 for i, op in enumerate(forward.operators) if op.is_collective][:MOST_HEADS]
    size = len(forward.operators) + len(backward.operators)
    heads = (0, *ends)[: HEAD_BUDGET // size]
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
    return min((h for h, length in lengths.items() if length <= AS_SHORT * best), default=0)


Found = tuple[tuple[str, ...], tuple[str, ...]]
"""(order, operators that a barrier follows)."""


Rivals = Sequence[tuple[str, ...]]
"""Orders that other searches found."""


@dataclass(frozen=True, slots=True)
class Search:
    """A way to find an order."""

    find: Callable[[Problem, Rivals], Found]
    """Is given the orders of all others if it optimises."""
    optimises: bool = False
    """Whether it looks at memory, may run the head of the forward strand one phase ahead, and
    takes the order of another search where that is simulated to be shorter."""


def _merge(problem: Problem, rivals: Rivals) -> Found:
    return order_merge(problem, rivals[::-1]), ()  # of equally long ones the pairing


def _list(problem: Problem, _: Rivals) -> Found:
    return order_list(problem), ()


def _segment_pairs(problem: Problem, _: Rivals) -> Found:
    blocks = order_segment_pairs(problem)
    return blocks.order, blocks.barriers


SEARCHES: Mapping[str, Search] = {
    "merge": Search(_merge, optimises=True),
    "list": Search(_list),
    "segment_pairs": Search(_segment_pairs),
}
"""The searches of this package, by the name that a run file gives."""


def find_search(name: str) -> Search:
    """The search of this name, or a function of a user's own: `module:function`, from a Problem to
    the ids of all its operators in an order. What such a function gives is checked.

    Raises InputError if there is none."""
    if name in SEARCHES:
        return SEARCHES[name]
    if ":" not in name:
        raise InputError(
            f"unknown search {name!r}",
            hint=f"{nearest(name, SEARCHES)} A search of your own is 'module:function'.",
        )
    order_of = cast("Callable[[Problem], Sequence[str]]", load_function(name, "search"))

    def found(problem: Problem, _: Rivals) -> Found:
        order = tuple(order_of(problem))
        check(order, problem.graph, f"search {name!r}, phase {problem.graph.name!r}")
        return order, ()

    return Search(found)


NO_LIMITS = MemoryLimits()
"""Limits of a plan that may take any memory."""


def make_plan(
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    search: str,
    *,
    limits: MemoryLimits = NO_LIMITS,
    schedule: Schedule | None = None,
) -> Plan:
    """Plan every phase of a step. Deterministic: equal graphs and costs, equal plan.

    `graphs` are those of the strands; `schedule` is that of two strands if it is not given.
    `search` is a name or a user's own function (`find_search`). Raises InputError for an unknown
    search, or if a phase needs more than the bound of `limits`. `list`, `segment_pairs` and a
    user's own know no other limit than that."""
    search = present_search(search, "search")
    best = find_search(search).optimises
    schedule = schedule or of_strands(2)
    # A share beyond one strand is known of whole models only.
    aim = limits.aim(graphs) if best and schedule.is_alone else limits.bound_bytes

    def problem(graph: OpGraph) -> Problem:
        solo = costs.of(graph)
        return Problem(graph, solo, costs.issue_ns, aim, costs.contention)

    def phases(head: int) -> dict[str, PhasePlan]:
        return {
            name: plan_phase(problem(phase_graph(name, graphs, head)), search)
            for name in searched_phases(schedule.phases(graphs, head=bool(head)))
        }

    head = 0
    if best and schedule.is_alone:
        head = choose_head(graphs, schedule, lambda graph: _quickened(problem(graph)))
    try:
        planned = phases(head)
    except InputError:
        if not head:
            raise
        head, planned = 0, phases(0)  # a head keeps more values: the bound may allow none
    digest = whole_graph(graphs).digest
    return Plan(search, digest, costs.digest, schedule.name, planned, head)


def searched_phases(phases: Sequence[str]) -> list[str]:
    """Those that need an order of their own: a phase that is another one without heads runs in
    the order of that one."""
    headed = {without_heads(name) for name in phases if without_heads(name) != name}
    return [name for name in phases if name not in headed]


def plan_phase(problem: Problem, search: str | Search) -> PhasePlan:
    """The order that `search` finds. The same problem always gives the same order.

    Raises InputError for an unknown search, or if the order needs more memory than allowed.
    """
    chosen = search if isinstance(search, Search) else find_search(present_search(search, "search"))
    quick = _quickened(problem)
    others = [each for each in SEARCHES.values() if chosen.optimises and each != chosen]
    rivals = [each.find(quick, ()) for each in others]
    own = chosen.find(quick, [order for order, _ in rivals])
    candidates = [own, *(() if _leads(problem, own, rivals) else rivals)]
    fitting = [found for found in candidates if _fits(problem, found[0])]
    if not fitting:
        raise _too_large(problem, candidates[0][0])
    tried = [(_simulate(problem, *found), *found) for found in fitting]
    free = [each for each in tried if not each[2]]
    if chosen.optimises and problem.slowed and free:
        _, shortest, _ = min(free, key=_length_ns)
        moved = polish_contended(problem, shortest)
        tried.append((_simulate(problem, moved), moved, ()))
    timeline, order, barriers = min(tried, key=_length_ns)
    return PhasePlan(order, timeline.length_ns, timeline.exposed_ns(), barriers)


def _length_ns(tried: tuple[Timeline, tuple[str, ...], tuple[str, ...]]) -> int:
    return tried[0].length_ns


def _leads(problem: Problem, own: Found, rivals: Sequence[Found]) -> bool:
    """Whether an order without barriers fits and is as short as those of the others, as far as that
    is known without simulating them: barriers only make an order longer."""
    order, barriers = own
    if problem.slowed or barriers or not _fits(problem, order):
        return False
    world = Evaluator(problem.graph, problem.solo_ns, problem.issue_ns)
    return world.length_ns(order) <= min((world.length_ns(o) for o, _ in rivals), default=0)


def _fits(problem: Problem, order: tuple[str, ...]) -> bool:
    return not problem.memory_bytes or peak_bytes(problem.graph, order) <= problem.memory_bytes


def _too_large(problem: Problem, order: tuple[str, ...]) -> InputError:
    peak, (_, least) = peak_bytes(problem.graph, order), smallest_peak(problem)
    return InputError(
        f"phase {problem.graph.name!r} needs {peak:,} bytes for values of its graphs, "
        f"{peak - problem.memory_bytes:,} more than the bound of {problem.memory_bytes:,}",
        hint=f"allow {(mib := -(-least // 2**20))} MiB or more (plan.memory_mib of a run file, "
        f"compile_step(config=PlanConfig(memory_mib={mib}))), make micro-batches smaller, or set "
        "strands to 1",
    )


def _simulate(problem: Problem, order: tuple[str, ...], barriers: tuple[str, ...] = ()) -> Timeline:
    return simulate(
        problem.graph,
        order,
        problem.solo_ns,
        issue_ns=problem.issue_ns,
        contention=problem.contention,
        barriers=barriers,
    )


def _quickened(problem: Problem) -> Problem:
    """The same problem without contention, for searches that know none: lanes of one link become
    one lane, and every time is what it is in the simulation of a list schedule under contention.

    Transfers take what they do after a pause. With what each takes right behind another, a link
    that is about as busy as the processor looks busier, and then all orders are as good."""
    contention = problem.contention
    if contention is None:
        return problem
    rested = replace(problem, contention=replace(contention, behind_ns={}))
    times = problem.solo_ns
    if contention.factors:
        listed = order_list(problem)
        times = _lasting(problem, _simulate(rested, listed))
    return replace(
        problem, graph=_on_links(problem.graph, contention), solo_ns=times, contention=None
    )


def _lasting(problem: Problem, timeline: Timeline) -> dict[str, int]:
    """How long each operator took."""
    times = dict(problem.solo_ns)
    for span in timeline.spans:
        if span.kind == WAIT or span.name not in times:
            continue
        if span.lane == problem.graph.by_id[span.name].lane:
            times[span.name] = span.duration_ns
    return times


def _on_links(graph: OpGraph, contention: Contention) -> OpGraph:
    lanes = {op.lane for op in graph.collectives}
    if len({contention.link_of(lane) for lane in lanes}) == len(lanes):
        return graph
    operators = tuple(
        op if op.lane == COMPUTE_LANE else replace(op, lane=contention.link_of(op.lane))
        for op in graph.operators
    )
    return OpGraph(graph.name, operators, graph.inputs, graph.outputs)
