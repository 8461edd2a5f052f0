"""The picture of a plan: per phase what the compute lane and the links would do.

Hue tells the strand, so that it can be seen how one fills the waits of the other; shade tells
matmuls and attention from the rest. All panels share one time axis. Of a deep model the first part
of each phase is drawn, in which single operators can still be told apart.
"""

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from interlace.ir.actions import Share, shown, strand, strands_of
from interlace.ir.graph import COMPUTE_LANE, Kind
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.report.panels import plain
from interlace.report.plan_figures import Comparison, Figures
from interlace.report.short_spans import DrawnPiece, pieces
from interlace.report.theme import FAMILIES, LIGHT, Theme
from interlace.text import milliseconds, percent

DOTS_PER_IN = 200
"""Dots per inch of the picture; a choice, so that text stays sharp when magnified."""
WIDTH_IN = 14.0
"""Width of the picture in inches; a choice, that of `plots`."""
_LEFT_IN, _RIGHT_IN = 1.25, 0.25
"""Margins in inches: names of lanes are on the left. A choice."""
_PLOT_IN = WIDTH_IN - _LEFT_IN - _RIGHT_IN
"""Width of the time axis in inches."""
_TITLE_IN, _HEADER_IN, _AXIS_IN, _GAP_IN, _LEGEND_IN = 0.95, 0.34, 0.55, 0.14, 0.60
"""Heights in inches of the title, of the line above a panel, of the time axis, between panels and
of the legend; a choice."""
_LANE_IN, _STRIP_IN, _SPACE_IN = 0.46, 0.13, 0.04
"""Heights in inches of a lane, of the strip of waits, and of the space between them; a choice."""
_CHARACTER_IN = 0.074
"""Width in inches of one character of a label, about."""
_SHOWN = 250
"""How many operators of a deep model's phase are drawn, or a few more; a choice: about 10 px
each."""
_MS = 1e6
"""Nanoseconds of a millisecond."""

_HUES = {
    "forward": "#2f6fd0",
    "next": "#1c3f7d",
    "backward": "#d9691e",
}
"""Colour of each strand's operators."""
_STRANDS = {
    "forward": "forward",
    "next": "forward of the micro-batch after",
    "backward": "backward",
}
"""What the legend calls each strand."""
_NO_STRAND = "#64748b"
"""Colour of operators that belong to none of these strands."""
_SHORT = {
    Kind.MATMUL: "mm",
    Kind.ATTENTION: "attn",
    Kind.ALL_GATHER: "AG",
    Kind.REDUCE_SCATTER: "RS",
    Kind.ALL_REDUCE: "AR",
    Kind.ALL_TO_ALL: "A2A",
    Kind.SEND: "send",
}
"""Short names of kinds of operators, for rectangles that the long ones do not fit."""
_BIG = (Kind.MATMUL, Kind.ATTENTION)
"""Kinds of compute that are drawn in a strand's full colour."""
_TINT = 0.55
"""How far towards white (0 to 1) operators are drawn that are neither matmul nor attention; a
choice."""


def plan_png(comparison: Comparison, *, subtitle: str, theme: Theme = LIGHT) -> bytes:
    """PNG, 2800 px wide, with a panel per phase of the chosen plan."""
    best = comparison.best
    end_ns = window_ns(list(best.timelines.values()))
    names = list(best.timelines)
    heights = [_panel_in(best.timelines[name]) for name in names]
    height = _TITLE_IN + _AXIS_IN + _LEGEND_IN + sum(heights)
    height += len(names) * (_HEADER_IN + _GAP_IN)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DOTS_PER_IN, facecolor=theme.background)
    step = best.step
    title = (
        f"Plan of a step ({comparison.chosen}): {milliseconds(step.predicted_ns)} ms for "
        f"{best.micro_batches} micro-batches, {percent(step.hidden_fraction)} of the "
        f"communication hidden"
    )
    _write(figure, height - 0.40, title, theme.text, size=17, bold=True)
    _write(figure, height - 0.68, subtitle, theme.muted, size=12)
    top = height - _TITLE_IN
    for name, panel_in in zip(names, heights, strict=True):
        top -= _HEADER_IN + panel_in
        box = (_LEFT_IN / WIDTH_IN, top / height, _PLOT_IN / WIDTH_IN, panel_in / height)
        axes = figure.add_axes(box)
        is_last = name == names[-1]
        _draw_panel(axes, best.timelines[name], best.phases[name], end_ns, theme, last=is_last)
        top -= _GAP_IN
    _draw_legend(figure, list(best.timelines.values()), theme)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def phase_title(phase: str) -> str:
    """`forward beside backward (rest+next+backward)`."""
    walks = dict.fromkeys(str(each.direction) for each in strands_of(phase))
    words = " beside ".join(walks)
    return words if words == phase else f"{words} ({phase})"


