"""Charts of a run as SVG: loss, step times of the compared ways of running, load of experts."""

import io
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from interlace.report.tables import MODE_NAMES, ordered_modes
from interlace.report.theme import Theme
from interlace.text import number

_WIDTH_IN = 11.0
"""Width of a chart in inches; a choice that sets how large its text looks on the page."""
_BAR = 0.30
"""Height of a bar, a choice; two bars and a gap make one unit."""


def loss_svg(
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    unit: str,
    theme: Theme,
) -> bytes:
    """Loss in `unit` over steps: every training step as a line, evaluations as points."""
    figure, axes = _figure(3.6, theme)
    if train:
        steps, values = zip(*train, strict=True)
        axes.plot(steps, values, color=theme.train, linewidth=1.1, label="training")
    if held_out:
        steps, values = zip(*held_out, strict=True)
        style = {"marker": "o", "markersize": 5.5, "linewidth": 1.6}
        axes.plot(steps, values, color=theme.held_out, label="held-out text", **style)
        x, y = held_out[-1]
        place = {"xytext": (-4, 10), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"{y:.3f}", (x, y), color=theme.held_out, weight="bold", **place)
    axes.set_xlabel("step", color=theme.muted)
    axes.set_ylabel(unit, color=theme.muted)
    axes.grid(color=theme.grid, linewidth=0.8)
    # Asked for by name: matplotlib warns of its default where drawing takes over a second.
    axes.legend(frameon=False, labelcolor=theme.text, loc="best")
    return _svg(figure)


def expert_load_svg(loads: Sequence[tuple[int, Sequence[float]]], theme: Theme) -> bytes:
    """(step, share of each expert) as a heat map: steps from left to right, experts downwards; the
    colour is the share times the number of experts, 1 where tokens are dealt evenly."""
    count = len(loads[0][1])
    figure, axes = _figure(min(6.0, 1.6 + 0.16 * count), theme)
    grid = [[count * load[expert] for _, load in loads] for expert in range(count)]
    first, last = loads[0][0], loads[-1][0]
    image = axes.imshow(
        grid, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2,
        extent=(first - 0.5, last + 0.5, count - 0.5, -0.5),
    )  # fmt: skip
    axes.set_xlabel("step", color=theme.muted)
    axes.set_ylabel("expert", color=theme.muted)
    scale = figure.colorbar(image, ax=axes, ticks=[0, 1, 2], extend="max", pad=0.01)
    scale.ax.set_yticklabels(["none", "even", "twice"])
    scale.ax.tick_params(length=0, labelcolor=theme.muted)
    scale.outline.set_visible(False)
    return _svg(figure)


def step_time_svg(modes: Mapping[str, Mapping[str, Any]], theme: Theme) -> bytes:
    """Per way of running: median wall and CPU time of a step, with every step as a point."""
    names = ordered_modes(modes)
    figure, axes = _figure(0.75 + 0.85 * len(names), theme)
    for index, name in enumerate(names):
        wall, cpu = modes[name]["step_ms"], modes[name].get("cpu_ms")
        _bar(axes, index - _BAR / 2 - 0.02, wall, theme.train, theme, "wall time")
        if cpu:
            _bar(axes, index + _BAR / 2 + 0.02, cpu, theme.hatch, theme, "CPU time of rank 0")
    axes.set_yticks(range(len(names)), [MODE_NAMES.get(name, name) for name in names])
    axes.tick_params(axis="y", labelcolor=theme.text, labelsize=11)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(max(modes[name]["step_ms"]) for name in names) + 1e-9)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel("ms per step (median; line: fastest to slowest step)", color=theme.muted)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    axes.legend(
        first.values(),
        first.keys(),
        frameon=False,
        labelcolor=theme.text,
        ncols=2,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )
    return _svg(figure)


def _bar(
    axes: Axes, y: float, times: Sequence[float], color: str, theme: Theme, label: str
) -> None:
    middle = median(times)
    axes.barh(y, middle, _BAR, color=color, label=label)
    axes.plot([min(times), max(times)], [y, y], color=theme.text, linewidth=1.0)
    axes.plot(times, [y] * len(times), "|", color=theme.text, markersize=5, alpha=0.7)
    place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(f"{number(middle)} ms", (max(times), y), color=theme.text, **place)


def _figure(height_in: float, theme: Theme) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    figure.set_facecolor(theme.background)
    axes = figure.add_subplot()
    axes.set_facecolor(theme.background)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=theme.muted)
    return figure, axes


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
