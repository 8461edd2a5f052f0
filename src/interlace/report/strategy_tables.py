"""What a search of layouts found, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from interlace.report.simulation_tables import (
    memory_line,
    model_line,
    seconds_text,
    simulation_data,
)
from interlace.strategy.contributions import Contribution
from interlace.strategy.expected_error import expected_error
from interlace.strategy.layout_search import WORTH, FoundLayouts
from interlace.strategy.simulated_job import SimulatedJob
from interlace.text import aligned, percent

_HEADER = (
    "",
    "layout",
    "schedule",
    "micro-batches",
    "recompute",
    "step s",
    "MFU",
    "bubble",
    "exposed s",
    "GiB",
)
_WITHOUT = ("without", "instead", "step s", "change", "GiB", "fits")
_GIB = 2**30


def strategy_summary(found: FoundLayouts, parts: Sequence[Contribution]) -> str:
    """The best layouts, what the chosen one is made of, and how sure that is."""
    space, chosen = found.space, found.chosen
    kept = ", ".join(f"{name} = {value}" for name, value in space.kept.items())
    listed = found.best if chosen in found.best else (chosen, *found.best)
    rows = [_row(each, "*" if each is chosen else "") for each in listed]
    how = (
        "the bounds of all others are slower"
        if found.exhaustive
        else "more were left than are simulated: others may be as fast"
    )
    lines = [
        f"{model_line(chosen)}, "
        f"{space.global_batch} sequences of {chosen.job.sequence} tokens a step, on "
        f"{space.devices} devices of {space.cluster.name}",
        *([f"kept from the run file: {kept}"] if kept else []),
        f"{found.looked_at:,} layouts, {found.too_large:,} need too much memory, "
        f"{found.simulated} were simulated; {how}",
        "",
        aligned(_HEADER, rows, text_columns=5),
        "",
        _verdict(found),
        f"memory of the rank that needs most: {memory_line(chosen.peak)}",
    ]
    if parts:
        cells = [_contribution(each, chosen) for each in parts]
        lines += ["", "what each technique gives:", aligned(_WITHOUT, cells, text_columns=2)]
    lines += ["", expected_error(space.cluster, chosen.layout.schedule).text]
    return "\n".join(lines)


def strategy_data(found: FoundLayouts, parts: Sequence[Contribution]) -> dict[str, Any]:
    """The same for a JSON file."""
    space = found.space
    return {
        "devices": space.devices,
        "global_batch": space.global_batch,
        "kept": space.kept,
        "looked_at": found.looked_at,
        "too_large": found.too_large,
        "simulated": found.simulated,
        "exhaustive": found.exhaustive,
        "two_strands_gain": found.gain,
        "one_strand": _data_or_none(found.one_strand),
        "two_strands": _data_or_none(found.two_strands),
        "chosen": simulation_data(found.chosen),
        "best": [simulation_data(each) for each in found.best],
        "contributions": [asdict(each) for each in parts],
    }


def _data_or_none(job: SimulatedJob | None) -> dict[str, Any] | None:
    return None if job is None else simulation_data(job)


def _verdict(found: FoundLayouts) -> str:
    """Whether two strands are worth it."""
    if found.two_strands is None and "strands" in found.space.kept:
        return "two strands: not tried, as the run file has one"
    if found.two_strands is None:
        return "two strands: do not; no layout of them was found"
    if found.one_strand is None:
        return "two strands: no layout of one strand at a time fits"
    one, both = (seconds_text(each.seconds) for each in (found.one_strand, found.two_strands))
    times = f"{one} s with one, {both} s with two"
    if found.gain < WORTH:
        return f"two strands: do not; the best layouts take {times}"
    return f"two strands: {percent(found.gain)} faster; the best layouts take {times}"


def _row(each: SimulatedJob, mark: str) -> tuple[str, ...]:
    layout = each.layout
    return (
        mark,
        layout.text + (", reduced each" if layout.reduce == "micro_batch" else ""),
        layout.schedule,
        f"{layout.micro_batches} x {layout.micro_batch}",
        layout.recompute,
        seconds_text(each.seconds),
        percent(each.mfu),
        percent(each.bubble),
        seconds_text(sum(each.exposed_s.values())),
        f"{each.peak.total / _GIB:.1f}",
    )


def _contribution(each: Contribution, chosen: SimulatedJob) -> tuple[str, ...]:
    if each.memory is None:
        return each.technique, f"{each.instead}: {each.why_not}", "-", "-", "-", "-"
    change = each.seconds / chosen.seconds - 1
    return (
        each.technique,
        each.instead,
        seconds_text(each.seconds),
        f"{100 * change:+.1f} %",
        f"{each.memory.total / _GIB:.1f}",
        "yes" if each.fits else "no",
    )