def window_ns(timelines: list[Timeline]) -> int:
    """How much of each phase is drawn: all of it, or a round time with `_SHOWN` operators."""
    longest = max(1, *(timeline.length_ns for timeline in timelines))
    ends = [
        sorted(s.end_ns for s in timeline.spans if s.kind != WAIT)[:_SHOWN]
        for timeline in timelines
        if len(timeline.spans) > 3 * _SHOWN
    ]
    if not ends:
        return longest
    return min(longest, _rounded(min(end[-1] for end in ends)))


def _rounded(time_ns: int) -> int:
    """Up to the next 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(1, time_ns)))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= time_ns)


def _panel_in(timeline: Timeline) -> float:
    return sum(height for _, _, height in _rows(timeline)) + _SPACE_IN


def _rows(timeline: Timeline) -> list[tuple[str, str, float]]:
    """(label, lane, height with its space) from bottom to top; the strip of waits has no lane."""
    links = [(f"{lane} link", lane, _LANE_IN + _SPACE_IN) for lane in timeline.lanes[:0:-1]]
    waits = [("exposed", "", _STRIP_IN + _SPACE_IN)] if links else []
    return [*links, *waits, (COMPUTE_LANE, COMPUTE_LANE, _LANE_IN + _SPACE_IN)]


def _draw_panel(
    axes: Axes, timeline: Timeline, figures: Figures, end_ns: int, theme: Theme, *, last: bool
) -> None:
    rows, height = _rows(timeline), _panel_in(timeline)
    axes.set_facecolor(theme.background)
    axes.set_xlim(0, end_ns / _MS)
    axes.set_ylim(0, height)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.tick_params(length=0, labelsize=11, labelcolor=theme.muted, labelbottom=last)
    if last:
        axes.set_xlabel("time from the start of the phase (ms)", fontsize=11, color=theme.muted)
    part = f"first {milliseconds(end_ns)} of " if timeline.length_ns > end_ns else ""
    title = f"{phase_title(timeline.label)}   {part}{milliseconds(timeline.length_ns)} ms"
    note = (
        f"communication {milliseconds(figures.communication_ns)} ms, exposed "
        f"{milliseconds(figures.exposed_ns)} ms, {percent(figures.hidden_fraction)} hidden"
    )
    axes.text(0, height + 0.08, title, fontsize=13, weight="bold", color=theme.text)
    axes.text(end_ns / _MS, height + 0.08, note, fontsize=12, color=theme.text, ha="right")
    bottom, ticks = _SPACE_IN, []
    for _, lane, row_in in rows:
        strip = (bottom, row_in - _SPACE_IN)
        ticks.append(bottom + strip[1] / 2)
        _draw_row(axes, timeline, lane, strip, end_ns, theme)
        bottom += row_in
    axes.set_yticks(ticks, [label for label, _, _ in rows])


def _draw_row(
    axes: Axes, timeline: Timeline, lane: str, strip: tuple[float, float], end_ns: int, theme: Theme
) -> None:
    extent = min(end_ns, timeline.length_ns) / _MS
    axes.broken_barh([(0, extent)], strip, facecolor=theme.row)
    found = pieces(
        _drawn(timeline, lane),
        start_ns=0,
        end_ns=end_ns,
        columns=int(_PLOT_IN * DOTS_PER_IN),
    )
    groups: dict[tuple[bool, tuple[str, str]], list[DrawnPiece]] = {}
    for piece in found:
        groups.setdefault((piece.is_whole, piece.group), []).append(piece)
    for (is_wide, (own, kind)), members in sorted(groups.items(), key=lambda item: item[0]):
        bars = [(p.start_ns / _MS, (p.end_ns - p.start_ns) / _MS) for p in members]
        if kind == WAIT:
            face = theme.exposed if lane else theme.waiting
            hatch = "////" if lane and is_wide else None
            style = {"facecolor": face, "edgecolor": theme.hatch, "linewidth": 0.0, "hatch": hatch}
            axes.broken_barh(bars, strip, **style)
            continue
        color = shade(own, kind, lane)
        edge = 0.5 if is_wide else 0.0
        style = {"facecolor": color, "edgecolor": theme.background, "linewidth": edge}
        axes.broken_barh(bars, strip, **style)
        for bar in bars if is_wide else ():
            _label(axes, bar, strip, kind, end_ns, color)


def _drawn(timeline: Timeline, lane: str) -> Iterator[tuple[Span, tuple[str, str]]]:
    """The spans of a row, each with its strand and kind; waits alone for the strip."""
    for span in timeline.spans:
        if not lane and span.kind == WAIT:
            yield span, ("", WAIT)
        elif lane and span.lane == lane:
            is_wait = span.kind == WAIT
            yield span, ("", WAIT) if is_wait else (strand_of(span), span.kind)


def strand_of(span: Span) -> str:
    """`next.mm` belongs to `next`, which the timeline counts as forward."""
    label, dot, _ = span.name.partition(".")
    is_head = dot and shown(label) != label and strand(label).share == Share.HEAD
    return label if is_head else span.strand


def shade(strand: str, kind: str, lane: str) -> tuple[float, float, float]:
    """RGB of an operator: the strand's hue, light unless it is a matmul, attention or transfer."""
    red, green, blue = to_rgb(_HUES.get(strand, _NO_STRAND))
    if lane != COMPUTE_LANE or kind in _BIG:
        return (red, green, blue)
    return (red + (1 - red) * _TINT, green + (1 - green) * _TINT, blue + (1 - blue) * _TINT)


