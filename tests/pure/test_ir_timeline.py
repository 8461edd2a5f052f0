"""Proves that exposed and hidden communication are counted as they are defined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.ir.graph import COMPUTE_LANE, OpGraph
from interlace.ir.timeline import WAIT, CollectiveRow, Span, Timeline, overlaps
from interlace.sim.lanes import simulate
from strategies import op_graphs, orders_of, solo_times


def compute(name: str, start: int, end: int) -> Span:
    return Span(name, "matmul", COMPUTE_LANE, start, end, "forward", 1)


def wait(name: str, start: int, end: int, micro_batch: int = 1) -> Span:
    return Span(name, WAIT, COMPUTE_LANE, start, end, "forward", micro_batch)


def link(
    name: str, start: int, end: int, *, lane: str = "tp", kind: str = "all_gather", mb: int = 1
) -> Span:
    return Span(name, kind, lane, start, end, "forward", mb, issue_ns=start, bytes=100)


# compute  a......  b...  g~~~~~ c..  s~~
# tp            g.............   s......
# dp       r................
STEP = Timeline(
    "by hand",
    0,
    (
        compute("a", 0, 10),
        link("g", 8, 30),
        link("r", 0, 25, lane="dp", kind="all_reduce"),
        compute("b", 10, 20),
        wait("g", 20, 30),
        compute("c", 30, 40),
        link("s", 32, 45, kind="reduce_scatter"),
        wait("s", 40, 45),
    ),
)


def test_a_step_worked_out_by_hand() -> None:
    """Two waits of 10 and 5 on 60 of communication: 25 % exposed."""
    assert STEP.length_ns == 45
    assert STEP.lanes == ("compute", "dp", "tp")
    assert [span.name for span in STEP.collectives] == ["g", "r", "s"]
    assert STEP.exposed_ns() == 15
    assert STEP.communication_ns() == 25 + 22 + 13
    assert STEP.hidden_fraction() == pytest.approx(1 - 15 / 60)
    assert STEP.collective_rows() == (
        CollectiveRow("all_reduce", "dp", 1, 100, 25, 0),
        CollectiveRow("all_gather", "tp", 1, 100, 22, 10),
        CollectiveRow("reduce_scatter", "tp", 1, 100, 13, 5),
    )
    assert [row.hidden_ns for row in STEP.collective_rows()] == [25, 12, 8]


def test_time_in_which_a_link_does_two_things_counts_once() -> None:
    """Spans on one lane may overlap where ends are bounds, not observations."""
    timeline = Timeline("", 0, (link("a", 0, 10), link("b", 5, 12), link("c", 6, 8)))
    assert timeline.communication_ns() == 12
    assert timeline.collective_rows()[0].busy_ns == 12
    assert timeline.collective_rows()[0].count == 3


def test_waits_go_to_the_collective_of_their_micro_batch() -> None:
    """The same name in two micro-batches of one row: both waits, each once."""
    timeline = Timeline(
        "",
        0,
        (link("g", 0, 5, mb=1), wait("g", 3, 5, 1), link("g", 5, 9, mb=2), wait("g", 5, 9, 2)),
    )
    (row,) = timeline.collective_rows()
    assert (row.count, row.exposed_ns, row.busy_ns) == (2, 6, 9)


def test_without_communication_all_is_hidden() -> None:
    for timeline in (Timeline("", 0, ()), Timeline("", 0, (compute("a", 0, 3),))):
        assert timeline.hidden_fraction() == 1.0
        assert timeline.exposed_ns() == timeline.communication_ns() == 0
        assert timeline.collective_rows() == ()
        assert timeline.lanes == ("compute",)
    assert Timeline("", 0, ()).length_ns == 0


def test_more_waiting_than_transfer_is_not_negative() -> None:
    """A rank also waits for a peer that has not come yet."""
    timeline = Timeline("", 0, (link("g", 9, 10), wait("g", 0, 10)))
    assert timeline.hidden_fraction() == 0.0
    assert timeline.collective_rows()[0].hidden_ns == 0


def test_overlapping_neighbours_are_found() -> None:
    """Spans that touch do not overlap; order of recording plays no part."""
    a, b, c = compute("a", 0, 5), compute("b", 5, 9), compute("c", 8, 10)
    assert overlaps((a, b)) == []
    assert overlaps((c, a, b)) == [(b, c)]
    assert overlaps(()) == []


@given(data=st.data(), graph=op_graphs(operators=(1, 15)))
def test_rows_add_up_to_the_whole(data: st.DataObject, graph: OpGraph) -> None:
    """Counts and bytes; all waiting but that at the very end belongs to a collective."""
    order, solo_ns = data.draw(orders_of(graph)), data.draw(solo_times(graph))
    timeline = simulate(graph, order, solo_ns)
    rows = timeline.collective_rows()
    assert sum(row.count for row in rows) == len(graph.collectives)
    assert sum(row.bytes for row in rows) == sum(
        max(op.bytes_in, op.bytes_out) for op in graph.collectives
    )
    at_end = sum(s.duration_ns for s in timeline.spans if s.kind == WAIT and s.name == "end")
    assert sum(row.exposed_ns for row in rows) + at_end == timeline.exposed_ns()
    assert sum(row.busy_ns for row in rows) == timeline.communication_ns()
    assert 0.0 <= timeline.hidden_fraction() <= 1.0
