"""One panel of a step's picture: what one rank's compute lane and links did between two times.

From top to bottom: a ribbon per strand with its micro-batches, the compute lane with its exposed
waits hatched, a strip that shows those waits alone (they are what a plan removes), the links.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.timeline import WAIT, Span, Timeline
from interlace.report.short_spans import DrawnPiece, pieces
from interlace.report.theme import ALL_FAMILIES, Theme, family, tone
from interlace.text import milliseconds, percent

PLOT_IN = 12.5
"""Width of the time axis in inches; a choice."""
COLUMNS_PER_IN = 200
"""Columns of pixels per inch; a choice: the picture has twice the pixels of the width at which it
is meant to be read."""
_RIBBON, _COMPUTE, _EXPOSED, _LINK = "ribbon", "compute", "exposed", "link"
"""What a row of a panel can be."""
_HEIGHT_IN = {_RIBBON: 0.19, _COMPUTE: 0.50, _EXPOSED: 0.13, _LINK: 0.28}
"""Height of each kind of row in inches; a choice."""
_SPACE_IN = 0.04
"""Space between two rows in inches; a choice."""
_CHARACTER_IN = 0.078
"""Width in inches, about, of one character of the labels inside rectangles."""
_MS = 1e6
"""Nanoseconds of a millisecond."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A horizontal strip of a panel, in inches from the panel's bottom."""

    role: str
    label: str
    lane: str
    """A lane of the timeline, or the strand of a ribbon."""
    bottom: float
    height: float

    @property
    def strip(self) -> tuple[float, float]:
        return (self.bottom, self.height)


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline between two times, with the text above it at the left and at the right."""

    timeline: Timeline
    start_ns: int
    end_ns: int
    title: str
    note: str

    @property
    def rows(self) -> tuple[_Row, ...]:
        """The strips from bottom to top."""
        used = {span.strand for span in self.timeline.spans if self.clip(span)}
        strips = [(_LINK, f"{lane} link", lane) for lane in reversed(self.timeline.lanes[1:])]
        strips += [(_EXPOSED, "exposed", COMPUTE_LANE)] if self.timeline.collectives else []
        strips += [(_COMPUTE, COMPUTE_LANE, COMPUTE_LANE)]
        strips += [(_RIBBON, name, name) for name in ("backward", "forward") if name in used]
        rows, bottom = [], _SPACE_IN
        for role, label, lane in strips:
            rows.append(_Row(role, label, lane, bottom, _HEIGHT_IN[role]))
            bottom += _HEIGHT_IN[role] + _SPACE_IN
        return tuple(rows)

    @property
    def height(self) -> float:
        """Inches."""
        return self.rows[-1].bottom + self.rows[-1].height + _SPACE_IN

    def clip(self, span: Span) -> int:
        """Nanoseconds of a span that lie inside the panel."""
        return max(0, min(span.end_ns, self.end_ns) - max(span.start_ns, self.start_ns))

    def bar(self, start_ns: float, end_ns: float) -> tuple[float, float]:
        """Left edge and width in milliseconds on the panel's axis, cut at its ends."""
        low, high = max(start_ns, self.start_ns), min(end_ns, self.end_ns)
        return ((low - self.start_ns) / _MS, max(0.0, high - low) / _MS)


def step_panel(timeline: Timeline, end_ns: int) -> Panel:
    """A whole step on an axis that ends at `end_ns`."""
    exposed, total = timeline.exposed_ns(), timeline.communication_ns()
    note = (
        f"communication {milliseconds(total)} ms, exposed {milliseconds(exposed)} ms, "
        f"{percent(timeline.hidden_fraction())} hidden"
    )
    title = f"{timeline.label}   {milliseconds(timeline.length_ns)} ms"
    return Panel(timeline, 0, end_ns, title, note)


def zoom_panel(timeline: Timeline, start_ns: int, end_ns: int) -> Panel:
    """A part of a step, with the share of it that was spent waiting."""
    panel = Panel(timeline, start_ns, end_ns, timeline.label, "")
    waiting = sum(panel.clip(span) for span in timeline.spans if span.kind == WAIT)
    note = f"{percent(waiting / (end_ns - start_ns))} of this window is exposed communication"
    return Panel(timeline, start_ns, end_ns, timeline.label, note)


def draw_panel(axes: Axes, panel: Panel, theme: Theme, *, time_axis: str) -> None:
    """Fill `axes` with a panel; `time_axis` is the name of its axis, or empty to show none."""
    length_ms = (panel.end_ns - panel.start_ns) / _MS
    rows = panel.rows
    axes.set_facecolor(theme.background)
    axes.set_xlim(0, length_ms)
    axes.set_ylim(0, panel.height)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.tick_params(length=0, labelsize=11, labelcolor=theme.muted, labelbottom=bool(time_axis))
    axes.set_yticks([row.bottom + row.height / 2 for row in rows], [row.label for row in rows])
    axes.set_xlabel(time_axis, fontsize=11, color=theme.muted, labelpad=3)
    top = panel.height + 0.08
    axes.text(0, top, plain(panel.title), fontsize=13, weight="bold", color=theme.text)
    axes.text(length_ms, top, panel.note, fontsize=12, color=theme.text, ha="right")
    for row in rows:
        if row.role == _RIBBON:
            _draw_ribbon(axes, panel, row, theme)
        else:
            _draw_lane(axes, panel, row, theme)


