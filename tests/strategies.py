"""Hypothesis strategies for operator graphs, their costs and orders. No torch."""

from collections.abc import Sequence

from hypothesis import strategies as st

from interlace.ir.graph import COMPUTE_LANE, GraphInput, Kind, Operator, OpGraph, merge
from orders import random_order

LINKS = ("dp", "tp")
_COMPUTE = (Kind.MATMUL, Kind.ATTENTION, Kind.ELEMENTWISE, Kind.ACCUMULATE, Kind.OTHER)
_COLLECTIVE = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
_SIZES = st.integers(0, 2**40)


@st.composite
def op_graphs(
    draw: st.DrawFn,
    *,
    operators: tuple[int, int] = (1, 7),
    links: Sequence[str] = LINKS,
    name: str = "forward",
) -> OpGraph:
    """A random graph: every operator depends on any of those before it, on any lane."""
    count = draw(st.integers(*operators))
    names = [f"op_{index}" for index in range(count)]
    found = []
    for index, own in enumerate(names):
        lane = draw(st.sampled_from((COMPUTE_LANE, *links)))
        kinds = _COMPUTE if lane == COMPUTE_LANE else _COLLECTIVE
        earlier = st.sets(st.sampled_from(names[:index]), max_size=3) if index else st.just(set())
        kind = draw(st.sampled_from(kinds))
        found.append(
            Operator(
                id=own,
                kind=kind,
                target=f"aten.{kind}.default",
                lane=lane,
                inputs=tuple(sorted(draw(earlier))),
                reads=tuple(sorted(draw(st.sets(st.sampled_from(("weight", "tokens", "kept")))))),
                key=f"{own} {lane}",
                bytes_in=draw(_SIZES),
                bytes_out=draw(_SIZES),
                flops=draw(_SIZES),
            )
        )
    return OpGraph(
        name=name,
        operators=tuple(found),
        inputs=(
            GraphInput("weight", "parameter", 8),
            GraphInput("tokens", "batch", 4),
            GraphInput("kept", "saved", draw(_SIZES)),
        ),
        outputs=tuple(sorted(draw(st.sets(st.sampled_from(names))))),
    )


@st.composite
def pair_graphs(draw: st.DrawFn, *, operators: tuple[int, int] = (1, 3)) -> OpGraph:
    """Two strands that do not depend on each other, merged as a plan merges them."""
    strands = {
        name: draw(op_graphs(operators=operators, name=name)) for name in ("forward", "backward")
    }
    return merge("pair", strands)


@st.composite
def solo_times(draw: st.DrawFn, graph: OpGraph, *, longest_ns: int = 20) -> dict[str, int]:
    """Nanoseconds of each operator; zero is allowed."""
    return {op.id: draw(st.integers(0, longest_ns)) for op in graph.operators}


@st.composite
def orders_of(draw: st.DrawFn, graph: OpGraph) -> tuple[str, ...]:
    """A valid order of a graph."""
    return random_order(graph, draw(st.integers(0, 2**32)))
