"""Proves that every search runs on two real ranks with the same bits, and what comparing tells."""

import functools
from typing import Any

import pytest
import torch
from processes import run_ranks

from interlace.config import (
    CompareConfig,
    DataConfig,
    Mode,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
    WatchdogConfig,
)
from interlace.ranks.process_group import process_group
from interlace.runtime.peak_memory import measure_growth
from interlace.runtime.rival import has_inductor_schedule
from interlace.train.compare import compare
from interlace.train.opening import open_session
from interlace.train.rank_job import job_of_rank
from interlace.train.session import Session

RIVALS: tuple[Mode, ...] = ("inductor",) if has_inductor_schedule() else ()
MODES: tuple[Mode, ...] = ("eager", "1", "2", "segment_pairs", "list", "merge", *RIVALS)
STEPS = 2


def configuration(text: str, **compare: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(layers=2, width=64, heads=4, kv_heads=4, ffn_width=96),
        parallel=ParallelConfig(tensor=2),
        data=DataConfig(path=text, sequence_length=32),
        train=TrainConfig(micro_batches=4, micro_batch_size=2),
        plan=PlanConfig(profile_repeats=2, cache=False),
        compare=CompareConfig(steps=STEPS, **compare),
        watchdog=WatchdogConfig(dead_after_s=30),  # a busy machine is not a dead one
    )


def batches_of(session: Session) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    source = session.dataset.batches(session.config.train.micro_batch_size)
    count = session.config.train.micro_batches
    return [[session.move(next(source)) for _ in range(count)] for _ in range(STEPS)]


def compared(text: str) -> dict[str, Any]:
    """A child: comparison of all ways, and the digests of their plans."""
    config = configuration(text, modes=MODES, memory=True)
    with process_group(config.link, config.watchdog):
        session = open_session(job_of_rank(config))
        buffers = {
            tuple(
                id(value)
                for (role, _), value in each.tensors.constants.items()
                if "gradient" in role
            )
            for each in session.steps.values()
        }
        summary, timelines = compare(session, batches_of(session), lambda _: None)
        return {
            "summary": summary,
            "labels": [timeline.label for timeline in timelines],
            "plans": {mode: step.plan.digest for mode, step in session.steps.items()},
            "searches": {mode: step.plan.search for mode, step in session.steps.items()},
            "buffers": len(buffers),
            "shared": session.runners["2"] is session.runners["merge"],
        }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    text = tmp_path_factory.mktemp("compare") / "text"
    text.write_text("two strands hide communication behind compute.\n" * 600)
    results = run_ranks(
        "test_compare:compared",
        2,
        args=[str(text)],
        timeout_s=100,
        env={"XDG_CACHE_HOME": str(text.parent)},
    )
    return [result.value for result in results]


def test_all_searches_give_the_bits_of_one_strand(ranks: list[dict[str, Any]]) -> None:
    """Losses of one strand and of two strands by each plan are equal bit for bit, and so are the
    weights; eager differs by rounding only."""
    for rank in ranks:
        modes = rank["summary"]["modes"]
        assert tuple(modes) == MODES == tuple(rank["labels"])
        bits = {tuple(row["loss_bits"]) for mode, row in modes.items() if mode != "eager"}
        assert len(bits) == 1
        assert rank["summary"]["losses_identical"] is True
        assert rank["summary"]["weights_identical"] is True
        assert modes["eager"]["losses"] == pytest.approx(modes["1"]["losses"], rel=1e-5)


def test_each_search_makes_its_own_plan_and_all_ranks_the_same(
    ranks: list[dict[str, Any]],
) -> None:
    """`2` is the plan of plan.search; runners share one set of gradient buffers."""
    plans = ranks[0]["plans"]
    assert plans == ranks[1]["plans"]
    assert plans["2"] == plans["merge"]
    different = ("1", "segment_pairs", "merge", *RIVALS)
    assert len({plans[mode] for mode in different}) == len(different)
    searches = ranks[0]["searches"]
    assert searches == {
        **{mode: mode for mode in ("segment_pairs", "list", "merge", *RIVALS)},
        "2": "merge",
        "1": "sequential",
    }
    assert all(rank["buffers"] == 1 and rank["shared"] for rank in ranks)


def test_a_comparison_tells_times_predictions_and_memory(ranks: list[dict[str, Any]]) -> None:
    """Graph time is part of step time; no prediction beats its bound; memory grew in every way."""
    for mode, row in ranks[0]["summary"]["modes"].items():
        assert len(row["step_ms"]) == len(row["graph_ms"]) == len(row["cpu_ms"]) == STEPS
        pairs = zip(row["graph_ms"], row["step_ms"], strict=True)
        assert all(0 < graph < step for graph, step in pairs)
        assert 0 <= row["steady_hidden_fraction"] <= 1
        assert row["compute_ms"] > 0
        # Values of one micro-batch are far larger than what a step leaves behind.
        assert row["allocated_bytes"] > 100_000
        if mode == "eager":
            assert "predicted_ms" not in row
            continue
        assert row["predicted_ms"] >= row["bound_ms"] > 0
        assert 0 <= row["predicted_hidden_fraction"] <= 1
        assert 0.5 < row["counted_bytes"] / row["allocated_bytes"] < 1.5
    assert ranks[0]["summary"]["constant_bytes"] > 0


def test_memory_of_a_large_temporary_is_seen() -> None:
    """A value that is dropped before the end counts at its peak; what lives before does not."""
    size = 32 * 2**20
    before = torch.ones(size // 4)

    def run() -> None:
        temporary = before + 1
        smaller = temporary[: size // 16].clone()
        del temporary
        smaller.add_(1)

    growth = measure_growth(run, torch.device("cpu"))
    assert growth.allocated_bytes is not None
    assert growth.resident_bytes is not None
    assert size * 1.25 <= growth.allocated_bytes < size * 1.3
    assert size * 1.2 <= growth.resident_bytes < size * 1.6
    nothing = measure_growth(functools.partial(before.add_, 1), torch.device("cpu"))
    assert nothing.allocated_bytes is not None
    assert nothing.allocated_bytes < size / 100
