"""A plan made again when the load of experts has drifted away from the one that it was made for.

Costs are measured in real steps with real routing, so a plan is one for the load of its time. All
ranks know the same load, and so they begin together, between two steps.
"""

from collections import deque
from dataclasses import dataclass

from interlace.compiled import Compilation
from interlace.ranks.agree import check_agreement
from interlace.runtime.executor import Batch
from interlace.runtime.user_module import Constants
from interlace.schedules.finder import of_strands
from interlace.step import Step
from interlace.train.session import Session
from interlace.train.step_runners import planned_step

STEPS = 8
"""Steps whose mean load is compared: that of one step alone changes with its text."""


class Drift:
    """Whether the load of the busiest expert over the mean has moved since a plan was made."""

    def __init__(self, share: float) -> None:
        """`share` is that of the load at first by which it may move; 0 for any."""
        self._share = share
        self._first: float | None = None
        self._last: deque[float] = deque(maxlen=STEPS)

    def add(self, load: float) -> tuple[float, float] | None:
        """The load of a step. Returns the mean of the first steps and of the last ones once they
        are too far apart, and begins again."""
        self._last.append(load)
        if not self._share or len(self._last) < STEPS:
            return None
        mean = sum(self._last) / STEPS
        if self._first is None:
            self._first = mean
            self._last.clear()
            return None
        moved = self._first, mean
        if abs(mean / self._first - 1) <= self._share:
            return None
        self._first = None
        self._last.clear()
        return moved


@dataclass(frozen=True)
class Renewal:
    """What plans of two strands are made from."""

    compilation: Compilation
    constants: Constants

    def renew(self, session: Session, example: Batch) -> Step:
        """Measure on this micro-batch, and run two strands by a new plan from now on. Collective.
        Raises PeerError if ranks come to different plans."""
        old = session.runners["2"]
        assert isinstance(old, Step)
        compilation = self.compilation.again(example)
        plan = compilation.plan(old.strands, of_strands(2))
        check_agreement({"plan": plan.digest})
        costs = compilation.costs(old.strands)
        new = planned_step(session.weights, old.strands, plan, self.constants, old.draws, costs)
        new.losses, new.number = old.losses, old.number
        session.runners["2"] = new
        return new
