"""Proves what computed costs say about a machine: its link by size, and slow-downs on a GPU."""

import pytest
from test_ir_graph import operator

from interlace.errors import InputError
from interlace.hardware.computed_costs import MachineModel, analytic_costs
from interlace.ir.graph import Kind, OpGraph

MACHINE = {
    "flops_per_s": 1e12,
    "bytes_per_s": 1e11,
    "link_bits_per_s": 8e9,
    "link_latency_ns": 1_000,
}
GRAPH = OpGraph(
    "forward",
    (
        operator("mm", flops=2 * 10**9),
        operator("add", kind=Kind.ELEMENTWISE, bytes_in=10**6, bytes_out=10**6, flops=0),
        operator("ag", kind=Kind.ALL_GATHER, lane="tp", bytes_in=10**6, bytes_out=4 * 10**6),
        operator("rs", kind=Kind.REDUCE_SCATTER, lane="tp", bytes_in=10**6, bytes_out=10**5),
    ),
    (),
    (),
)


def test_roofline_and_alpha_beta() -> None:
    """By hand: 2 GFLOP at 1 TFLOP/s, 2 MB at 100 GB/s, 3 of 4 MB at 1 GB/s."""
    table = analytic_costs({"forward": GRAPH}, MachineModel(**MACHINE), {"tp": 4})
    assert table.of(GRAPH) == {
        "mm": 5_000 + 2_000_000,
        "add": 5_000 + 20_000,
        "ag": 1_000 + 3_000_000,
        "rs": 1_000 + 750_000,
    }
    assert table.contention.factors == {}


def test_estimates_of_other_sizes_agree_with_the_model() -> None:
    """A table of a small graph gives the collectives of a larger one."""
    machine = MachineModel(**MACHINE)
    small = analytic_costs({"forward": GRAPH}, machine, {"tp": 4})
    large = operator("x", kind=Kind.ALL_GATHER, lane="tp", bytes_in=10**8, bytes_out=4 * 10**8)
    graph = OpGraph("forward", (large,), (), ())
    direct = analytic_costs({"forward": graph}, machine, {"tp": 4})
    assert small.of(graph, interpolate=True) == direct.of(graph)


def test_a_gpu_shares_its_multiprocessors_and_its_memory() -> None:
    """132 SMs of which 24 communicate; a sum moves each byte three times, a gather twice."""
    machine = MachineModel(**MACHINE, multiprocessors=132, held_multiprocessors=24)
    factors = analytic_costs({"forward": GRAPH}, machine, {"tp": 4}).contention.factors
    assert factors[Kind.MATMUL, Kind.ALL_GATHER] == pytest.approx((132 / 108, 1.0))
    assert factors[Kind.ELEMENTWISE, Kind.ALL_GATHER] == pytest.approx((1 / 0.98, 1.0))
    assert factors[Kind.ELEMENTWISE, Kind.REDUCE_SCATTER] == pytest.approx((1 / 0.97, 1.0))


def test_collectives_cannot_hold_the_whole_gpu() -> None:
    """The numbers are named."""
    with pytest.raises(InputError, match="hold 8 of 8 multiprocessors"):
        MachineModel(**MACHINE, multiprocessors=8, held_multiprocessors=8)
