"""A cost table of a cluster follows from the rates of its file, by hand."""

from dataclasses import replace

import pytest
from test_ir_graph import operator

from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.hardware.cluster_costs import cluster_costs
from interlace.hardware.computed_costs import LAUNCH_NS
from interlace.ir.costs import CostTable
from interlace.ir.graph import Kind, OpGraph

A800 = load_cluster("a800")
FULL = 2**30
GRAPH = OpGraph(
    "forward",
    (
        operator("mm", flops=10**12),
        operator("add", kind=Kind.ELEMENTWISE, bytes_in=10**9, bytes_out=10**9, flops=0),
        operator("ag", kind=Kind.ALL_GATHER, lane="tp", bytes_in=FULL // 8, bytes_out=FULL),
        operator("rs", kind=Kind.REDUCE_SCATTER, lane="dp_shard", bytes_in=FULL, bytes_out=1),
    ),
    (),
    (),
)
TP, DP = [tuple(range(8)), tuple(range(8, 16))], [(i, i + 8) for i in range(8)]
GROUPS = {"tp": TP, "dp_shard": DP}


def costs(**changes: float) -> CostTable:
    """On A800s of which `intra_host__gb_per_s=400` and such are changed."""
    cluster = A800
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        inner = replace(getattr(cluster, part), **{key: value}) if part else value
        cluster = replace(cluster, **{part or key: inner})
    return cluster_costs({"forward": GRAPH}, cluster, GROUPS)


def test_times_follow_from_device_and_links() -> None:
    """By hand: peak, memory bandwidth, seven NVLink steps within a host, one between two hosts."""
    times = costs().of(GRAPH)
    assert times["mm"] == LAUNCH_NS + int(1e12 / 312e12 * 1e9)
    assert times["add"] == LAUNCH_NS + int(2e9 / 2039e9 * 1e9)
    assert times["ag"] == round(8_400 + 7 * 3_400 + 7 / 8 * FULL / (200e9 * 0.78) * 1e9)
    assert times["rs"] == round(8_400 + 14_000 + FULL / 2 / (200e9 / 8 * 0.74) * 1e9)


@pytest.mark.parametrize(
    ("change", "op", "fixed_ns"),
    [
        ({"peak_tflops": 624}, "mm", LAUNCH_NS),
        ({"memory_gb_per_s": 4078}, "add", LAUNCH_NS),
        ({"intra_host__gb_per_s": 400}, "ag", 8_400 + 7 * 3_400),
        ({"inter_host__gbit_per_s": 400}, "rs", 8_400 + 14_000),
    ],
)
def test_twice_the_rate_halves_what_grows_with_bytes(
    change: dict[str, float], op: str, fixed_ns: int
) -> None:
    """Of that operator, beside launch or latency; the others keep their times."""
    before, after = costs().of(GRAPH), costs(**change).of(GRAPH)
    assert after[op] - fixed_ns == pytest.approx((before[op] - fixed_ns) / 2, abs=1)
    assert {name: ns for name, ns in after.items() if name != op} == {
        name: ns for name, ns in before.items() if name != op
    }


def test_a_line_per_lane_gives_other_sizes() -> None:
    """A table of these operators estimates a larger collective as the cluster computes it."""
    large = operator("x", kind=Kind.ALL_GATHER, lane="tp", bytes_in=1, bytes_out=4 * FULL, key="x")
    graph = OpGraph("forward", (large,), (), ())
    estimated = costs().of(graph, interpolate=True)["x"]
    assert estimated == pytest.approx(A800.collective_ns(Kind.ALL_GATHER, 4 * FULL, TP[0]), abs=1)


def test_the_slowest_group_of_a_lane_counts() -> None:
    """Six ranks fit in a host of eight; the six after them are on two hosts."""
    groups = {"tp": [tuple(range(6)), tuple(range(6, 12))], "dp_shard": [(0, 6)]}
    table = cluster_costs({"forward": GRAPH}, A800, groups)
    gather = A800.collective_ns(Kind.ALL_GATHER, FULL, groups["tp"][1])
    assert table.of(GRAPH)["ag"] == gather > costs().of(GRAPH)["ag"]
    assert table.links == {"tp": "inter_host", "dp_shard": "intra_host"}


def test_slow_downs_are_those_of_the_lane() -> None:
    """16 of 108 multiprocessors are held on NVLink, 8 on the network; bytes pass memory."""
    found = {(p.compute, p.collective): p.compute_factor for p in costs().pairs}
    assert found[Kind.MATMUL, Kind.ALL_GATHER] == pytest.approx(108 / 92)
    assert found[Kind.MATMUL, Kind.REDUCE_SCATTER] == pytest.approx(108 / 100)
    assert found[Kind.ELEMENTWISE, Kind.ALL_GATHER] == pytest.approx(1 / (1 - 2 * 156 / 2039))


def test_what_does_not_fit_is_refused() -> None:
    """More ranks than devices, a lane without ranks, collectives that hold the whole device."""
    with pytest.raises(InputError, match="16 ranks do not fit on cluster a800: 1 hosts of 8"):
        cluster_costs({"forward": GRAPH}, replace(A800, hosts=1), GROUPS)
    with pytest.raises(InputError, match="lane 'dp_shard' of a graph has no ranks") as caught:
        cluster_costs({"forward": GRAPH}, A800, {"tp": TP})
    assert "tp" in caught.value.hint
    with pytest.raises(InputError, match="hold 16 of 16 multiprocessors"):
        cluster_costs({"forward": GRAPH}, replace(A800, sms=16), GROUPS)
