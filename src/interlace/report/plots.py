"""The picture of one training step: what compute and links did, before and after.

One panel per timeline on a common time axis, so that a shorter step is a shorter panel; below, the
first and the last of them magnified. Nothing here touches matplotlib's global state.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from interlace.ir.timeline import Timeline
from interlace.report.panels import (
    COLUMNS_PER_IN,
    PLOT_IN,
    Panel,
    draw_panel,
    draw_saving,
    legend_families,
    plain,
    step_panel,
    zoom_panel,
)
from interlace.report.theme import LIGHT, Theme, tone
from interlace.run_files import write_whole

_LEFT_IN, _RIGHT_IN, _MARGIN_IN = 1.25, 0.25, 0.25
"""Margins in inches: left of the time axis, right of it, and left of titles; a choice."""
_WIDTH_IN = _LEFT_IN + PLOT_IN + _RIGHT_IN
"""Width of the picture in inches."""
WIDTH_PX = int(_WIDTH_IN * COLUMNS_PER_IN)
"""2800, twice the width at which the picture is meant to be read."""
_HEADER_IN, _AXIS_IN, _GAP_IN = 0.34, 0.50, 0.12
"""Heights in inches of the line above a panel, of a time axis, and between panels; a choice."""
_TITLE_IN, _GROUP_IN, _LEGEND_IN = 0.82, 0.36, 0.84
"""Heights in inches of the title, of a group's name and of the legend; a choice."""
_MIN_ZOOMED_MICRO_BATCHES = 3
"""Micro-batches from which on a part of a step is magnified: with fewer, the whole step is close
enough."""
_LEGEND_COLUMNS = 5
"""Columns of the legend, at most; a choice that keeps them within the width."""


def plan_timeline_png(
    timelines: Sequence[Timeline], path: Path, *, title: str = "", subtitle: str = ""
) -> None:
    """Write a picture of `timelines` (any labels, recorded or predicted), 2800 px wide."""
    write_whole(path, timeline_png(timelines, title=title, subtitle=subtitle))


def timeline_png(
    timelines: Sequence[Timeline], *, title: str = "", subtitle: str = "", theme: Theme = LIGHT
) -> bytes:
    """PNG with a panel per timeline and, if micro-batches are known, first and last magnified."""
    assert timelines, "nothing to draw"
    end_ns = max(1, *(timeline.length_ns for timeline in timelines))
    groups = [("", [step_panel(timeline, end_ns) for timeline in timelines])]
    zoomed = _zoom(timelines)
    if zoomed:
        groups.append(("Zoom: the same length of time in mid-step", zoomed))
    height = _TITLE_IN + _LEGEND_IN + sum(_group_height(*group) for group in groups)
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=COLUMNS_PER_IN, facecolor=theme.background)
    _write(figure, height - 0.40, title or "One training step", theme.text, size=18, bold=True)
    _write(figure, height - 0.68, subtitle, theme.muted, size=12)
    top = height - _TITLE_IN
    for name, panels in groups:
        _draw_group(figure, top, name, panels, theme)
        top -= _group_height(name, panels)
    _draw_legend(figure, timelines, theme)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _zoom(timelines: Sequence[Timeline]) -> list[Panel]:
    """First and last timeline around their middle micro-batch, at one scale.

    Nothing if a step has fewer than three micro-batches: the whole step is then close enough.
    """
    chosen = list(dict.fromkeys((timelines[0], timelines[-1])))
    counts = [max((span.micro_batch for span in t.spans), default=0) for t in chosen]
    if min(counts) < _MIN_ZOOMED_MICRO_BATCHES:
        return []
    length_ns = max(t.length_ns // count for t, count in zip(chosen, counts, strict=True))
    panels = []
    for timeline, count in zip(chosen, counts, strict=True):
        middle = count // 2 + 1
        start_ns = min(s.start_ns for s in timeline.spans if s.micro_batch >= middle)
        panels.append(zoom_panel(timeline, start_ns, start_ns + length_ns))
    return panels


def _group_height(name: str, panels: Sequence[Panel]) -> float:
    inner = sum(panel.height + _HEADER_IN + _GAP_IN for panel in panels)
    return inner + _AXIS_IN + (_GROUP_IN if name else 0.0)


def _write(
    figure: Figure, y_in: float, text: str, color: str, *, size: float, bold: bool = False
) -> None:
    """Text at the left margin, `y_in` inches above the bottom."""
    x, y = _MARGIN_IN / _WIDTH_IN, y_in / figure.get_figheight()
    weight = "bold" if bold else "normal"
    figure.text(x, y, plain(text), fontsize=size, weight=weight, color=color)


def _draw_group(
    figure: Figure, top: float, name: str, panels: Sequence[Panel], theme: Theme
) -> None:
    """Draw panels under each other with one time axis below the last; `top` in inches."""
    height = figure.get_figheight()
    if name:
        top -= _GROUP_IN
        _write(figure, top + 0.08, name, theme.text, size=13, bold=True)
    for panel in panels:
        top -= _HEADER_IN + panel.height
        box = (_LEFT_IN / _WIDTH_IN, top / height, PLOT_IN / _WIDTH_IN, panel.height / height)
        axes = figure.add_axes(box)
        axis_name = "time from the left edge (ms)" if name else "time (ms)"
        draw_panel(axes, panel, theme, time_axis=axis_name if panel is panels[-1] else "")
        if not name:
            draw_saving(axes, panel, panels[0], theme)
        top -= _GAP_IN


def _draw_legend(figure: Figure, timelines: Sequence[Timeline], theme: Theme) -> None:
    """Kinds that occur, each as a light (forward) and a dark (backward) swatch."""
    names = legend_families(list(timelines))
    handles: list[Any] = [
        tuple(Patch(color=tone(name, strand, theme)) for strand in ("forward", "backward"))
        for name in names
    ]
    wait = Patch(facecolor=theme.exposed, edgecolor=theme.hatch, hatch="////", linewidth=0.0)
    legend = figure.legend(
        [*handles, wait],
        [*names, "exposed: compute waits for a collective"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(_MARGIN_IN / _WIDTH_IN, 0.0),
        borderpad=0.0,
        borderaxespad=0.8,
        ncols=min(_LEGEND_COLUMNS, len(names) + 1),
        frameon=False,
        fontsize=11,
        labelcolor=theme.text,
        handlelength=2.0,
        columnspacing=1.3,
        title="light: forward strand, dark: backward strand, empty: neither computing nor waiting",
        title_fontproperties={"size": 11},
        alignment="left",
    )
    legend.get_title().set_color(theme.muted)
