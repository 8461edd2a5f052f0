"""Draw docs/pictures/decompose.png: both forms on four ranks, and one rank by three ways."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from interlace.report.theme import LIGHT

PATH = Path(__file__).parents[1] / "docs" / "pictures" / "decompose.png"
RANKS = 4
SEND = 0.8
"""Time of a transfer, where computing a slice takes 1."""
HUES = ("#2f6fd0", "#12918a", "#e08a1e", "#c2448f")
"""Of the slices a to d, which belong to ranks A to D."""
END = RANKS + (RANKS - 1) * SEND
COMPUTE, LINK = 0.62, 0.34
"""Heights of lanes; a rank takes 1.16."""
PITCH = 1.16


class Box(NamedTuple):
    """A slice on a lane of a rank; `owner` is None for a whole collective or matmul."""

    rank: int
    start: float
    length: float
    text: str
    owner: int | None
    sent: bool


def gather_form() -> Iterator[Box]:
    """Own slice first; what has arrived travels on while it is computed with."""
    for rank in range(RANKS):
        for step in range(RANKS):
            owner = (rank - step) % RANKS
            name = "abcd"[owner]
            yield Box(rank, step, 1, name, owner, False)
            if step < RANKS - 1:
                to = "ABCD"[(rank + 1) % RANKS]
                yield Box(rank, step, SEND, f"{name} to {to}", owner, True)


def scatter_form() -> Iterator[Box]:
    """Own slice last; each rank adds its part to the sum that arrived and passes it on."""
    for rank in range(RANKS):
        for step in range(RANKS):
            owner = (rank - 1 - step) % RANKS
            name = "abcd"[owner]
            yield Box(rank, step, 1, name, owner, False)
            if step < RANKS - 1:
                to = "ABCD"[(rank + 1) % RANKS]
                yield Box(rank, step + 1, SEND, f"{name} ({step + 1}) to {to}", owner, True)


def vanilla(*, gather: bool, row: int) -> Iterator[Box]:
    """The whole collective, then the whole matmul, or the other way round."""
    collective = (RANKS - 1) * SEND
    yield Box(row, collective if gather else 0, RANKS, "matmul", None, False)
    name = "all-gather" if gather else "reduce-scatter"
    yield Box(row, 0 if gather else RANKS, collective, name, None, True)


def sliced(*, gather: bool, row: int, slices: int = 4) -> Iterator[Box]:
    """Collectives of a k-th of the rows, each beside the matmul of another k-th."""
    compute, collective = RANKS / slices, (RANKS - 1) * SEND / slices
    for k in range(slices):
        first = collective + k * compute if gather else k * compute
        sent = k * collective if gather else (k + 1) * compute
        yield Box(row, first, compute, f"{k + 1}/{slices}", None, False)
        yield Box(row, sent, collective, f"{k + 1}/{slices}", None, True)


def decomposed(boxes: Iterator[Box], *, row: int) -> Iterator[Box]:
    """Rank A's part of a form, without names."""
    for box in boxes:
        if box.rank == 0:
            yield box._replace(rank=row, text="")


def draw(axes: Axes, boxes: Iterator[Box], names: Sequence[str], title: str, ends: bool) -> None:
    """Rows from top to bottom, each a compute lane above a link lane; `ends` marks the end of each
    row's last box."""
    axes.set_title(title, loc="left", fontsize=11.5, color=LIGHT.text, weight="bold")
    axes.set_xlim(0, END + 0.45)
    axes.set_ylim(-len(names) * PITCH + 0.1, 0.06)
    axes.axis("off")
    last = dict.fromkeys(range(len(names)), 0.0)
    for row, name in enumerate(names):
        top = -row * PITCH
        for y, height in ((top - COMPUTE, COMPUTE), (top - COMPUTE - LINK, LINK)):
            axes.add_patch(Rectangle((0, y), END, height, color=LIGHT.row, linewidth=0))
        middle = top - (COMPUTE + LINK) / 2
        axes.text(-0.08, middle, name, ha="right", va="center", fontsize=10, color=LIGHT.text)
    for box in boxes:
        last[box.rank] = max(last[box.rank], box.start + box.length)
        draw_box(axes, box)
    for row, end in last.items():
        if ends:
            middle = -row * PITCH - COMPUTE / 2
            axes.text(end + 0.06, middle, f"{end:.1f}", va="center", fontsize=9.5, color=LIGHT.text)


def draw_box(axes: Axes, box: Box) -> None:
    """Full colour for compute; light with an edge for transfers."""
    top = -box.rank * PITCH - (COMPUTE if box.sent else 0)
    height = LINK if box.sent else COMPUTE
    hue = LIGHT.muted if box.owner is None else HUES[box.owner]
    axes.add_patch(
        Rectangle(
            (box.start + 0.02, top - height + 0.03),
            box.length - 0.04,
            height - 0.06,
            facecolor=(hue + "40") if box.sent else hue,
            edgecolor=hue,
            linewidth=0.8,
        )
    )
    axes.text(
        box.start + box.length / 2,
        top - height / 2,
        box.text,
        ha="center",
        va="center",
        fontsize=7.5 if box.sent else 9,
        color=LIGHT.text if box.sent else LIGHT.background,
    )


def main() -> int:
    """Write the picture."""
    figure = Figure(figsize=(14, 8.2), dpi=140, facecolor=LIGHT.background)
    ranks = [f"rank {name}" for name in "ABCD"]
    ways = ["vanilla", "slicing by 4", "decomposed"]
    for column, (form, gather) in enumerate(((gather_form, True), (scatter_form, False))):
        left, width = 0.085 + 0.495 * column, 0.405
        upper = figure.add_axes((left, 0.43, width, 0.50))
        name = (
            "Gather form: all-gather, then matmul"
            if gather
            else ("Scatter form: matmul, then reduce-scatter")
        )
        draw(upper, form(), ranks, name, ends=False)
        lower = figure.add_axes((left, 0.06, width, 0.31))
        boxes = (
            *vanilla(gather=gather, row=0),
            *sliced(gather=gather, row=1),
            *decomposed(form(), row=2),
        )
        draw(lower, iter(boxes), ways, "Rank A by three ways (computing a slice takes 1.0)", True)
    figure.text(
        0.018,
        0.02,
        f"Per rank: compute above, link below. a to d are the slices of ranks A to D; a transfer "
        f"takes {SEND} of the time that computing a slice takes. (2): the sum of two ranks' parts.",
        fontsize=10,
        color=LIGHT.muted,
    )
    FigureCanvasAgg(figure).print_png(PATH, metadata={"Software": None})
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
