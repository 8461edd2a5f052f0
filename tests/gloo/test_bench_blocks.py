"""Proves that `bench decompose` measures what it says: equal results, and compute that sleeps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import gloo_group, run_ranks

from interlace.bench import decompose_emulated
from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.decompose_rows import DecomposeCase, rows_of, tables
from interlace.bench.decompose_shapes import Job, Shape

pytestmark = pytest.mark.alone

MLP = Shape(block="mlp", width=64, rows=16, inner=8, head_size=8)
ATTENTION = Shape(block="attention", width=64, rows=16, head_size=8)
CAUSAL = Shape(block="attention", width=64, rows=16, head_size=8, causal=True)


def blocks() -> dict[str, Any]:
    """In a rank: what the blocks compute, and what a point of the bench reports."""
    import torch.distributed as dist

    from interlace.bench.decompose_blocks import build_block
    from interlace.bench.decompose_job import measure_point, warm_up
    from interlace.errors import RunError

    with gloo_group():
        world = dist.group.WORLD
        assert world is not None
        found: dict[str, Any] = {"sums": {}, "refused": ""}
        for shape in (MLP, ATTENTION, CAUSAL):
            block = build_block(shape, world)
            warm_up(block)
            # The sum over ranks of compute alone is what the ways scatter.
            whole = block.step("compute", backward=True)
            block.take_gradients("compute")
            dist.all_reduce(whole)
            own = block.step("ring", backward=True)
            block.take_gradients("ring")
            distance = float((own - whole[block.own]).abs().max() / whole.abs().max())
            found["sums"][shape.name] = distance
        block.forward, right = (
            (lambda way: right(way) * (1 if way == "vanilla" else 2)),
            block.forward,
        )
        try:
            warm_up(block)
        except RunError as error:
            found["refused"] = error.message
        tiny = Shape(block="attention", width=64, rows=16, head_size=8, flops_per_s=2e8)
        job = Job(shapes=(tiny,), turns=1, emulated_links=True)
        found["cases"] = measure_point(job, tiny, 0.8)
        return found


def test_all_ways_agree_and_a_point_reports_them() -> None:
    """On two ranks: vanilla, slices, ring and query split give one output and one set of gradients,
    a way that does not is found, and a point yields its times and rate on emulated links."""
    first, second = (r.value for r in run_ranks("test_bench_blocks:blocks", 2, timeout_s=90))
    for found in (first, second):
        assert max(found["sums"].values()) < 1e-5
        assert set(found["sums"]) == {"mlp 8 D", "attention", "causal attention"}
        assert "slicing 2 of the causal attention block differs" in found["refused"]
    cases = [DecomposeCase.of(fields) for fields in first["cases"]]
    assert [case.backward for case in cases] == [False, True]
    for case in cases:
        assert set(case.ways) == set(case.shape.ways(2))
        assert all(len(way["ns"]) == 1 and way["ns"][0] > 0 for way in case.ways.values())
        assert case.calibration["rate_mbit"] > 0
        assert case.calibration["transfer_ns"] > 0
        assert {row.metric for row in rows_of(case)} >= {"overhead_removed", "over_formula"}
    assert "emulated compute" in tables(cases)
    # Times are agreed on: the slowest rank's.
    assert [c["ways"] for c in first["cases"]] == [c["ways"] for c in second["cases"]]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeps in seconds, on a clock that only they move; each takes 1 ms longer than asked."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)

    clock = SimpleNamespace(perf_counter=lambda: sum(naps) + 1e-3 * len(naps), sleep=sleep)
    monkeypatch.setattr(decompose_emulated, "time", clock)
    return naps


def test_matmuls_sleep_for_their_flops(slept: list[float]) -> None:
    """2 M K N / rate each, what a sleep took too long is taken off the next one; results are
    zeros, also in place; everything else is computed."""
    x, w = torch.ones(4, 8), torch.ones(8, 16)
    out = torch.ones(4, 16)
    with emulated_compute(1024.0):
        assert torch.mm(x, w).count_nonzero() == 0
        torch.mm(x, w, out=out)
        total = torch.ones(4, 16).addmm_(x, w)
        assert F.linear(x, w.t(), torch.ones(16)).count_nonzero() == 0
        assert (x + 1).sum() == 64
    assert out.count_nonzero() == 0
    assert torch.equal(total, torch.ones(4, 16))
    assert slept == pytest.approx([1.0, 0.999, 0.999, 0.999])
    assert torch.mm(x, w).sum() == 512  # outside


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_backward_sleep_too(causal: bool, slept: list[float]) -> None:
    """Two matmuls forward and five backward, each 2 H S T E; half with a causal mask."""
    q, k, v = (torch.ones(1, 2, 16, 8, requires_grad=True) for _ in "qkv")
    with emulated_compute(1024.0):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.sum().backward()
    assert out.shape == q.shape
    assert [x.grad.shape for x in (q, k, v) if x.grad is not None] == [q.shape] * 3
    one = 2 * 2 * 16 * 16 * 8 / 1024 / (2 if causal else 1)
    assert slept == pytest.approx([2 * one, 5 * one - 1e-3])
