"""The step of many micro-batches from two steps of fewer, which is what a search looks at first.

A pipeline that is full repeats itself, so that each further round of as many micro-batches as there
are stages takes as long as the last one. Steps of a few rounds and of one more are simulated whole.
What a rank keeps at most does not grow with the number of micro-batches by then.
"""

from dataclasses import dataclass, replace

from interlace.config import RunConfig
from interlace.strategy.job_layout import JobLayout
from interlace.strategy.rank_memory import MemoryParts
from interlace.strategy.schedule_facts import settles
from interlace.strategy.simulated_job import JobParts, step_of

LEAST = 28
"""Micro-batches at least, for pipelines of few stages: `eager_folded` with layers that are computed
again is in its stride behind 20 on 2 stages, 27 on 3, 24 on 4 and 36 on 6. What schedules declare
are the fewest rounds, of a micro-batch for each stage, with which steps of 16 rounds on 4 and 8
stages come out exactly."""


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A layout as a search ranks it."""

    layout: JobLayout
    step_ns: int
    peak: MemoryParts
    """Of the rank that needs the most."""


def steady_step(config: RunConfig, layout: JobLayout, parts: JobParts) -> SteadyStep:
    """Raises InputError as `simulate_job`."""
    stages, count = layout.pipeline, layout.micro_batches

    def of(micro_batches: int) -> tuple[int, MemoryParts]:
        return step_of(config, replace(layout, micro_batches=micro_batches), parts)

    rounds = settles(layout.schedule)
    few = max(LEAST, rounds * stages)
    more = few + stages
    if count <= few + more or not rounds:
        step_ns, peak = of(count)
        return SteadyStep(layout, step_ns, peak)
    (first_ns, _), (step_ns, peak) = of(few), of(more)
    each = (step_ns - first_ns) / (more - few)
    return SteadyStep(layout, round(step_ns + (count - more) * each), peak)
