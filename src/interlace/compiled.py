"""From traced graphs to a plan, for `compile_step`, the trainer, `plan` and `profile` alike:

trace -> decompose -> share over data-parallel ranks      `trace_candidates` (runtime.candidates)
      -> costs -> which passes are decomposed -> plan     `Compilation`
      -> executor                                         `Step` (step)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from interlace.config import LinkConfig, OverlapConfig, PlanConfig
from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.hardware.cluster_costs import ClusterMachine, Groups
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan, read
from interlace.lab.links import link_label
from interlace.measure.cache import cached
from interlace.measure.machine import machine_id
from interlace.measure.start_up import profile_strands
from interlace.run_files import cache_directory
from interlace.runtime.candidates import Candidates, choose_passes
from interlace.runtime.executor import Batch
from interlace.runtime.traced_strands import Strands
from interlace.runtime.user_module import Constants
from interlace.schedules.finder import Schedule, sequential
from interlace.schedules.stage import StageSchedule
from interlace.search.planner import make_plan
from interlace.search.problem import MemoryLimits
from interlace.start_progress import at

_OTHER_GRAPH = "plan again for this model, layout and micro-batch size"
"""Hint where a plan was made for other graphs."""
_BY_TIMES = (
    "; slices follow from times measured at each start, unless overlap.decompose names a variant "
    "and overlap.pieces a number"
)
"""What is added to that hint where collectives are decomposed."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How plans are made."""

    plan: PlanConfig
    overlap: OverlapConfig
    limits: MemoryLimits


@dataclass(frozen=True, kw_only=True)
class StartUpTimes:
    """Times of graphs: on the cluster that `plan.cluster` names, or else on this machine, of an
    earlier run or measured now. Collective."""

    example: Batch
    """One micro-batch."""
    constants: Constants
    """Gradient sums among them are left alone."""
    plan: PlanConfig
    link: LinkConfig
    say: Callable[[str], None]
    """Takes a line for people, such as one about noisy times."""
    group: dist.ProcessGroup | None = None
    """The ranks that run these graphs; None for all of the job."""
    cluster: ClusterMachine | None = None
    """A rank of that cluster, by whose description times are computed and nothing is measured."""
    cuda_graph: bool = False
    """Whether the steps will be captured: kernels then do not wait for the host."""

    def __call__(self, strands: Strands) -> CostTable:
        """The table of these graphs, the same on all ranks, which see the same cluster file."""
        at("timing operators and collectives")
        if self.cluster is not None:
            return self.cluster.costs(strands.op_graphs)
        device = self.example[0].device.type
        issued = ", captured" if self.cuda_graph else ""
        machine = machine_id(device, link_label(self.link) + issued)
        return cached(
            cache_directory("costs") if self.plan.cache else None,
            machine,
            strands.digest,
            lambda: profile_strands(
                strands,
                self.example,
                device,
                self.constants,
                repeats=self.plan.profile_repeats,
                machine=machine,
                group=self.group,
                ahead=self.cuda_graph,
            ),
            say=self.say,
            group=self.group,
        )


def machine_of_plan(plan: PlanConfig, groups: Groups) -> ClusterMachine | None:
    """A rank of the cluster that `plan.cluster` names, whose lanes have these groups; None if times
    are to be measured. Raises InputError if there is no such cluster, or if it is too small."""
    return ClusterMachine(load_cluster(plan.cluster), groups) if plan.cluster else None


class Compilation:
    """Traced graphs on their way to steps. All steps made from it share its tables of times.

    `costs`, `chosen` and `plan` are collective where times are measured: ranks call them in the
    same order.
    """

    def __init__(
        self,
        candidates: Candidates,
        settings: StepSettings,
        times: Callable[[Strands], CostTable],
    ) -> None:
        """`times` gives the table of some graphs, as `StartUpTimes` does."""
        self.candidates = candidates
        self.tables: dict[str, CostTable] = {}
        """Times, by digest of the graphs."""
        self._settings = settings
        self._times = times

    def again(self, example: Batch) -> "Compilation":
        """The same, without times: they are measured anew, on this micro-batch."""
        times = self._times
        assert isinstance(times, StartUpTimes)
        plan = replace(times.plan, cache=False)
        return Compilation(
            self.candidates, self._settings, replace(times, example=example, plan=plan)
        )

    def costs(self, strands: Strands) -> CostTable:
        """Times of these graphs, found when they are first asked for. Where a step's ends have
        graphs of their own these are measured with the others, and all candidates share a table."""
        if strands.digest not in self.tables:
            ends = self.candidates.ends
            measured = strands if ends is None else self.candidates.whole
            if measured.digest not in self.tables:
                self.tables[measured.digest] = self._times(measured.measured)
            self.tables[strands.digest] = self.tables[measured.digest]
        return self.tables[strands.digest]

    def chosen(self, given: Plan | None = None) -> Strands:
        """The graphs that a step works on: those of the plan that is given, else the faster ones
        by measured times where there is a choice."""
        candidates = self.candidates
        if candidates.ends is None or self._settings.overlap.passes == "ends":
            return candidates.whole
        if given is not None:
            return candidates.made_for(given)
        return choose_passes(candidates, self.costs(candidates.whole), self._settings.limits)

    def given_plan(self) -> Plan | None:
        """The plan that the settings name a file of, if they do. Raises InputError if it cannot be
        read."""
        file = self._settings.plan.file
        return read(Path(file)) if file else None

    def checked(self, plan: Plan, strands: Strands) -> Plan:
        """`plan`, which was made for these graphs. Raises InputError if it was not."""
        if plan.graph_digest != strands.digest:
            raise InputError(
                f"the plan in {self._settings.plan.file!r} was made for graph "
                f"{plan.graph_digest}, and here is graph {strands.digest}",
                hint=_OTHER_GRAPH + (_BY_TIMES if strands.listing is not None else ""),
            )
        return plan

    def plan(self, strands: Strands, schedule: Schedule, search: str = "") -> Plan:
        """A plan by measured times; `search` is that of the settings if it is not given."""
        costs = self.costs(strands)
        at("planning the order")
        return make_plan(
            strands.op_graphs,
            costs,
            search or self._settings.plan.search,
            limits=self._settings.limits,
            schedule=schedule,
        )

    def scheduled(self, schedule: Schedule) -> tuple[Strands, Plan, Schedule]:
        """What a step by this schedule works on, its plan, that of a file if the settings name one,
        and the schedule for the chunks of this model. Nothing is measured for a stage of a pipeline
        where all ranks run one strand at a time."""
        given = self.given_plan()
        strands = self.chosen(given)
        if isinstance(schedule, StageSchedule):
            assert strands.handovers is not None
            schedule = schedule.with_edges(strands.handovers.edges)
        if given is not None:
            plan = given
        elif schedule.is_alone or schedule.interleaves:
            plan = self.plan(strands, schedule)
        else:
            plan = sequential(strands.op_graphs, schedule)
        return strands, self.checked(plan, strands), schedule
