"""`interlace explain` on what torch.profiler writes about real ranks on gloo."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from interlace.explain.explanation import explain
from interlace.explain.kineto_trace import rank_trace
from interlace.explain.rank_trace import Pass, RankTrace
from interlace.explain.step_choice import StepChoice

STEPS, WIDTH, ROWS = 3, 64, 32
KINDS = ("all_reduce", "all_gather", "all_reduce", "broadcast")


def profiled(folder: str) -> int:
    """A rank that trains replicas, and after each step gathers, sums and sends a tensor round."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = str(Path(folder) / f"rank{dist.get_rank()}.json")
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS),
        record_shapes=True,
        on_trace_ready=lambda done: done.export_chrome_trace(path),
    ) as profiler:
        for _ in range(2 + STEPS):
            x = torch.randn(ROWS, WIDTH)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            parts = [torch.empty(ROWS, WIDTH) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            dist.broadcast(x, 0)
            profiler.step()
    dist.destroy_process_group()
    return STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two ranks, made once."""
    made = tmp_path_factory.mktemp("profile")
    results = run_ranks("test_explain_profile:profiled", 2, args=[str(made)], timeout_s=60)
    assert [each.value for each in results] == [STEPS, STEPS]
    return made


@pytest.fixture(scope="module")
def traces(folder: Path) -> list[RankTrace]:
    """Both, all whole steps but the last."""
    return [rank_trace(folder / f"rank{rank}.json", StepChoice()) for rank in (0, 1)]


def test_collectives_are_found(traces: list[RankTrace]) -> None:
    """Each with its kind, its bytes, its group and its place; in order of their calls."""
    floats = [2 * (WIDTH * WIDTH + WIDTH), ROWS * WIDTH, ROWS * WIDTH, ROWS * WIDTH]
    for rank, trace in enumerate(traces):
        assert (trace.rank, trace.device, len(trace.steps)) == (rank, "CPU", STEPS - 1)
        assert {each.place.micro_batch for each in trace.computed} <= {0, 1}
        assert {each.place.part for each in trace.computed} == {
            Pass.FORWARD,
            Pass.BACKWARD,
            Pass.END,
        }
        for step in range(STEPS - 1):
            own = [each for each in trace.communicated if each.place.step == step]
            assert tuple(each.kind for each in own) == KINDS
            assert [each.bytes for each in own] == [4 * count for count in floats]
            parts = [each.place.part for each in own]
            assert parts == [Pass.BACKWARD, Pass.END, Pass.END, Pass.END]
            assert {(each.group, each.ranks) for each in own} == {("default_pg", (0, 1))}


def test_compute_is_what_the_file_has(folder: Path, traces: list[RankTrace]) -> None:
    """Matmuls lie in compute and, with blocking collectives, nothing of them in communication
    that the same thread waits for."""
    events = json.loads((folder / "rank0.json").read_text())["traceEvents"]
    start = traces[0].steps[0].start_ns
    end = traces[0].steps[-1].end_ns
    matmuls = [
        (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in events
        if event.get("name") in ("aten::addmm", "aten::mm")
    ]
    inside = [each for each in matmuls if start <= each[0] and each[1] <= end]
    assert len(inside) == 5 * (STEPS - 1)  # two forward, three backward: x has no gradient
    for first, last in inside:
        around = [c for c in traces[0].computed if c.start_ns <= first and last <= c.end_ns + 1]
        assert len(around) == 1


def test_both_ranks_are_explained(folder: Path, traces: list[RankTrace]) -> None:
    """Step times are the profiler's, collectives are matched over ranks, sums are whole."""
    found = explain([folder])
    assert [row.rank for row in found.ranks.rows] == [0, 1]
    assert found.ranks.matched == len(KINDS) * (STEPS - 1)
    assert found.ranks.unmatched == ""
    for row, trace in zip(found.ranks.rows, traces, strict=True):
        assert row.step_ns == round(median([step.duration_ns for step in trace.steps]))
        assert row.waiting_ns is not None
        assert 0 <= row.waiting_ns <= sum(each.duration_ns for each in trace.communicated)
        assert 0 < row.exposed_ns <= row.communication_ns
    assert {row.kind: row.count for row in found.rows} == {
        "all_reduce": 2 * (STEPS - 1),
        "all_gather": STEPS - 1,
        "broadcast": STEPS - 1,
    }
    assert found.gains is not None
    assert found.gains.of("decomposition").at_most_ns == 0
