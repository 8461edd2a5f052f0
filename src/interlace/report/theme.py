"""Colours of every picture, for a light and a dark page, and how kinds of operators map to them."""

from dataclasses import dataclass

from matplotlib.colors import to_rgb

from interlace.ir.graph import COLLECTIVES, COMPUTE_LANE, Kind
from interlace.ir.timeline import WAIT, Span

FAMILIES = {
    Kind.MATMUL: "matmul",
    Kind.ATTENTION: "attention",
    Kind.ELEMENTWISE: "element-wise, norm",
    Kind.REDUCTION: "element-wise, norm",
    Kind.MEMORY: "memory, other",
    Kind.EMBEDDING: "memory, other",
    Kind.ACCUMULATE: "memory, other",
    Kind.OTHER: "memory, other",
    Kind.ALL_GATHER: "all-gather",
    Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.ALL_TO_ALL: "all-to-all, send",
    Kind.SEND: "all-to-all, send",
    Kind.BROADCAST: "broadcast",
}
"""What the legend calls each kind of operator."""
ISSUE = "issuing a collective"
"""A collective on the compute lane: the time that the rank spends to start it."""
ALL_FAMILIES = (*dict.fromkeys(FAMILIES.values()), ISSUE)
"""Everything that the legend can name, in its order."""

_HUES = {
    "matmul": "#2f6fd0",
    "attention": "#7a4fc9",
    "element-wise, norm": "#12918a",
    "memory, other": "#5d7f4e",
    "all-gather": "#e08a1e",
    "reduce-scatter": "#cf4a3c",
    "all-reduce": "#c2448f",
    "all-to-all, send": "#9b6a3a",
    "broadcast": "#b8a11a",
    ISSUE: "#64748b",
}
"""Colour of each family, before its tone tells the strand."""
_FORWARD_TINT = 0.45
"""How far towards white (0 to 1) the forward strand is drawn; a choice, to be told from
backward."""
_BACKWARD_SHADE = 0.12
"""How far towards black (0 to 1) the backward strand is drawn; a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours that depend on the page's background."""

    background: str
    text: str
    muted: str
    grid: str
    row: str
    """Background of a lane: the colour of doing nothing."""
    exposed: str
    hatch: str
    waiting: str
    """Ink of the strip that shows waits alone."""
    train: str
    held_out: str


LIGHT = Theme(
    background="#ffffff",
    text="#1c2128",
    muted="#5b6470",
    grid="#dfe3e8",
    row="#f4f6f8",
    exposed="#dfe2e6",
    hatch="#8d96a1",
    waiting="#39424e",
    train="#2f6fd0",
    held_out="#e0641e",
)
"""Colours on a white page."""
DARK = Theme(
    background="#14181e",
    text="#e4e8ed",
    muted="#9aa4b1",
    grid="#2b323b",
    row="#1d232b",
    exposed="#39414b",
    hatch="#8c96a3",
    waiting="#c3cad3",
    train="#6ea3f5",
    held_out="#f59a5c",
)
"""Colours on a dark page."""


def family(span: Span) -> str:
    """The legend's name for what a span does; unknown kinds count as other."""
    if span.kind in COLLECTIVES and span.lane == COMPUTE_LANE:
        return ISSUE
    return FAMILIES[Kind(span.kind)] if span.kind in FAMILIES else FAMILIES[Kind.OTHER]


def tone(family_name: str, strand: str, theme: Theme) -> tuple[float, float, float]:
    """RGB of a family: light for the forward strand, dark for the backward, else in between."""
    if family_name == WAIT:
        return to_rgb(theme.exposed)
    red, green, blue = to_rgb(_HUES[family_name])
    if strand == "forward":
        tint = _FORWARD_TINT
        return (red + (1 - red) * tint, green + (1 - green) * tint, blue + (1 - blue) * tint)
    shade = 1 - _BACKWARD_SHADE if strand == "backward" else 1.0
    return (red * shade, green * shade, blue * shade)
