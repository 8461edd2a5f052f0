"""Proves that the simulator does what its rules say, on cases worked out by hand and at random."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.ir.costs import Contention
from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.ir.timeline import WAIT, overlaps
from interlace.sim.lanes import simulate
from strategies import op_graphs, orders_of, pair_graphs, solo_times


def graph(*rows: tuple[str, str, str]) -> OpGraph:
    """Operators from (name, lane, names of inputs)."""
    operators = tuple(
        Operator(
            id=name,
            kind=Kind.MATMUL if lane == COMPUTE_LANE else Kind.ALL_GATHER,
            target="t",
            lane=lane,
            inputs=tuple(inputs.split()),
            reads=(),
            key=name,
            bytes_in=100,
            bytes_out=200,
            flops=0,
        )
        for name, lane, inputs in rows
    )
    return OpGraph("forward", operators, (), ())


def spans(timeline: Any) -> list[tuple[str, str, str, int, int]]:
    return [(s.name, str(s.kind), s.lane, s.start_ns, s.end_ns) for s in timeline.spans]


def test_compute_waits_for_a_collective() -> None:
    """a 10, gather 30 under b 20: c waits the 10 that are left."""
    g = graph(("a", "compute", ""), ("g", "tp", "a"), ("b", "compute", "a"), ("c", "compute", "g"))
    timeline = simulate(g, g.order, {"a": 10, "g": 30, "b": 20, "c": 5}, label="by hand")
    assert spans(timeline) == [
        ("a", "matmul", "compute", 0, 10),
        ("g", "all_gather", "tp", 10, 40),
        ("b", "matmul", "compute", 10, 30),
        ("g", "wait", "compute", 30, 40),
        ("c", "matmul", "compute", 40, 45),
    ]
    assert (timeline.length_ns, timeline.exposed_ns(), timeline.label) == (45, 10, "by hand")
    assert timeline.collectives[0].bytes == 200


def test_collectives_queue_on_their_link_and_not_on_others() -> None:
    """Two on `tp` run one after the other in issue order, one on `dp` beside them."""
    g = graph(("x", "tp", ""), ("y", "tp", ""), ("z", "dp", ""), ("end", "compute", "x y z"))
    timeline = simulate(g, g.order, {"x": 10, "y": 5, "z": 12, "end": 1})
    links = [(s.name, s.issue_ns, s.start_ns, s.end_ns) for s in timeline.collectives]
    assert links == [("x", 0, 0, 10), ("y", 0, 10, 15), ("z", 0, 0, 12)]
    assert (timeline.length_ns, timeline.exposed_ns()) == (16, 15)


def test_a_collective_waits_for_the_one_it_needs() -> None:
    """The issuing thread blocks: what comes later in the order is held up as well."""
    g = graph(("x", "tp", ""), ("y", "dp", "x"), ("a", "compute", ""))
    timeline = simulate(g, g.order, {"x": 10, "y": 5, "a": 3})
    assert ("x", "wait", "compute", 0, 10) in spans(timeline)
    assert ("y", "all_gather", "dp", 10, 15) in spans(timeline)
    assert ("a", "matmul", "compute", 10, 13) in spans(timeline)


def test_the_end_waits_for_collectives_that_nobody_needed() -> None:
    """A phase is over when all its collectives are."""
    g = graph(("a", "compute", ""), ("x", "tp", "a"))
    timeline = simulate(g, g.order, {"a": 10, "x": 7})
    assert spans(timeline)[-1] == ("end", "wait", "compute", 10, 17)
    assert (timeline.length_ns, timeline.exposed_ns()) == (17, 7)


def test_issuing_holds_the_compute_lane() -> None:
    """Also when the transfer is shorter than issuing it."""
    g = graph(("x", "tp", ""), ("a", "compute", ""))
    timeline = simulate(g, g.order, {"x": 1, "a": 10}, issue_ns=4)
    assert spans(timeline) == [
        ("x", "all_gather", "tp", 0, 1),
        ("x", "all_gather", "compute", 0, 4),
        ("a", "matmul", "compute", 4, 14),
    ]
    last = simulate(g, ("a", "x"), {"x": 1, "a": 10}, issue_ns=4)
    assert last.length_ns == 14


def test_an_empty_order_takes_no_time() -> None:
    timeline = simulate(graph(), (), {})
    assert (timeline.spans, timeline.length_ns) == ((), 0)


@pytest.mark.parametrize("graphs", [op_graphs(operators=(1, 15)), pair_graphs(operators=(1, 8))])
@given(data=st.data())
def test_every_simulated_timeline_is_sound(data: st.DataObject, graphs: Any) -> None:
    """No lane does two things at once, inputs come first, and the parts add up."""
    g = data.draw(graphs)
    order, solo_ns = data.draw(orders_of(g)), data.draw(solo_times(g))
    issue_ns = data.draw(st.integers(0, 3))
    timeline = simulate(g, order, solo_ns, issue_ns=issue_ns)
    own = {s.name: s for s in timeline.spans if s.kind != WAIT and s.lane == g.by_id[s.name].lane}
    assert set(own) == set(g.order)
    for lane in timeline.lanes:
        # A span of no length may share its moment with another.
        busy = tuple(s for s in timeline.spans if s.lane == lane and s.duration_ns)
        assert overlaps(busy) == []
    for op in g.operators:
        assert own[op.id].duration_ns == solo_ns[op.id]
        for source in op.inputs:
            assert own[source].end_ns <= own[op.id].start_ns
        if op.is_collective:
            assert own[op.id].issue_ns <= own[op.id].start_ns
    compute = sum(solo_ns[op.id] for op in g.operators if not op.is_collective)
    issuing = issue_ns * len(g.collectives)
    assert timeline.length_ns == compute + issuing + timeline.exposed_ns()


@given(data=st.data(), g=op_graphs(operators=(1, 15)))
def test_one_strand_of_compute_alone_takes_the_sum(data: st.DataObject, g: OpGraph) -> None:
    """With free collectives every order takes as long as its compute."""
    solo_ns = data.draw(solo_times(g))
    free = {op.id: 0 if op.is_collective else solo_ns[op.id] for op in g.operators}
    timeline = simulate(g, data.draw(orders_of(g)), free)
    assert (timeline.length_ns, timeline.exposed_ns()) == (sum(free.values()), 0)


def contention(
    compute: float = 1.0, transfer: float = 1.0, links: dict[str, str] | None = None
) -> Contention:
    return Contention({(Kind.MATMUL, Kind.ALL_GATHER): (compute, transfer)}, links or {})


def test_things_that_overlap_slow_down_while_they_do() -> None:
    """gather 30 at half speed under b 20 at 1 / 1.25: b takes 25, in which 12.5 of the gather are
    done; the other 17.5 run at full speed."""
    g = graph(("g", "tp", ""), ("b", "compute", ""), ("c", "compute", "g"))
    timeline = simulate(g, g.order, {"g": 30, "b": 20, "c": 4}, contention=contention(1.25, 2.0))
    assert spans(timeline) == [
        ("g", "all_gather", "tp", 0, 42),
        ("b", "matmul", "compute", 0, 25),
        ("g", "wait", "compute", 25, 42),
        ("c", "matmul", "compute", 42, 46),
    ]


def test_a_transfer_that_ends_first_frees_the_operator() -> None:
    """gather 10 ends at 10, when the operator has done 8 of 20; 12 are left."""
    g = graph(("g", "tp", ""), ("b", "compute", ""))
    timeline = simulate(g, g.order, {"g": 10, "b": 20}, contention=contention(1.25))
    assert spans(timeline)[1] == ("b", "matmul", "compute", 0, 22)


def test_lanes_of_one_link_share_its_bandwidth() -> None:
    """x 10 and z 30 on one link: both at half speed until 20, then z alone for its other 20; on
    links of their own they would take 10 and 30."""
    g = graph(("x", "tp", ""), ("z", "dp", ""), ("end", "compute", "x z"))
    times = {"x": 10, "z": 30, "end": 1}
    shared = simulate(g, g.order, times, contention=contention(links={"tp": "nic", "dp": "nic"}))
    assert [(s.name, s.end_ns) for s in shared.collectives] == [("x", 20), ("z", 40)]
    apart = simulate(g, g.order, times, contention=contention(links={"tp": "nvlink", "dp": "nic"}))
    assert [(s.name, s.end_ns) for s in apart.collectives] == [("x", 10), ("z", 30)]


def test_lanes_of_one_queue_go_one_after_another() -> None:
    """z is issued second and waits for x, at whose end it has the link for itself; on a link that
    both lanes share with a third, the two count as one."""
    g = graph(("x", "tp", ""), ("z", "counts", ""), ("end", "compute", "x z"))
    times = {"x": 10, "z": 3, "end": 1}
    queued = simulate(g, g.order, times, contention=Contention({}, {}, {"counts": "tp"}))
    spans_of = [(s.name, s.lane, s.issue_ns, s.start_ns, s.end_ns) for s in queued.collectives]
    assert spans_of == [("x", "tp", 0, 0, 10), ("z", "counts", 0, 10, 13)]
    three = graph(
        ("x", "tp", ""), ("z", "counts", ""), ("w", "dp", ""), ("end", "compute", "x z w")
    )
    link = {"tp": "nic", "dp": "nic"}
    shared = simulate(
        three, three.order, times | {"w": 10}, contention=Contention({}, link, {"counts": "tp"})
    )
    assert [(s.name, s.end_ns) for s in shared.collectives] == [("x", 20), ("z", 23), ("w", 20)]


def test_a_transfer_close_behind_another_takes_longer() -> None:
    """By 4, less the pause before it: y right behind x the whole 4, z after a pause of 3 one more,
    and x, before which nobody used the link, nothing. What has no such time is never longer."""
    g = graph(
        ("x", "tp", ""), ("y", "tp", ""), ("a", "compute", "y"), ("z", "tp", "a"),
        ("w", "tp", "a"), ("end", "compute", "z w"),
    )  # fmt: skip
    times = {"x": 10, "y": 10, "a": 3, "z": 10, "w": 1, "end": 1}
    behind = Contention({}, {}, behind_ns={"x": 4, "y": 4, "z": 4})
    timeline = simulate(g, g.order, times, contention=behind)
    assert [(s.name, s.start_ns, s.end_ns) for s in timeline.collectives] == [
        ("x", 0, 10), ("y", 10, 24), ("z", 27, 38), ("w", 38, 39),
    ]  # fmt: skip


def test_slow_downs_of_several_transfers_add_up() -> None:
    """Two transfers at 1.25 each: the operator takes 1.5 times as long while both run."""
    g = graph(("x", "tp", ""), ("z", "dp", ""), ("b", "compute", ""))
    timeline = simulate(g, g.order, {"x": 90, "z": 90, "b": 20}, contention=contention(1.25))
    assert spans(timeline)[-2] == ("b", "matmul", "compute", 0, 30)


def test_a_barrier_waits_for_everything_in_flight() -> None:
    """Behind a, although nobody needs the gather yet."""
    g = graph(("g", "tp", ""), ("a", "compute", ""), ("b", "compute", ""))
    timeline = simulate(g, g.order, {"g": 30, "a": 10, "b": 5}, barriers=("a",))
    assert spans(timeline)[-2:] == [
        ("g", "wait", "compute", 10, 30),
        ("b", "matmul", "compute", 30, 35),
    ]
    later = simulate(g, g.order, {"g": 30, "a": 10, "b": 5}, barriers=("a",), barrier_ns=7)
    assert spans(later)[-2:] == [
        ("barrier", "wait", "compute", 30, 37),
        ("b", "matmul", "compute", 37, 42),
    ]


@given(data=st.data(), graphs=pair_graphs())
def test_contention_never_helps(data: st.DataObject, graphs: OpGraph) -> None:
    """Whatever the factors and the sharing, an order takes at least as long as without."""
    order, times = data.draw(orders_of(graphs)), data.draw(solo_times(graphs))
    slow = Contention(
        {
            (a, b): (data.draw(st.floats(1, 3)), data.draw(st.floats(1, 3)))
            for a in (Kind.MATMUL, Kind.ELEMENTWISE)
            for b in (Kind.ALL_GATHER, Kind.ALL_REDUCE)
        },
        data.draw(st.sampled_from(({}, {"tp": "nic", "dp": "nic"}))),
        data.draw(st.sampled_from(({}, {"tp": "dp"}))),
        {op.key: data.draw(st.integers(0, 50)) for op in graphs.collectives},
    )
    alone = simulate(graphs, order, times).length_ns
    assert simulate(graphs, order, times, contention=slow).length_ns >= alone - 1
