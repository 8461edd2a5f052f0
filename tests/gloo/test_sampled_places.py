"""What a rank sees of an operator that is run at several places of a step, from recorded times that
are given. No processes."""

from collections.abc import Iterator

import pytest

from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.ir.timeline import Span, Timeline
from interlace.measure.alone import WARM_UP, sampled

PLACES = {"layer_0": 1_000_000, "layer_1": 9_000_000}
"""By operator: its time in ns, of one key."""
REPEATS = 3


def timelines(extra_ns: tuple[int, ...]) -> Iterator[Timeline]:
    """Runs of both layers; each repeat takes so much longer than the first, and runs before those
    that count, much longer."""
    for late in (*[50_000_000] * WARM_UP, *extra_ns):
        spans, now = [], 0
        for name, ns in PLACES.items():
            end = now + ns + late
            spans.append(Span(name, Kind.MATMUL, COMPUTE_LANE, now, end, "forward"))
            now = end
        yield Timeline("profile", 0, tuple(spans))


@pytest.mark.parametrize(
    ("extra_ns", "solo_ns", "varies"),
    [((0, 0, 0), 5_000_000, False), ((0, 300_000, 600_000), 5_300_000, True)],
)
def test_layers_that_are_unlike_do_not_vary(
    extra_ns: tuple[int, ...], solo_ns: int, varies: bool
) -> None:
    """The mean of both layers counts, and of spreads that over repeats of one of them: a tenth of
    what lies between layers."""
    operators = tuple(
        Operator(name, Kind.MATMUL, "t", COMPUTE_LANE, (), (), "layer", 1, 1, 1) for name in PLACES
    )
    graphs = {"forward": OpGraph("forward", operators, (), ())}
    runs = timelines(extra_ns)
    found = sampled(lambda: next(runs), graphs, REPEATS)
    assert found.solo == pytest.approx({"layer": solo_ns})
    assert (found.spreads["layer"] > 0) == varies
    assert found.spreads["layer"] < 800_000
