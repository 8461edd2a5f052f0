"""What the graphs of a traced pass say: how long kernels keep the lane, who waits for whom."""

from pathlib import Path

import pytest
from kineto_traces import TraceMaker, blocking

from interlace.explain.decomposed_graphs import decomposed
from interlace.explain.kineto_trace import rank_trace
from interlace.explain.pass_graphs import PassGraph, busy_times, pass_graph
from interlace.explain.rank_trace import Pass, RankTrace
from interlace.explain.step_choice import StepChoice
from interlace.sim.lanes import simulate

US = 1000
KERNELS = {  # name -> launched, start, length (microseconds)
    "first": (1, 0, 10),
    "second": (2, 20, 10),
    "other_stream": (4, 25, 15),
    "last": (6, 50, 10),
}


def small(folder: Path) -> RankTrace:
    """Four kernels and a gather from 35 to 45, launched after the second of them."""
    maker = TraceMaker()
    for name, (launched, start, length) in KERNELS.items():
        maker.kernel(launched, start, length, name, 8 if name == "other_stream" else 7)
    maker.collective(3, 35, 10)
    maker.step(1, 0, 100)
    maker.backward(90, 5)
    maker.kernel(91, 95, 1, "backward")
    return rank_trace(maker.write(folder / "trace.json"), StepChoice())


def forward(trace: RankTrace) -> PassGraph:
    return pass_graph(trace, 0, Pass.FORWARD, 1, busy_times(trace, 0))


def test_how_long_a_kernel_keeps_the_lane(tmp_path: Path) -> None:
    """Its own time, without what an earlier one covers, and the idle time after it, without what a
    collective covers."""
    trace = small(tmp_path)
    times = busy_times(trace, 0)
    names = [trace.computed[i].name for i in times]
    assert dict(zip(names, times.values(), strict=True)) == {
        "first": (10 + 10) * US,
        "second": 10 * US,
        "other_stream": (10 + 5) * US,
        "last": (10 + 35) * US,
        "backward": 1 * US,
    }


def test_a_collective_waits_for_what_was_launched_before_it(tmp_path: Path) -> None:
    """The kernel on the other stream was launched later, and does not hold it up though it had
    begun; the last kernel waits for it."""
    found = forward(small(tmp_path))
    [gather] = found.graph.collectives
    assert gather.inputs == ("k1",)
    assert found.graph.order == ("k0", "k1", gather.id, "k2", "k3")
    assert found.graph.by_id["k3"].inputs == ("k2", gather.id)
    assert found.graph.by_id["k2"].inputs == ("k1",)
    assert found.solo_ns[gather.id] == 10 * US


def test_a_collective_that_came_late_was_asked_for_early(tmp_path: Path) -> None:
    """It was launched before a kernel that ended before it began: other ranks were late."""
    maker = TraceMaker()
    maker.kernel(1, 0, 10, "before")
    maker.collective(2, 30, 10)
    maker.kernel(3, 10, 10, "beside")
    maker.kernel(4, 40, 10, "after")
    maker.step(1, 0, 100)
    maker.backward(90, 5)
    maker.kernel(91, 95, 1, "backward")
    found = forward(rank_trace(maker.write(tmp_path / "trace.json"), StepChoice()))
    [gather] = found.graph.collectives
    assert gather.inputs == ("k0",)
    assert found.graph.by_id["k2"].inputs == ("k1", gather.id)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(
    ("ranks", "collective_ms", "whole_ms"),
    [
        (2, 10, 20),  # one half, then the other half while nothing is left to send
        (4, 9, 20),  # three sends of 3 ms under parts of 5 ms
        (4, 30, 35),  # a part of 5 ms, three sends of 10 ms
        (16, 70, 72.5),  # eight parts of 2.5 ms and seven sends
    ],
)
def test_a_site_takes_what_commfuse_says(
    gathers: bool, ranks: int, collective_ms: float, whole_ms: float, tmp_path: Path
) -> None:
    """t_c + max((N - 1) t_c, (N - 1) t_p) for a matmul of 20 ms, in either form."""
    work = [("AllGather", collective_ms), ("gemm", 20.0)]
    if not gathers:
        work = [("gemm", 20.0), ("ReduceScatter", collective_ms)]
    maker = blocking(1, work, [("gemm", 1.0)], group_size=ranks)
    before = forward(rank_trace(maker.write(tmp_path / "trace.json"), StepChoice()))
    [site] = before.sites
    assert (site.gathers, site.ranks) == (gathers, ranks)
    assert site.exposed_ns == collective_ms * 1000 * US
    assert simulate(before.graph, before.graph.order, before.solo_ns).length_ns == round(
        (20 + collective_ms) * 1000 * US
    )
    after = decomposed(before)
    length = simulate(after.graph, after.graph.order, after.solo_ns).length_ns
    assert length == pytest.approx(whole_ms * 1000 * US, abs=100)
    assert sum(after.solo_ns.values()) == pytest.approx(sum(before.solo_ns.values()), abs=100)
