"""Does the plan win on the real machine? If not, all ranks go back to one strand, and say so.

A plan is made from measured times, but nothing guarantees that the step is faster: other jobs
may load the machine, or a link may be faster than it was. So in the first steps two strands and
one strand take turns. Both give the same bits, so the training run loses nothing but time. The
slowest rank's medians decide, so that all ranks decide alike.
"""

from dataclasses import dataclass, field
from statistics import median

from interlace.config import RunConfig, StrandsChoice
from interlace.ranks.small_collectives import largest

MARGIN = 1.01
"""Two strands must be slower by more than this to be dropped: a draw keeps the plan."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """Medians of the slowest rank, without the first step of each, which warms up."""

    two_strands_ns: int
    one_strand_ns: int
    steps: int

    @property
    def keeps_plan(self) -> bool:
        """Whether two strands go on."""
        return self.two_strands_ns <= MARGIN * self.one_strand_ns

    def __str__(self) -> str:
        two, one = self.two_strands_ns / 1e6, self.one_strand_ns / 1e6
        measured = (
            f"two strands took {two:.1f} ms a step and one strand {one:.1f} ms "
            f"(medians of {self.steps} steps each, on the slowest rank)"
        )
        if self.keeps_plan:
            return f"plan kept: {measured}"
        return f"plan dropped: {measured}; going on with one strand, which gives the same bits"


@dataclass
class Trial:
    """Which way to run the next step, and what the steps so far took."""

    config: RunConfig
    mode: StrandsChoice
    _taken: dict[StrandsChoice, list[int]] = field(default_factory=lambda: {"2": [], "1": []})

    @property
    def running(self) -> bool:
        """Whether there is something left to try."""
        wanted = self.config.plan.trial_steps
        return self.config.tries_fallback and len(self._taken["1"]) < wanted + 1

    def next_mode(self) -> StrandsChoice:
        """Two strands and one strand in turn, then whatever won."""
        if not self.running:
            return self.mode
        return "1" if len(self._taken["2"]) > len(self._taken["1"]) else "2"

    def add(self, mode: StrandsChoice, step_ns: int) -> TrialVerdict | None:
        """Take note of a step; after the last one of the trial, the verdict. Collective then."""
        if not self.running:
            return None
        self._taken[mode].append(step_ns)
        if self.running:
            return None
        slowest = largest({way: median(taken[1:]) for way, taken in self._taken.items()})
        verdict = TrialVerdict(slowest["2"], slowest["1"], self.config.plan.trial_steps)
        self.mode = "2" if verdict.keeps_plan else "1"
        return verdict
