"""Proves that a plan which loses on the real machine is dropped, by all ranks alike, with a reason.

Times are made up or forced by sleeping, so nothing depends on how fast this machine is.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from processes import gloo_group, run_ranks
from training import Workplace

from interlace.cli.run_file import load_run_config
from interlace.config import PlanConfig, RunConfig, TrainConfig
from interlace.step import Step
from interlace.train.fallback import Trial
from interlace.train.worker import main

pytestmark = pytest.mark.alone

CONFIG = RunConfig(train=TrainConfig(steps=20), plan=PlanConfig(trial_steps=3))
MS = 1_000_000


def test_too_short_a_run_tries_nothing() -> None:
    """Nor does one strand, nor a user who trusts the plan; one strand is built only to be tried."""
    assert CONFIG.tries_fallback
    assert CONFIG.modes == {"2", "1"}
    for other in (
        RunConfig(train=TrainConfig(steps=15)),
        RunConfig(train=TrainConfig(steps=20), plan=PlanConfig(trial_steps=0)),
        RunConfig(train=TrainConfig(steps=20), strands="1"),
    ):
        assert not other.tries_fallback
        assert other.modes == {other.strands}
        assert Trial(other, other.strands).next_mode() == other.strands


def trial(two_ms: list[int], one_ms: list[int]) -> dict[str, Any]:
    """A trial on this rank with made-up times, which may differ between ranks."""
    trial = Trial(CONFIG, "2")
    rank, order, verdicts = int(os.environ["RANK"]), [], []
    for step in range(12):
        mode = trial.next_mode()
        order.append(mode)
        ms = (two_ms if mode == "2" else one_ms)[rank]
        verdicts.append(trial.add(mode, (ms + 1000 * (step < 2)) * MS))
    said = [(step, str(verdict)) for step, verdict in enumerate(verdicts) if verdict is not None]
    return {"order": "".join(order), "said": said}


def trials() -> list[dict[str, Any]]:
    with gloo_group():
        return [
            trial([90, 80], [100, 100]),
            trial([90, 130], [100, 110]),
            trial([101, 100], [100] * 2),
        ]


def test_all_ranks_decide_alike() -> None:
    """The slowest rank counts, slow first steps do not, a draw keeps the plan; once it is said."""
    both = [result.value for result in run_ranks("test_fallback:trials", 2, timeout_s=60)]
    assert both[0] == both[1]
    kept, dropped, draw = both[0]
    assert kept == {
        "order": "21212121" + "2222",
        "said": [
            [
                7,
                "plan kept: two strands took 90.0 ms a step and one strand 100.0 ms "
                "(medians of 3 steps each, on the slowest rank)",
            ]
        ],
    }
    assert dropped["order"] == "21212121" + "1111"
    assert dropped["said"] == [
        [
            7,
            "plan dropped: two strands took 130.0 ms a step and one strand 110.0 ms (medians of 3 "
            "steps each, on the slowest rank); going on with one strand, which gives the same bits",
        ]
    ]
    assert draw["order"].endswith("2222")


def sleepy() -> dict[str, Any]:
    """A training run whose two-strand steps sleep on one rank."""
    run, rank = Step.__call__, int(os.environ["RANK"])
    modes: list[str] = []

    def step(runner: Step, batches: Any) -> Any:
        two = runner.executor.schedule.interleaves
        modes.append("2" if two else "1")
        time.sleep(1.0 if two and rank == 1 else 0)
        return run(runner, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", step)
        patch.chdir(os.environ["TRIAL_FOLDER"])
        given = {"train.steps": "12", "plan.trial_steps": "2", "output.record_every": "0"}
        main(load_run_config("run.toml", given | {"output.directory": "sleepy"}))
    return {"modes": "".join(modes)}


def test_a_run_drops_a_plan_that_loses_and_keeps_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the first six steps of each way are timed; losses equal those of one strand."""
    place = Workplace(tmp_path)
    monkeypatch.setenv("TRIAL_FOLDER", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    results = run_ranks("test_fallback:sleepy", 2, timeout_s=100)
    assert [result.value["modes"] for result in results] == ["212121" + "111111"] * 2
    assert results[0].stderr.count("plan dropped: two strands took") == 1
    (event,) = place.events("sleepy", "trial")
    assert event["keeps_plan"] is False
    assert event["two_strands_ms"] > 1000
    place.train("--strands", "1", "--train.steps", "12", out="one")
    assert place.losses("sleepy") == place.losses("one")
