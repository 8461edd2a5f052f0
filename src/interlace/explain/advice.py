"""Which settings to try, or that none is worth trying."""

from collections.abc import Mapping
from dataclasses import dataclass

from interlace.explain.exposure import Exposure
from interlace.explain.gain import BOTH, DECOMPOSITION, TWO_STRANDS, Gains
from interlace.explain.waiting import Ranks
from interlace.text import milliseconds, percent

WORTH = 0.02
"""Part of a step below which a gain is not worth a change; a choice: plans may be so far off."""
_MOSTLY = 0.5
"""Part from which waiting, or an idle device, is the first thing to see to; a choice."""
_MUCH = 0.25
"""Part of the communication from which waiting is named; a choice."""
_MOST_SETTINGS = 3
"""Settings that are named; a choice."""
_NOTHING = "Do not: there is no communication that could be hidden."
"""Of a trace without any."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting to try."""

    key: str
    """Of a run file of `interlace train`, with its value."""
    argument: str
    """The same for `compile_step`."""
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer."""

    worth: bool
    """Whether hiding communication is worth trying."""
    sentence: str
    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()
    """What else stands out and is not a matter of overlap."""


def advise(
    figures: Exposure, gains: Gains | None, ranks: Ranks, measured: Mapping[str, int]
) -> Advice:
    """From what was measured on the rank that computes longest, and what could be gained there: it
    sets the pace of all others. `measured` are step times of a run that compared ways of running,
    ns: where it tried one strand and two, that is the answer."""
    notes = _notes(figures, ranks)
    if not figures.communication_ns:
        return Advice(False, _NOTHING, (), notes)
    assert gains is not None, "a step with communication has bounds"
    if "1" in measured and "2" in measured:
        return _measured(measured["1"], measured["2"], gains, notes)
    best = max(_worth_ns(gains, way) for way in (TWO_STRANDS, DECOMPOSITION, BOTH))
    share = best / gains.step_ns if gains.step_ns else 0.0
    if share < WORTH:
        how = "by simulation" if gains.replayed_over_measured is not None else "at most"
        hidden = percent(figures.hidden_fraction)
        sentence = (
            f"Do not: hiding communication would make the step {percent(share)} shorter {how}, and "
            f"less than {percent(WORTH)} is not worth a change. Of the communication {hidden} is "
            "hidden already."
        )
        return Advice(False, sentence, (), notes)
    waiting = next((r.waiting_share for r in ranks.rows if r.rank == gains.rank), 0.0)
    if waiting > _MOSTLY:
        sentence = (
            f"Do not, or not yet: {percent(waiting)} of the communication of rank {gains.rank}, "
            "which computes longest, is waiting for other ranks. Deal the work out evenly first."
        )
        return Advice(False, sentence, (), notes)
    if gains.replayed_over_measured is None:
        sentence = (
            f"It may help: at most {percent(share)} of the step. The trace does not say what is "
            "forward and what is backward, so this was not simulated."
        )
    else:
        sentence = (
            f"Try it: by simulation a step of {gains.micro_batches} micro-batches takes "
            f"{milliseconds(gains.step_ns - best)} ms instead of {milliseconds(gains.step_ns)} ms, "
            f"{gains.step_ns / max(1, gains.step_ns - best):.2f} times as fast."
        )
    error = abs((gains.replayed_over_measured or 1.0) - 1)
    if error > share:
        notes += (
            f"The simulation is off by {percent(error)} on the traced order, more than the gain: "
            "a trial decides.",
        )
    return Advice(True, sentence, tuple(_settings(gains)[:_MOST_SETTINGS]), notes)


def _measured(one_ns: int, two_ns: int, gains: Gains, notes: tuple[str, ...]) -> Advice:
    """What a run says that tried both."""
    times = (
        f"this run timed steps of {milliseconds(two_ns)} ms with two strands and of "
        f"{milliseconds(one_ns)} ms with one"
    )
    if two_ns > (1 - WORTH) * one_ns:
        return Advice(False, f"Do not: {times}.", (), notes)
    sentence = f"Keep two strands: {times}, {one_ns / two_ns:.2f} times as fast."
    return Advice(True, sentence, tuple(_settings(gains)[:_MOST_SETTINGS]), notes)


def _worth_ns(gains: Gains, way: str) -> int:
    gain = gains.of(way)
    return gain.at_most_ns if gain.simulated_ns is None else gain.simulated_ns


def _settings(gains: Gains) -> list[Setting]:
    """The most useful first."""
    strands, cut, both = (_worth_ns(gains, way) for way in (TWO_STRANDS, DECOMPOSITION, BOTH))
    enough = WORTH * gains.step_ns
    two = Setting(
        'strands = "2"',
        "compile_step(..., strands=2)",
        f"hides {milliseconds(strands)} ms of {milliseconds(gains.exposed_ns)} ms exposed",
    )
    decompose = Setting(
        'overlap.decompose = "auto"',
        'compile_step(..., overlap=OverlapConfig(decompose="auto"))',
        f"hides {milliseconds(cut)} ms alone, {milliseconds(both)} ms with two strands",
    )
    found: list[Setting] = []
    if strands >= enough:
        found.append(two)
    if cut >= enough or both - strands >= enough / 2:
        found.append(decompose)
    found.sort(key=lambda each: each is decompose and cut > strands)
    if cut > strands:
        found.reverse()
    if gains.traced_micro_batches <= 1 and strands >= enough:
        found.append(
            Setting(
                f"train.micro_batches = {gains.micro_batches}",
                f"step(batches), with {gains.micro_batches} batches",
                "two strands need at least two micro-batches in a step",
            )
        )
    elif strands >= enough:
        found.append(
            Setting(
                f"train.micro_batches = {2 * gains.micro_batches}",
                f"step(batches), with {2 * gains.micro_batches} batches",
                "the first forward and the last backward have no partner; they then weigh half",
            )
        )
    if strands >= enough:
        found.append(
            Setting(
                "plan.extra_memory = 0.1",
                "compile_step(..., config=PlanConfig(extra_memory=0.1))",
                "leaves the search room: orders that hide more hold more activations",
            )
        )
    return found


def _notes(figures: Exposure, ranks: Ranks) -> tuple[str, ...]:
    found = []
    slow = [row.rank for row in ranks.rows if row.straggler]
    if slow:
        names = ", ".join(str(rank) for rank in slow)
        found.append(f"Rank {names} computes at least 1.1 times as long as the median rank.")
    if ranks.waiting_share > _MUCH:
        found.append(
            f"Over all ranks {percent(ranks.waiting_share)} of the communication is waiting for "
            "slower ranks. Overlap does not remove that where one rank is always the slowest."
        )
    if figures.device_ns and figures.idle_ns > _MOSTLY * figures.device_ns:
        found.append(
            f"The device has nothing to do in {percent(figures.idle_ns / figures.device_ns)} of "
            "the step although no communication is under way: the host, data or copies hold it up. "
            "If it is the host of a GPU, capture the step (train.cuda_graph, or cuda_graph=True of "
            "compile_step): kernels of a CUDA graph do not wait for Python."
        )
    return tuple(found)
