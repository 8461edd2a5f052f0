"""The picture of the reshard bench: effective bandwidth by case and method, as the paper draws it.

Effective bandwidth is the bits of the whole tensor over the time of the move; copies of it do not
count. A line over each group is what the lower bound allows. To the time of a checkpoint on a RAM
disk that of its bytes on the NICs is added, without which it would pass under the links.
"""

import io
from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from interlace.bench.reshard_cases import FULL_TENSOR, LABELS, METHODS, OURS
from interlace.bench.reshard_rows import WIRED, Measured
from interlace.report.theme import LIGHT, Theme

_COLOURS = {
    "send_recv": "#c3c9d1",
    "local_all_gather": "#98a2ae",
    "broadcast": "#e8c48a",
    "load_balance": "#dd9f45",
    "search": "#b9741b",
    OURS: "#2f6fd0",
    FULL_TENSOR: "#c98fb4",
    WIRED: "#9c5f8a",
}
"""Of the bars, by method: greys and browns are the paper's, blue is ours."""
_BARS = (*(method.name for method in METHODS), FULL_TENSOR, WIRED)
"""Methods in the order of their bars, left to right."""
_GROUP_WIDTH = 0.84
"""Part of a case's width that its bars take up."""
_PANEL_IN, _GAP_IN, _TOP_IN, _BOTTOM_IN = 3.0, 0.75, 0.95, 0.95
_LEFT_IN, _RIGHT_IN, _CASE_IN = 0.9, 0.3, 1.5
_MIN_WIDTH_IN = 10.0
"""Least width of the picture in inches, so that its title fits."""
_DPI = 160
"""Pixels of an inch."""


def bandwidth_png(all_measured: Sequence[Measured], link: str, *, theme: Theme = LIGHT) -> bytes:
    """PNG with one panel for moves from one device and one for moves between meshes.

    `link` says how the links were made. Whiskers go from the slowest to the fastest repeat.
    """
    assert all_measured, "nothing to draw"
    one = [each for each in all_measured if each.case.name.startswith("1 to")]
    groups = [group for group in (one, [each for each in all_measured if each not in one]) if group]
    width = max(_MIN_WIDTH_IN, _LEFT_IN + _RIGHT_IN + _CASE_IN * max(map(len, groups)))
    height = _TOP_IN + _BOTTOM_IN + len(groups) * (_PANEL_IN + _GAP_IN) - _GAP_IN
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=theme.background)
    top = height - _TOP_IN
    for group in groups:
        top -= _PANEL_IN
        inner = width - _LEFT_IN - _RIGHT_IN
        box = (_LEFT_IN / width, top / height, inner / width, _PANEL_IN / height)
        _draw(figure.add_axes(box, facecolor=theme.row), group, theme)
        top -= _GAP_IN
    title = {"fontsize": 16, "weight": "bold", "color": theme.text}
    figure.text(0.25 / width, 1 - 0.38 / height, "Cross-mesh resharding", **title)
    subtitle = f"Bits of the tensor over the time to move it; {link}"
    figure.text(0.25 / width, 1 - 0.66 / height, subtitle, fontsize=10.5, color=theme.muted)
    _legend(figure, theme, left=0.25 / width)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Axes, group: Sequence[Measured], theme: Theme) -> None:
    bar = _GROUP_WIDTH / len(_BARS)
    for index, method in enumerate(_BARS):
        rates = [[_mbit_per_s(each, time) for time in each.repeats(method)] for each in group]
        middles = [median(rate) for rate in rates]
        below = [middle - min(rate) for middle, rate in zip(middles, rates, strict=True)]
        above = [max(rate) - middle for middle, rate in zip(middles, rates, strict=True)]
        axes.bar(
            [place - _GROUP_WIDTH / 2 + (index + 0.5) * bar for place in range(len(group))],
            middles,
            bar * 0.92,
            color=_COLOURS[method],
            yerr=[below, above],
            error_kw={"elinewidth": 0.8, "ecolor": theme.waiting},
        )
    for place, each in enumerate(group):
        bound = _mbit_per_s(each, each.lower_bound_ms)
        edges = (place - _GROUP_WIDTH / 2, place + _GROUP_WIDTH / 2)
        axes.plot(edges, (bound, bound), color=theme.text, linewidth=1.4)
    axes.set_xticks(range(len(group)), [_title(each) for each in group])
    axes.set_xlim(-0.6, len(group) - 0.4)
    axes.set_ylabel("effective bandwidth (Mbit/s)", color=theme.muted)
    axes.tick_params(length=0, labelcolor=theme.text, labelsize=9.5)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _mbit_per_s(measured: Measured, time_ms: float) -> float:
    return measured.case.tensor_bytes * 8 / (time_ms * 1e3)


def _title(measured: Measured) -> str:
    """`case 6`, and under it both layouts."""
    case = measured.case
    if case.name.startswith("1 to"):
        return case.name
    both = (case.source, case.destination)
    sides = [f"({side.hosts},{side.devices}) {side.spec}" for side in both]
    return "\n".join((case.name, *sides))


def _legend(figure: Figure, theme: Theme, *, left: float) -> None:
    handles: list[Patch | Line2D] = [Patch(color=_COLOURS[method]) for method in _BARS]
    figure.legend(
        [*handles, Line2D([], [], color=theme.text, linewidth=1.4)],
        [*(LABELS.get(method, "checkpoint + wire") for method in _BARS), "lower bound"],
        loc="lower left",
        bbox_to_anchor=(left, 0.0),
        ncols=len(_BARS) + 1,
        frameon=False,
        fontsize=9.5,
        labelcolor=theme.text,
        handlelength=1.2,
        columnspacing=1.2,
    )
