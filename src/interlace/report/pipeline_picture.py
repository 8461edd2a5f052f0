"""The picture of a pipeline's step: a lane for each rank, a rectangle for each pass.

Hue tells what a pass is, shade which chunk it runs through, the number its micro-batch. Of an
action with several passes each has a strip of the height. What is empty is the bubble.
"""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from interlace.ir.actions import Action
from interlace.report.theme import LIGHT, Theme
from interlace.schedules.verify import pass_of
from interlace.sim.pipeline_step import ACTION, MEASURED, ComparedStep, PipelineStep
from interlace.text import milliseconds, percent

DOTS_PER_IN = 200
"""Dots per inch of the picture; a choice, as in `plan_picture`."""
_WIDTH_IN, _LEFT_IN, _RIGHT_IN = 14.0, 0.8, 0.2
"""Width in inches, and the margins beside the time axis; a choice."""
_LANE_IN, _TITLE_IN, _AXIS_IN, _LEGEND_IN = 0.42, 0.95, 0.45, 0.45
"""Heights in inches of a lane, the title, the time axis and the legend; a choice."""
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}
"""What the legend calls each pass."""
_HUES = {"F": "#2f6fd0", "B": "#d9691e", "I": "#d0342c", "W": "#2e8b57"}
"""Colour of each pass."""
_PALEST = 0.55
"""How far towards white (0 to 1) the last chunk of a rank is drawn; a choice."""
_INKS = ("#ffffff", "#1c2128")
"""Colours of numbers, on full colours and on pale ones."""
_CHARACTER_IN = 0.085
"""Width in inches of one digit, about: numbers are left out where they do not fit."""
_MS = 1e6
"""Nanoseconds of a millisecond."""
_FRAME = 0.04
"""Space around rectangles, as a share of a lane; a choice."""


def pipeline_page_png(compared: ComparedStep, theme: Theme = LIGHT) -> bytes:
    """PNG of a step that was measured."""
    title = f"One training step on the {len(compared.actions)} ranks of a pipeline"
    return pipeline_png(compared.actions, compared.measured, title=title, theme=theme)


def pipeline_png(
    ranks: Sequence[Sequence[Action]], step: PipelineStep, *, title: str, theme: Theme = LIGHT
) -> bytes:
    """PNG, 2800 px wide, of a step of these actions: simulated, or measured if its timelines are
    called so."""
    height = _TITLE_IN + _AXIS_IN + _LEGEND_IN + len(ranks) * _LANE_IN
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=DOTS_PER_IN, facecolor=theme.background)
    figure.text(0.02, (height - 0.40) / height, title, fontsize=17, weight="bold", color=theme.text)
    how = "as measured" if step.timelines[0].label == MEASURED else "by simulation"
    subtitle = (
        f"{milliseconds(step.step_ns)} ms {how}; bubble {percent(step.bubble_fraction)} of "
        f"all ranks' time; values of at most {max(step.peak_chunks)} chunks kept on a rank"
    )
    figure.text(0.02, (height - 0.70) / height, subtitle, fontsize=12, color=theme.muted)
    plot_in = _WIDTH_IN - _LEFT_IN - _RIGHT_IN
    bottom = (_AXIS_IN + _LEGEND_IN) / height
    box = (_LEFT_IN / _WIDTH_IN, bottom, plot_in / _WIDTH_IN, len(ranks) * _LANE_IN / height)
    axes = figure.add_axes(box)
    _set_up(axes, len(ranks), step.step_ns, theme)
    per_ns = plot_in / max(1, step.step_ns)
    for rank, actions in enumerate(ranks):
        spans = [span for span in step.timelines[rank].spans if span.kind == ACTION]
        chunks = sorted({slot.strand.chunk or 0 for a in actions for slot in a.slots})
        for action, span in zip(actions, spans, strict=True):
            width = span.end_ns - span.start_ns
            _draw_action(axes, action, chunks, (span.start_ns, rank, width), width * per_ns, theme)
    _draw_legend(figure, ranks, theme)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _set_up(axes: Axes, ranks: int, end_ns: int, theme: Theme) -> None:
    axes.set_xlim(0, max(1, end_ns))
    axes.set_ylim(ranks, 0)
    axes.set_facecolor(theme.row)
    axes.set_yticks([rank + 0.5 for rank in range(ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(ranks)], color=theme.text, fontsize=11)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / _MS:g}")
    axes.set_xlabel("time (ms)", color=theme.muted, fontsize=11)
    axes.tick_params(colors=theme.muted, length=0)
    for line in axes.spines.values():
        line.set_visible(False)
    for rank in range(1, ranks):
        axes.axhline(rank, color=theme.background, linewidth=2)


def _draw_action(
    axes: Axes,
    action: Action,
    chunks: Sequence[int],
    place: tuple[int, int, int],
    width_in: float,
    theme: Theme,
) -> None:
    """One rectangle for each pass, under each other. `place`: start in ns, rank, width in ns."""
    start, rank, width = place
    strip = (1 - 2 * _FRAME) / len(action.slots)
    for number, slot in enumerate(action.slots):
        letter, chunk, micro_batch = pass_of(slot)
        top = rank + _FRAME + number * strip
        tint = _PALEST * chunks.index(chunk) / max(1, len(chunks) - 1)
        color = tuple(part + (1 - part) * tint for part in to_rgb(_HUES[letter]))
        axes.add_patch(
            Rectangle((start, top), width, strip, facecolor=color, edgecolor=theme.background,
                      linewidth=0.6)
        )  # fmt: skip
        text = str(micro_batch)
        if width_in > _CHARACTER_IN * (len(text) + 0.3):
            axes.text(
                start + width / 2, top + strip / 2, text, ha="center", va="center_baseline",
                fontsize=9 if len(action.slots) == 1 else 8, color=_INKS[tint >= _PALEST / 2],
            )  # fmt: skip


def _draw_legend(figure: Figure, ranks: Sequence[Sequence[Action]], theme: Theme) -> None:
    found = {pass_of(slot)[0] for actions in ranks for action in actions for slot in action.slots}
    shown = [letter for letter in _NAMES if letter in found]
    several = any(len({s.strand.chunk for a in actions for s in a.slots}) > 1 for actions in ranks)
    legend = figure.legend(
        [Patch(color=_HUES[letter]) for letter in shown],
        [_NAMES[letter] for letter in shown],
        loc="lower left", ncols=len(shown) + 1, frameon=False, fontsize=11, labelcolor=theme.text,
        bbox_to_anchor=(0.01, 0.0),
        title="paler: later chunks of the rank" if several else None,
        title_fontproperties={"size": 10}, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(theme.muted)
