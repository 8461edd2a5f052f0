"""The bench of tensor-parallel shares without its ranks: what is expected is what the simulator
makes of the same times, and rows say what was emulated."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.searched import EMULATED
from interlace.bench.tensor_share import (
    RANKS_OF_STAGE,
    STAGES,
    WAYS,
    ShareSize,
    formula_gain,
    rows_of,
)
from interlace.bench.tensor_share_world import SplitBlock
from interlace.schedules.finder import find
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import simulate_pipeline

SIZE = ShareSize()
MS = 1_000_000


def test_shares_are_those_of_the_blocks_matmuls() -> None:
    """At the rate for a quarter, three quarters of a block's time are its matmuls, which forward
    and backward run once and twice; each rank has its part."""
    block = SplitBlock(SIZE.width, SIZE.heads)
    weights = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert SIZE.block_flops == 3 * 2 * weights * SIZE.length / RANKS_OF_STAGE
    compute_ns = SIZE.block_flops / SIZE.flops_per_s(0.25, 5 * MS) * 1e9
    assert compute_ns == pytest.approx(3 * 4 * 5 * MS)


@pytest.mark.parametrize("together", [20, 16, 12])
def test_the_formula_is_the_simulators(together: int) -> None:
    """Of half stages with F + B = 20 and nothing to send."""
    half = ChunkCosts(forward_ns=8, input_ns=6, weight_ns=6)
    whole = ChunkCosts(forward_ns=16, input_ns=12, weight_ns=12)
    count = SIZE.micro_batches
    one = find("one_f_one_b").of_ranks(STAGES, count)
    folded = find("folded").of_ranks(STAGES, count)
    pairs = {a.phase: together for own in folded for a in own if len(a.slots) > 1}
    times = [
        simulate_pipeline(one, PipelineCosts(chunks=[whole] * STAGES)).step_ns,
        simulate_pipeline(
            folded, PipelineCosts(chunks=[half] * (2 * STAGES), pairs_ns=pairs)
        ).step_ns,
    ]
    assert formula_gain(SIZE, 20, together) == pytest.approx(times[0] / times[1])


def test_what_is_traced_does_not_sleep() -> None:
    """A graph made under emulation has the matmul itself, which would take minutes here."""
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    with emulated_compute(1.0):
        graph = make_fx(torch.mm, tracing_mode="fake")(a, b)
    assert torch.ops.aten.mm.default in {node.target for node in graph.graph.nodes}


def test_rows_say_what_is_emulated() -> None:
    """Each ratio is that of its times, and the gain is compared with the formula's."""
    times = {name: [100 * MS, 110 * MS] for name, _ in WAYS}
    times["one_f_one_b"] = times["torch 1F1B"] = [150 * MS, 165 * MS]
    point = {
        "share": 0.4,
        "times": times,
        "predicted": {name: [90 * MS, 99 * MS] for name, _ in WAYS},
        "apart": [20 * MS, 20 * MS],
        "together": [10 * MS, 10 * MS],
    }
    rows = rows_of(SIZE, [point])
    assert all(EMULATED in row.case for row in rows)
    assert all("40 %" in row.case for row in rows)
    found = {(row.case.partition(",")[0], row.metric): row.ratio for row in rows}
    assert found["tp share 40 %", "pair_gain"] == pytest.approx(2)
    assert found["folded", "speedup_vs_1f1b"] == pytest.approx(1.5)
    assert found["folded", "speedup_vs_pytorch_1f1b"] == pytest.approx(1.5)
    expected = formula_gain(SIZE, 20, 10)
    assert found["folded", "gain_over_formula"] == pytest.approx(1.5 / expected)
    assert found["dual_pipe_v", "predicted_over_measured"] == pytest.approx(0.9)
