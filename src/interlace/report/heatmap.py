"""A picture of overlap effectiveness: compute kinds against collectives."""

import io
from math import nan

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from interlace.ir.costs import CostTable
from interlace.report.cost_tables import oef_grid
from interlace.report.theme import LIGHT, Theme

_DPI = 200
"""Dots per inch of the picture; a choice, so that text stays sharp when magnified."""
_CELL_IN = (1.9, 0.62)
"""Width and height of a cell in inches; a choice: a number and the line below it fit."""
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 1.5, 1.5, 1.25, 0.35
"""Margins around the cells in inches, for labels, colour scale and title; a choice."""
_SUBTITLE_IN = 8.4
"""Least width of the picture in inches: the subtitle needs it."""
_LOW, _HIGH = "#cf4a3c", "#2f6fd0"
"""Colours of a pair of which nothing is hidden, and of one of which all is."""
_SUBTITLE = (
    "1: the shorter of the two is free; 0: no gain over one after the other.  "
    "Small: slow-down of compute / transfer"
)
"""What the numbers in a cell mean."""


def oef_png(table: CostTable, *, theme: Theme = LIGHT) -> bytes:
    """PNG with a cell per measured pair: OEF as number and colour, both slow-downs below it.

    Colours end at 0 (nothing of the shorter one is hidden) and 1 (all of it); numbers do not.
    """
    rows, columns, _ = oef_grid(table)
    assert rows, "nothing to draw"
    inner = (_CELL_IN[0] * len(columns), _CELL_IN[1] * len(rows))
    width = max(_SUBTITLE_IN, _LEFT_IN + inner[0] + _RIGHT_IN)
    height = _TOP_IN + inner[1] + _BOTTOM_IN
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=theme.background)

    def place(left_in: float, width_in: float) -> Axes:
        box = (left_in / width, _BOTTOM_IN / height, width_in / width, inner[1] / height)
        return figure.add_axes(box, facecolor=theme.row)

    image = _cells(place(_LEFT_IN, inner[0]), table, theme)
    scale = place(_LEFT_IN + inner[0] + 0.3, 0.18)
    figure.colorbar(image, cax=scale, ticks=[0, 0.5, 1])
    scale.tick_params(length=0, labelcolor=theme.muted)
    scale.spines[:].set_visible(False)
    left = 0.25 / width
    title = {"fontsize": 16, "weight": "bold", "color": theme.text}
    figure.text(left, 1 - 0.35 / height, "Overlap effectiveness", **title)
    figure.text(left, 1 - 0.62 / height, _SUBTITLE, fontsize=9.5, color=theme.muted)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _cells(axes: Axes, table: CostTable, theme: Theme) -> AxesImage:
    rows, columns, cells = oef_grid(table)
    shades = LinearSegmentedColormap.from_list("oef", [_LOW, theme.background, _HIGH])
    values = [[cells[r, c].oef if (r, c) in cells else nan for c in columns] for r in rows]
    image = axes.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")
    for (row, column), pair in cells.items():
        shade = shades(min(1.0, max(0.0, pair.oef)))
        style = {"ha": "center", "va": "center", "color": _ink(shade)}
        x, y = columns.index(column), rows.index(row)
        axes.text(x, y - 0.14, f"{pair.oef:.2f}", size=13, **style)
        slow = f"x {pair.compute_factor:.2f} / x {pair.transfer_factor:.2f}"
        axes.text(x, y + 0.27, slow, size=8.5, **style)
    _label(axes, rows, columns, theme)
    return image


def _label(axes: Axes, rows: list[str], columns: list[str], theme: Theme) -> None:
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelcolor=theme.text, labelsize=11)
    axes.spines[:].set_visible(False)
    axes.set_xticks([i - 0.5 for i in range(1, len(columns))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(rows))], minor=True)
    axes.grid(which="minor", color=theme.background, linewidth=3)
    axes.tick_params(which="minor", length=0)


def _ink(background: tuple[float, ...]) -> str:
    """White on dark colours, else nearly black."""
    red, green, blue = background[:3]
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5 else "#1c2128"
