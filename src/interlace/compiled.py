"""One compiled step, for `compile_step`, for the trainer, for `plan` and `profile` alike:

trace -> decompose -> share over data-parallel ranks      `trace_candidates` (runtime.candidates)
      -> costs -> which passes are decomposed -> plan     `Compilation`
      -> executor                                         `CompiledStep`
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from interlace.config import LinkConfig, OverlapConfig, PlanConfig
from interlace.errors import InputError
from interlace.graphs.dropout import seeds_for
from interlace.ir.actions import Action
from interlace.ir.costs import CostTable
from interlace.ir.plan import Plan, read
from interlace.lab.links import link_label
from interlace.measure.cache import cached
from interlace.measure.machine import machine_id
from interlace.measure.start_up import profile_strands
from interlace.run_files import cache_directory
from interlace.runtime.candidates import Candidates, choose_passes
from interlace.runtime.executor import Batch
from interlace.runtime.recorder import Clock, Recorder, clock_for
from interlace.runtime.traced_strands import Strands
from interlace.schedules.finder import Schedule
from interlace.search.limits import MemoryLimits
from interlace.search.planner import make_plan

Constants = Mapping[tuple[str, str], Tensor]
"""What the graphs' inputs stand for, by (role, target): weights, buffers, gradient sums."""
_OTHER_GRAPH = "plan again for this model, layout and micro-batch size"
_BY_TIMES = (
    "; slices follow from times measured at each start, unless overlap.decompose names a variant "
    "and overlap.pieces a number"
)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How costs are measured and plans are made."""

    plan: PlanConfig
    overlap: OverlapConfig
    limits: MemoryLimits
    link: LinkConfig
    say: Callable[[str], None]
    """Takes a line for people, such as one about noisy times."""


class Compilation:
    """Traced graphs on their way to steps. All steps made from it share its measured times.

    `costs`, `chosen` and `plan` are collective: ranks call them in the same order.
    """

    def __init__(
        self, candidates: Candidates, example: Batch, constants: Constants, settings: StepSettings
    ) -> None:
        """`example` is one micro-batch; gradient sums in `constants` are left alone."""
        self.candidates = candidates
        self.tables: dict[str, CostTable] = {}
        """Measured times, by digest of the graphs."""
        self._example = example
        self._constants = constants
        self._settings = settings

    def costs(self, strands: Strands) -> CostTable:
        """Times of these graphs, measured when they are first asked for. Where a step's ends have
        graphs of their own these are measured with the others, and all candidates share a table."""
        if strands.digest not in self.tables:
            ends = self.candidates.ends
            measured = strands if ends is None else self.candidates.whole
            if measured.digest not in self.tables:
                self.tables[measured.digest] = self._measured(measured)
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
                f"plan.file = {self._settings.plan.file!r} was made for graph "
                f"{plan.graph_digest}, and this run has graph {strands.digest}",
                hint=_OTHER_GRAPH + (_BY_TIMES if strands.listing is not None else ""),
            )
        return plan

    def plan(self, strands: Strands, schedule: Schedule, search: str = "") -> Plan:
        """A plan by measured times; `search` is that of the settings if it is not given."""
        return make_plan(
            strands.op_graphs,
            self.costs(strands),
            search or self._settings.plan.search,
            limits=self._settings.limits,
            schedule=schedule,
        )

    def _measured(self, strands: Strands) -> CostTable:
        settings, device = self._settings, self._example[0].device.type
        machine = machine_id(device, link_label(settings.link))
        return cached(
            cache_directory("costs") if settings.plan.cache else None,
            machine,
            strands.digest,
            lambda: profile_strands(
                strands,
                self._example,
                device,
                self._constants,
                repeats=settings.plan.profile_repeats,
                machine=machine,
            ),
            say=settings.say,
        )


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What masks of dropout depend on, beside step and micro-batch."""

    seed: int = 0
    data_rank: int = 0
    """Numbers the ranks that see other data."""


NO_DRAWS = Draws()
"""For graphs without dropout."""


class CompiledStep:
    """Graphs in a planned order. Runs the micro-batches of a step and adds their gradients to the
    sums among its constants."""

    def __init__(
        self,
        strands: Strands,
        plan: Plan,
        constants: Constants,
        schedule: Schedule | None = None,
        draws: Draws = NO_DRAWS,
    ) -> None:
        """`schedule` is looked up by the plan's name if it is not given. Raises InputError for a
        plan that cannot run."""
        self.strands = strands
        self.plan = plan
        self.executor = strands.executor(plan, constants, schedule)
        self.schedule = self.executor.schedule
        self.draws = draws
        self._device_type = next(iter(constants.values())).device.type

    def run(
        self, batches: Sequence[Batch], number: int, recorder: Recorder | None = None
    ) -> list[Tensor]:
        """Losses of the micro-batches of step `number` of training, on which masks depend."""
        if self.strands.takes_seeds:
            batches = [(*batch, self._seeds(number, i)) for i, batch in enumerate(batches)]
        return self.executor.step(batches, recorder)

    def recorder(self) -> Recorder:
        """Something that notes each operator of one run."""
        return Recorder(self.strands.op_graphs, self._clock.restarted())

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """What this rank runs in a step of so many micro-batches."""
        parts = self.strands.parts
        return self.schedule.actions(micro_batches, parts, head=bool(self.plan.head))

    @property
    def digests(self) -> dict[str, str]:
        """What all ranks must have alike: the order of operators, and that of actions."""
        order = self.schedule.digest(self.strands.parts, head=bool(self.plan.head))
        return {"plan": self.plan.digest, "schedule": order}

    def _seeds(self, number: int, micro_batch: int) -> Tensor:
        draws = self.draws
        return seeds_for(
            draws.seed, step=number, micro_batch=micro_batch, data_rank=draws.data_rank
        )

    @cached_property
    def _clock(self) -> Clock:
        """Keeps the streams on which it stamps collectives over all recorded steps."""
        return clock_for(self._device_type)
