"""install_overlap: passes that PyTorch's pipeline runtime puts together run interleaved in it.

PyTorch's runtime goes on to send, to receive and to scale gradients. It runs a pass by a function
that can be replaced. The one here takes what arrived from the stage, runs the pass as a traced
graph, and leaves in the stage what PyTorch's own function leaves there. An action OVERLAP_F_B is
one graph, with the operators of both passes in a planned order.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules

from interlace.errors import InputError, RunError
from interlace.ir.actions import label_of
from interlace.ir.plan import Plan
from interlace.ir.timeline import Timeline
from interlace.pipelining.overlap_checks import PASSES, check_mesh, check_schedule, order_of
from interlace.pipelining.overlap_step import Compiled, CompiledStages, OverlapStep
from interlace.ranks.agree import refused_together
from interlace.runtime.recorder import Clock, clock_for
from interlace.search.planner import find_search


def install_overlap(
    schedule: Any,
    *,
    mesh: DeviceMesh | None = None,
    strands: int = 2,
    search: str = "merge",
    profile_repeats: int = 5,
) -> "Overlap":
    """Have a schedule of `torch.distributed.pipelining` run the two passes of each of its
    OVERLAP_F_B actions operator by operator in one planned order; returns what says what ran.

    `schedule` is one on PyTorch's runtime with such actions, `ScheduleDualPipeV` or one of
    `torch_schedule`, of `PipelineStage`s. It is used as before: `step` and `eval` are its own, it
    sends and receives, and gradients are in `parameter.grad`. The first step traces the stages of
    this rank and measures their operators, which runs collectives inside stages; `mesh` names the
    axes of those. `strands=1` runs the same graphs one pass after the other. Losses, outputs and
    gradients have the bits of one strand, and of the schedule without this where its kernels are
    deterministic and nothing is dropped; outputs and losses have no gradient. `search` and
    `profile_repeats` are those of `PlanConfig`.

    Collective over the stages' group; the first step is collective over the default group. Raises
    InputError, here or in the first step before anything runs, naming what is not supported:
    DTensors, wrappers with autograd's hooks, a torch without what this needs, stages that cannot be
    traced."""
    if strands not in (1, 2):
        raise InputError(f"strands = {strands!r} is neither 1 nor 2", hint="2 interleaves")
    stages = getattr(schedule, "_stages", None)
    with refused_together(getattr(stages[0], "group", None) if stages else None):
        find_search(search)
        check_mesh(mesh)
        check_schedule(schedule)
        order = order_of(schedule)
        order.phases(order.graphs)
    compiled = CompiledStages(
        schedule, order, mesh, interleave=strands == 2, search=search, repeats=profile_repeats
    )
    found = Overlap(schedule, compiled)
    found.install()
    return found


class Overlap:
    """What install_overlap put into a schedule of PyTorch's."""

    counts: Counter[str]
    """How often the last step ran each phase: `forward_0+backward_3` is a forward of stage 0 with a
    backward of stage 3."""
    timeline: Timeline | None
    """The last step that was recorded, operator by operator."""

    def __init__(self, schedule: Any, compiled: CompiledStages) -> None:
        """Use `install_overlap`."""
        self._schedule = schedule
        self._stages = compiled
        self._plain_step = schedule._step_microbatches
        self._now: OverlapStep | None = None
        self._records = False
        self._clock: Clock | None = None
        self.counts = Counter()
        self.timeline = None

    def install(self) -> None:
        """Take the place of PyTorch's functions; `install_overlap` does it."""
        for name in PASSES:
            self._schedule.register_custom_function(getattr(schedules, name), self._run)
        self._schedule._step_microbatches = self._step

    @property
    def plan(self) -> Plan:
        """The order of operators in each phase. Raises RunError before the first step."""
        return self._compiled.plan

    @property
    def turns(self) -> dict[str, int]:
        """By phase of two passes, how often the operators of one follow upon those of the other: 1
        is one pass after the other. Raises RunError before the first step."""
        found = {}
        for phase, planned in self.plan.phases.items():
            labels = [label_of(name) for name in planned.order]
            if "+" in phase:
                found[phase] = sum(a != b for a, b in pairwise(labels))
        return found

    def record(self) -> None:
        """Have the next step recorded; then `timeline` has when each operator ran. Such a step
        takes some 5 us longer for each operator."""
        self._records = True

    @property
    def _compiled(self) -> Compiled:
        if self._stages.compiled is None:
            raise RunError("nothing has been traced", hint="call schedule.step once")
        return self._stages.compiled

    def _step(self, *given: Any, **named: Any) -> Any:
        """In the place of the schedule's function of this name."""
        values = dict(zip(_PARAMETERS, given, strict=False)) | named
        if not self._schedule._has_backward:
            self._now = OverlapStep(self._schedule, None, values)
        else:
            self._now = self._begin(values)
        try:
            found = self._plain_step(*given, **named)
        finally:
            now, self._now = self._now, None
        self.counts = now.counts
        if now.recorder is not None:
            self.timeline = now.recorder.timeline("step", dist.get_rank())
            self._records = False
        return found

    def _begin(self, values: dict[str, Any]) -> OverlapStep:
        self._stages.compile(values)
        recorder = None
        if self._records:
            device = self._compiled.device.type
            self._clock = clock_for(device) if self._clock is None else self._clock.restarted()
            recorder = self._compiled.recorder(self._clock)
        return OverlapStep(self._schedule, self._compiled, values, recorder)

    def _run(self, action: Any, context: Any) -> None:
        """The passes of an action of PyTorch's."""
        assert self._now is not None, f"{action} runs outside of a step"
        self._now.run(action, context)


_PARAMETERS = ("arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs", "loss_kwargs")
"""Of the function of PyTorch's that runs the micro-batches of a step."""
