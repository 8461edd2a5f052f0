"""What a plan is predicted to give: time, exposed communication, memory, distance to the bound."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from interlace.errors import InputError
from interlace.ir.costs import CostTable
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.old_words import present_search
from interlace.schedules.finder import sequential
from interlace.search.bounds import lower_bound_ns
from interlace.search.memory import peak_bytes, step_peak_bytes
from interlace.search.planner import SEARCHES, make_plan
from interlace.search.problem import MemoryLimits, Problem
from interlace.search.step_bounds import step_bound_ns
from interlace.sim.expected_step import expected_step_ns
from interlace.sim.lanes import simulate
from interlace.sim.simulated_step import simulate_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Predictions for one phase, or for a whole step."""

    predicted_ns: int
    exposed_ns: int
    communication_ns: int
    """Time in which links are busy, summed over them."""
    bound_ns: int
    """A certified lower bound on the time of any order."""
    peak_bytes: int
    """Largest sum of values that the graphs hold at one time; weights are not among them."""

    @property
    def hidden_fraction(self) -> float:
        """1 - exposed / communication; 1 when nothing is communicated."""
        if not self.communication_ns:
            return 1.0
        return 1.0 - min(1.0, self.exposed_ns / self.communication_ns)

    @property
    def over_bound(self) -> float:
        """By which fraction the predicted time exceeds the bound, at most."""
        return self.predicted_ns / self.bound_ns - 1 if self.bound_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Predictions for a plan: each phase by itself, and a step of several micro-batches."""

    plan: Plan
    micro_batches: int
    phases: Mapping[str, Figures]
    step: Figures
    timelines: Mapping[str, Timeline]
    """Of each phase by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What searches give for one run."""

    chosen: str
    """The search whose plan the run takes."""
    searches: Mapping[str, PlanFigures]
    refused: Mapping[str, str]
    """Searches that gave no plan, and why."""
    one_strand: PlanFigures
    constant_bytes: Mapping[str, int]
    """What a rank holds beside values: weights, gradient sums, optimizer state."""

    @property
    def best(self) -> PlanFigures:
        """Figures of the chosen plan."""
        return self.searches[self.chosen]

    def extra_memory(self, name: str) -> float:
        """By which fraction the peak of values is above that of one strand."""
        one = self.one_strand.step.peak_bytes
        return self.searches[name].step.peak_bytes / max(1, one) - 1

    def extra_of_all_memory(self, name: str) -> float:
        """The same bytes as a fraction of all that one strand needs."""
        one = self.one_strand.step.peak_bytes
        everything = sum(self.constant_bytes.values()) + one
        return (self.searches[name].step.peak_bytes - one) / max(1, everything)

    def speed_up(self, name: str) -> float:
        """How many times shorter the step is than with one strand."""
        one = self.one_strand.step.predicted_ns
        return one / max(1, self.searches[name].step.predicted_ns)


def compare_searches(
    graphs: Mapping[str, OpGraph],
    costs: CostTable,
    *,
    chosen: str,
    micro_batches: int,
    limits: MemoryLimits,
    constant_bytes: Mapping[str, int],
    stage: Callable[[str], AbstractContextManager[None]],
    every: bool = False,
) -> Comparison:
    """Plan with the chosen search and with one strand, with `every` by all searches of ours too;
    `stage` is entered with a few words around each long part.

    Raises InputError if the chosen search gives no plan within `limits`.
    """
    chosen = present_search(chosen, "search")
    searches: dict[str, PlanFigures] = {}
    refused: dict[str, str] = {}
    for name in dict.fromkeys((*(SEARCHES if every else ()), chosen)):
        with stage(f"search {name}"):
            try:
                plan = make_plan(graphs, costs, name, limits=limits)
            except InputError as error:
                if name == chosen or not limits.bound_bytes:
                    raise
                refused[name] = error.message
                continue
            searches[name] = plan_figures(plan, graphs, costs, micro_batches)
    with stage("one strand"):
        alone = plan_figures(sequential(graphs), graphs, costs, micro_batches)
    return Comparison(
        chosen=chosen,
        searches=searches,
        refused=refused,
        one_strand=alone,
        constant_bytes=constant_bytes,
    )


def plan_figures(
    plan: Plan, strands: Mapping[str, OpGraph], costs: CostTable, micro_batches: int
) -> PlanFigures:
    """Simulate `plan` phase by phase and as a whole step."""
    phases, timelines = {}, {}
    for name, phase in plan.phases.items():
        graph = phase_graph(name, strands, plan.head)
        solo = costs.of(graph)
        problem = Problem(graph, solo, costs.issue_ns, contention=costs.contention)
        timelines[name] = simulate(
            graph,
            phase.order,
            solo,
            issue_ns=costs.issue_ns,
            contention=costs.contention,
            barriers=phase.barriers,
            label=name,
        )
        peak = peak_bytes(graph, phase.order)
        phases[name] = _figures(timelines[name], lower_bound_ns(problem), peak)
    peak = step_peak_bytes(plan, strands, micro_batches=micro_batches)
    step = simulate_step(plan, strands, costs, micro_batches, brief=True)
    expected = expected_step_ns(plan, strands, costs, micro_batches, of_means_ns=step.length_ns)
    bound = step_bound_ns(strands, costs, micro_batches)
    return PlanFigures(
        plan=plan,
        micro_batches=micro_batches,
        phases=phases,
        step=replace(_figures(step, bound, peak), predicted_ns=round(expected)),
        timelines=timelines,
    )


def _figures(timeline: Timeline, bound_ns: int, peak: int) -> Figures:
    return Figures(
        predicted_ns=timeline.length_ns,
        exposed_ns=timeline.exposed_ns(),
        communication_ns=timeline.communication_ns(),
        bound_ns=bound_ns,
        peak_bytes=peak,
    )