def _label(
    axes: Axes,
    bar: tuple[float, float],
    strip: tuple[float, float],
    kind: str,
    end_ns: int,
    color: tuple[float, float, float],
) -> None:
    """Name a rectangle if its name, or the short form of it, fits."""
    start, width = bar
    room_in = width * _MS / end_ns * _PLOT_IN - 0.06
    names = (FAMILIES[Kind(kind)].split(",")[0], _SHORT.get(Kind(kind), ""))
    text = next((name for name in names if len(name) * _CHARACTER_IN <= room_in), "")
    if not text:
        return
    luminance = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    ink = "#16202c" if luminance > 0.6 else "#ffffff"
    style = {"fontsize": 9, "ha": "center", "va": "center_baseline", "color": ink}
    axes.text(start + width / 2, strip[0] + strip[1] / 2, text, **style)


def _write(
    figure: Figure, y_in: float, text: str, color: str, *, size: float, bold: bool = False
) -> None:
    place = (0.25 / WIDTH_IN, y_in / figure.get_figheight())
    weight = "bold" if bold else "normal"
    figure.text(*place, plain(text), fontsize=size, weight=weight, color=color)


def _draw_legend(figure: Figure, timelines: Sequence[Timeline], theme: Theme) -> None:
    """Strands that occur, each as a full and a light swatch, and the hatching of waits."""
    present = {strand_of(span) for timeline in timelines for span in timeline.spans}
    strands = [strand for strand in _STRANDS if strand in present]
    handles: list[Any] = [
        tuple(Patch(color=shade(strand, kind, COMPUTE_LANE)) for kind in (Kind.MATMUL, Kind.OTHER))
        for strand in strands
    ]
    handles.append(Patch(facecolor=theme.exposed, edgecolor=theme.hatch, hatch="////"))
    legend = figure.legend(
        handles,
        [*(_STRANDS[strand] for strand in strands), "exposed: compute waits for a transfer"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(0.25 / WIDTH_IN, 0.0),
        borderaxespad=0.8,
        borderpad=0.0,
        ncols=len(handles),
        frameon=False,
        fontsize=11,
        labelcolor=theme.text,
        handlelength=2.0,
        columnspacing=1.6,
        title="full colour: matmul (mm), attention (attn), transfer (AG all-gather, RS "
        "reduce-scatter, AR all-reduce); light: other operators",
        title_fontproperties={"size": 11},
        alignment="left",
    )
    legend.get_title().set_color(theme.muted)
