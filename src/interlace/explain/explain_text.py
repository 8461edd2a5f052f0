"""An explanation as text for a terminal."""

from collections.abc import Iterator
from textwrap import fill

from interlace.explain.explanation import Explanation
from interlace.explain.gain import BOTH, DECOMPOSITION, TWO_STRANDS, Gains
from interlace.text import aligned, milliseconds, percent, size

_WAYS = {TWO_STRANDS: "two strands", DECOMPOSITION: "decomposition", BOTH: "both"}
"""How the ways are called."""
_MODES = {"1": "one strand", "2": "two strands", "eager": "eager"}
"""How the ways of running are called."""
_WIDTH = 88
"""Characters of a line of the answer; a choice."""
_UNKNOWN = "-"
"""Stands where the trace does not say it."""


def as_text(found: Explanation) -> str:
    """The answer first, then the figures behind it."""
    return "\n\n".join(_sections(found))


def _sections(found: Explanation) -> Iterator[str]:
    yield "\n".join(fill(each, _WIDTH) for each in (found.advice.sentence, *found.advice.notes))
    yield _measured(found)
    if found.rows:
        yield _by_kind(found)
    if len(found.ranks.rows) > 1:
        yield _by_rank(found)
    if found.other_ways:
        yield _other_ways(found)
    if found.gains is not None:
        yield _gains(found.gains)
    if found.advice.settings:
        yield _settings(found)


def _measured(found: Explanation) -> str:
    count, own = len(found.steps), found.figures
    steps = (
        found.steps[0] if count == 1 else f"{count} steps, {found.steps[0]} to {found.steps[-1]}"
    )
    hidden = ""
    if own.communication_ns:
        hidden = f", {percent(own.hidden_fraction)} of it hidden under compute"
    lines = [
        f"Rank {found.rank}, {steps}:",
        f"  step            {milliseconds(found.step_ns)} ms" + (" (median)" if count > 1 else ""),
        f"  compute         {milliseconds(own.compute_ns / count)} ms a step",
        f"  communication   {milliseconds(own.communication_ns / count)} ms a step{hidden}",
        f"  exposed         {milliseconds(own.exposed_ns / count)} ms a step",
        f"  neither         {milliseconds(own.idle_ns / count)} ms a step: host, copies, data",
    ]
    if found.left_out:
        lines.append(f"  left out        {found.left_out}")
    return "\n".join(lines)


def _by_kind(found: Explanation) -> str:
    count = len(found.steps)
    rows = [
        (
            row.kind,
            row.group or _UNKNOWN,
            str(row.group_size or _UNKNOWN),
            f"{row.count / count:g}",
            _UNKNOWN if row.bytes is None else size(row.bytes // count),
            milliseconds(row.busy_ns / count),
            milliseconds(row.exposed_ns / count),
        )
        for row in found.rows
    ]
    header = ("collective", "group", "ranks", "a step", "bytes", "busy ms", "exposed ms")
    return "Communication of a step\n" + aligned(header, rows, text_columns=2)


def _by_rank(found: Explanation) -> str:
    count = len(found.steps)
    rows = [
        (
            f"{row.rank}" + (" straggler" if row.straggler else ""),
            milliseconds(row.step_ns),
            milliseconds(row.compute_ns / count),
            milliseconds(row.communication_ns / count),
            _UNKNOWN if row.waiting_ns is None else milliseconds(row.waiting_ns / count),
            milliseconds(row.exposed_ns / count),
            percent(row.hidden_fraction),
        )
        for row in found.ranks.rows
    ]
    header = (
        "rank", "step ms", "compute ms", "comm. ms", "waiting ms", "exposed ms", "hidden",
    )  # fmt: skip
    text = "Ranks, a step\n" + aligned(header, rows, text_columns=1)
    text += "\nWaiting is what a collective lasted beyond its shortest duration over the ranks."
    if found.ranks.unmatched:
        text += f"\nNot compared between ranks: {found.ranks.unmatched}."
    return text


def _other_ways(found: Explanation) -> str:
    rows = [
        (
            _MODES.get(way.mode, way.mode),
            milliseconds(way.step_ns),
            milliseconds(way.exposure.communication_ns),
            milliseconds(way.exposure.exposed_ns),
            percent(way.exposure.hidden_fraction),
        )
        for way in found.other_ways
    ]
    header = ("also recorded", "step ms", "comm. ms", "exposed ms", "hidden")
    return aligned(header, rows, text_columns=1)


def _gains(found: Gains) -> str:
    rows = []
    for gain in found.ways:
        simulated = gain.simulated_ns
        best = gain.at_most_ns if simulated is None else simulated
        rows.append(
            (
                _WAYS[gain.way],
                milliseconds(gain.at_most_ns),
                _UNKNOWN if simulated is None else milliseconds(simulated),
                milliseconds(found.step_ns - best),
                f"{found.step_ns / max(1, found.step_ns - best):.2f}",
            )
        )
    header = ("hidden by", "at most ms", "simulated ms", "step ms", "times as fast")
    have, what = found.traced_micro_batches, "A step"
    if have:
        like = f"the {have} traced" if have > 1 else "the one traced"
        what = f"A step of {found.micro_batches} micro-batches like {like}"
    times = f"{milliseconds(found.step_ns)} ms, {milliseconds(found.exposed_ns)} ms exposed"
    lines = [f"{what}: {times}", aligned(header, rows, text_columns=1)]
    if found.replayed_over_measured is not None:
        lines.append(
            "The simulation of the traced order itself takes "
            f"{found.replayed_over_measured:.2f} times what was measured."
        )
    else:
        lines.append(f"Not simulated: {found.why_not_simulated}.")
    return "\n".join(lines)


def _settings(found: Explanation) -> str:
    lines = ["Try, in this order:"]
    for number, setting in enumerate(found.advice.settings, start=1):
        lines += [f"  {number}. {setting.key}", f"     {setting.argument}", f"     {setting.why}"]
    return "\n".join(lines)