def draw_saving(axes: Axes, panel: Panel, first: Panel, theme: Theme) -> None:
    """Say in the free space behind a step by how much it is shorter than that of the first panel,
    as both were recorded, if there is room."""
    length_ns, first_ns = panel.timeline.length_ns, first.timeline.length_ns
    start_ms, width_ms = panel.bar(length_ns, max(first_ns, length_ns))
    saved = f"{percent((first_ns - length_ns) / max(first_ns, 1))} shorter"
    texts = (f"recorded {saved} than {plain(first.timeline.label)}", f"recorded {saved}", saved)
    text = next((each for each in texts if _fits(panel, each, width_ms, character_in=0.12)), "")
    if not text:
        return
    row = next(row for row in panel.rows if row.role == _COMPUTE)
    y = row.bottom + row.height / 2
    arrow = {"arrowstyle": "<->", "color": theme.muted, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (start_ms, y), (start_ms + width_ms, y), arrowprops=arrow)
    style = {"fontsize": 12, "weight": "bold", "color": theme.text, "ha": "center"}
    axes.text(start_ms + width_ms / 2, y + 0.09, text, **style)


def _draw_ribbon(axes: Axes, panel: Panel, row: _Row, theme: Theme) -> None:
    """One bar per micro-batch from its strand's first start to its last end."""
    extent: dict[int, tuple[int, int]] = {}
    for span in panel.timeline.spans:
        if span.strand == row.lane and span.lane == COMPUTE_LANE and span.micro_batch:
            start, end = extent.get(span.micro_batch, (span.start_ns, span.end_ns))
            extent[span.micro_batch] = (min(start, span.start_ns), max(end, span.end_ns))
    color = tone("matmul", row.lane, theme)
    for micro_batch, (start, end) in extent.items():
        bar = panel.bar(start, end)
        axes.broken_barh([bar], row.strip, facecolor=color, edgecolor=theme.background)
        _label(axes, panel, row, bar, f"{row.lane[0].upper()}{micro_batch}", _ink(color))


def _drawn_spans(panel: Panel, row: _Row) -> Iterator[tuple[Span, tuple[str, str]]]:
    """The spans that a row shows, each with its family and strand."""
    for span in panel.timeline.spans:
        is_wait = span.kind == WAIT
        if span.lane == row.lane and (is_wait or row.role != _EXPOSED):
            yield span, (WAIT, "") if is_wait else (family(span), span.strand)


def _draw_lane(axes: Axes, panel: Panel, row: _Row, theme: Theme) -> None:
    whole = panel.bar(0, panel.timeline.length_ns)
    axes.broken_barh([whole], row.strip, facecolor=theme.row)
    found = pieces(
        _drawn_spans(panel, row),
        start_ns=panel.start_ns,
        end_ns=panel.end_ns,
        columns=int(PLOT_IN * COLUMNS_PER_IN),
    )
    groups: dict[tuple[bool, tuple[str, str]], list[DrawnPiece]] = {}
    for piece in found:
        groups.setdefault((piece.is_whole, piece.group), []).append(piece)
    for (is_wide, group), members in sorted(groups.items(), key=lambda item: item[0]):
        bars = [panel.bar(piece.start_ns, piece.end_ns) for piece in members]
        if row.role == _EXPOSED:
            axes.broken_barh(bars, row.strip, facecolor=theme.waiting)
        else:
            _draw_bars(axes, panel, row, bars, group, theme, is_wide=is_wide)


def _draw_bars(
    axes: Axes,
    panel: Panel,
    row: _Row,
    bars: list[tuple[float, float]],
    group: tuple[str, str],
    theme: Theme,
    *,
    is_wide: bool,
) -> None:
    """Rectangles of one colour; wide ones have an edge (a wait: hatching) and their name."""
    color = tone(*group, theme)
    is_wait = group[0] == WAIT
    hatched = is_wait and is_wide
    axes.broken_barh(
        bars,
        row.strip,
        facecolor=color,
        edgecolor=theme.hatch if hatched else theme.background,
        hatch="////" if hatched else None,
        linewidth=0.5 if is_wide and not is_wait else 0.0,
    )
    if not is_wide:
        return
    ink, backing = (theme.text, theme.exposed) if is_wait else (_ink(color), "none")
    name = "exposed" if is_wait else group[0].split(",")[0]
    for bar in bars:
        _label(axes, panel, row, bar, name, ink, backing)


def _fits(panel: Panel, text: str, width_ms: float, *, character_in: float) -> bool:
    width_in = width_ms * _MS / (panel.end_ns - panel.start_ns) * PLOT_IN
    return len(text) * character_in + 0.04 <= width_in


def _label(
    axes: Axes,
    panel: Panel,
    row: _Row,
    bar: tuple[float, float],
    text: str,
    ink: str,
    backing: str = "none",
) -> None:
    """Write `text` in the middle of a rectangle if it fits there."""
    x, width = bar
    if _fits(panel, text, width, character_in=_CHARACTER_IN):
        y = row.bottom + row.height / 2 - 0.005
        style = {"fontsize": 9.5, "ha": "center", "va": "center_baseline", "color": ink}
        box = {"facecolor": backing, "edgecolor": "none", "pad": 1.0}
        axes.text(x + width / 2, y, text, bbox=box, **style)


def _ink(color: tuple[float, float, float]) -> str:
    """Black or white, whichever reads better on `color`."""
    luminance = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    return "#16202c" if luminance > 0.55 else "#ffffff"


def legend_families(timelines: list[Timeline]) -> list[str]:
    """Families of operators that occur, in the legend's order."""
    present = {family(s) for t in timelines for s in t.spans if s.kind != WAIT}
    return [name for name in ALL_FAMILIES if name in present]


def plain(text: str) -> str:
    """`text` with dollar signs escaped, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")
