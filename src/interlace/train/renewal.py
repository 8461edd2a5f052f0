"""A plan made again, between two steps of all ranks: when the load of experts has drifted away from
the one that it was made for, or when a user asks for it.

Costs are measured in real steps with real routing, so a plan is one for the load, the links and the
machine of its time. All ranks know the same load, and so they begin together; that a user has asked
the first rank sees, and the others learn it with the wish to stop (`ranks.signals`).
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from interlace.compiled import Compilation
from interlace.config import RunConfig
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
        new = planned_step(
            session.weights, old.strands, plan, self.constants, old.draws, costs,
            captured_in=old.captured_in,
        )  # fmt: skip
        new.losses, new.number = old.losses, old.number
        session.runners["2"] = new
        return new


class RenewalRequest:
    """The file by which a user asks a run to measure and plan again, looked for by one rank."""

    def __init__(self, path: Path | None) -> None:
        """`path` is None on the ranks that do not look. One that is there already was for an
        earlier run, and is removed."""
        self._path = path
        self.made()

    def made(self) -> bool:
        """Whether the file was made since the last look; it is taken away. A file that cannot be
        taken away asks once."""
        if self._path is None or not self._path.exists():
            return False
        try:
            self._path.unlink()
        except OSError:
            self._path = None
        return True


def why_not(config: RunConfig) -> str:
    """Why a run cannot measure and plan again, in words; empty if it can."""
    plan = config.plan
    for name, value, wrong in (
        ("strands", config.strands, config.strands != "2"),
        ("parallel.pipeline", config.parallel.pipeline, config.parallel.pipeline > 1),
        ("plan.file", plan.file, plan.file),
        ("plan.cluster", plan.cluster, plan.cluster),
    ):
        if wrong:
            return f"only two strands by measured times are planned again, and {name} = {value!r}"
    return ""
