"""A simulated step where not all takes its mean time: passes that vary, and one slow device.

**Noise.** A pass computes exp(s z - s^2 / 2) times as long as its mean, with z normal and drawn for
each pass of each device. Devices that exchange something inside of a pass (tensor ranks, those that
share sequences or experts, shards whose weights are gathered layer by layer) all take as long as
the slowest of them. The others, the replicas of a pipeline, wait for each other once a step:
`DRAWS` of them are simulated, and the latest end of all is expected from the mean and the deviation
of these, as that of as many normal values (Blom's approximation).

**A straggler.** One device computes so many times as long as all others, in the stage that computes
longest; whoever exchanges something with it waits.

What is communicated takes its time as before. Equal input gives equal output.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from statistics import NormalDist, fmean, pstdev

from interlace.errors import InputError
from interlace.sim.listed_actions import ActionTimes, ListedActions
from interlace.strategy.schedule_facts import listed_actions
from interlace.strategy.simulated_job import SimulatedJob

DRAWS = 32
"""Replicas that are simulated: a choice, with which their deviation is known to an eighth."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class VariedStep:
    """What a step takes then."""

    seconds: float
    more: float
    """Share of the step without variation that it takes longer."""


def noisy_step(found: SimulatedJob, deviation: float) -> VariedStep:
    """With passes whose times have this deviation over their mean.

    Raises InputError if it is no fraction."""
    if not 0 <= deviation <= 1:
        raise InputError(
            f"--noise {deviation:g} is no deviation over a mean",
            hint="0.03 lets the times of passes vary by 3 %",
        )
    together = in_step(found)
    apart = found.layout.ranks // found.layout.pipeline // together
    draw = random.Random(0)

    def factor(_: int) -> float:
        return exp(deviation * _latest(draw, together) - deviation**2 / 2)

    listed = _listed(found)
    drawn = [_step(found, listed, factor) for _ in range(DRAWS)]
    late = _NORMAL.inv_cdf((apart - 0.375) / (apart + 0.25))
    ends = [fmean(each) + late * pstdev(each) for each in zip(*drawn, strict=True)]
    return _with_ends(found, ends)


def straggling_step(found: SimulatedJob, times: float) -> VariedStep:
    """With one device that computes so many times as long. Raises InputError for less than once."""
    if not times >= 1:
        raise InputError(
            f"--straggler {times:g} is faster than the others",
            hint="1.2 is a device that takes 1.2 times as long",
        )
    busy = [sum(_compute_ns(found, a.phase) for a in own) for own in found.actions]
    slow = busy.index(max(busy))
    listed = _listed(found)
    ends = _step(found, listed, lambda stage: times if stage == slow else 1.0)
    return _with_ends(found, ends)


def in_step(found: SimulatedJob) -> int:
    """Devices that go through a pass together, as they exchange something inside of it."""
    layout = found.layout
    shards = layout.gathers_each or layout.reduce == "micro_batch"
    return layout.tensor * max(layout.group if shards else layout.context, layout.expert)


def _step(
    found: SimulatedJob, listed: ListedActions, factor: Callable[[int], float]
) -> list[float]:
    """When each stage has computed its last action, with its compute `factor` times as long."""
    behind = found.costs.between_ns
    taken = [
        [
            (
                round(found.passes[a.phase].ns + _compute_ns(found, a.phase) * (factor(stage) - 1)),
                behind.get(a.phase, 0),
            )
            for a in own
        ]
        for stage, own in enumerate(found.actions)
    ]
    return _ends(listed, listed.times(found.costs, taken))


def _compute_ns(found: SimulatedJob, phase: str) -> float:
    cost = found.passes[phase]
    return cost.ns - sum(cost.exposed.values())


def _with_ends(found: SimulatedJob, ends: list[float]) -> VariedStep:
    """Stages that end so late, with what each exchanges behind its end."""

    def over(ends: list[float]) -> float:
        exposed = (1e9 * each.reduce_exposed_s for each in found.ends)
        return max(end + more for end, more in zip(ends, exposed, strict=True))

    listed = _listed(found)
    plain = _ends(listed, listed.times(found.costs))
    seconds = found.seconds + (over(ends) - over(plain)) / 1e9
    return VariedStep(seconds, seconds / found.seconds - 1)


def _ends(listed: ListedActions, times: ActionTimes) -> list[float]:
    return [float(last) for last, _ in listed.ends(times)]


def _latest(draw: random.Random, count: int) -> float:
    """The largest of so many normal values, in one draw."""
    return _NORMAL.inv_cdf(max(draw.random(), 1e-12) ** (1 / count))


def _listed(found: SimulatedJob) -> ListedActions:
    layout = found.layout
    return listed_actions(layout.schedule, layout.pipeline, layout.micro_batches)
