"""The hidden share of communication is that of HolisticTraceAnalysis 0.5.0 on the same traces.

Its answers are in hta_answers.json, made by scripts/ask_hta.py.
"""

import json
from pathlib import Path

import pytest
from kineto_traces import digest_of, random_trace, recorded_step

from interlace.explain.explanation import explain
from interlace.explain.exposure import exposure
from interlace.explain.kineto_trace import rank_trace
from interlace.explain.kineto_writer import write_kineto
from interlace.explain.run_trace import RecordedRun
from interlace.explain.step_choice import StepChoice

ANSWERS = json.loads((Path(__file__).parent / "hta_answers.json").read_text())
REAL = Path(__file__).parent / "hta_traces"
"""Of GPUs, from the tests of HTA; README.md there says whose they are."""
ROUNDING = 0.005 + 1e-9
"""Per cent: HTA's answers have two decimals."""


@pytest.mark.parametrize("seed", sorted(map(int, ANSWERS["drawn"])))
def test_hidden_share_is_that_of_hta(seed: int, tmp_path: Path) -> None:
    """Kernels on several streams, copies, synchronisation, an unfinished last step."""
    path = random_trace(seed, whole=not seed % 2).write(tmp_path / "trace.json")
    found = 100 * exposure(rank_trace(path, StepChoice())).hidden_fraction
    assert found == pytest.approx(ANSWERS["drawn"][str(seed)], abs=ROUNDING)


@pytest.mark.parametrize("name", sorted(path.name for path in REAL.glob("*.json.gz")))
def test_traces_of_gpus(name: str) -> None:
    """Two ranks of 128, on A100, with collectives on two streams and sends between ranks."""
    found = 100 * exposure(rank_trace(REAL / name, StepChoice())).hidden_fraction
    assert found == pytest.approx(ANSWERS["real"][name], abs=ROUNDING)


def test_there_is_something_to_agree_on() -> None:
    """Traces that hide little and much."""
    found = sorted(ANSWERS["drawn"].values())
    assert len(found) >= 20
    assert found[0] < 20
    assert found[-1] > 70


@pytest.mark.parametrize("mode", ["1", "2"])
def test_our_recordings_are_read_by_hta(mode: str, tmp_path: Path) -> None:
    """HTA's answer about the exported file, ours about it, and ours about the run itself."""
    run = RecordedRun(tmp_path, {mode: {0: recorded_step(mode)}}, {"tp": 2}, {})
    [path] = write_kineto(run, tmp_path / "traces")
    assert digest_of(path) == ANSWERS["digests of recorded"][mode], (
        "what is written has changed since HTA was asked: run scripts/ask_hta.py"
    )
    direct = exposure(run.traces(mode)[0])
    read = explain([path])
    assert 100 * direct.hidden_fraction == pytest.approx(ANSWERS["recorded"][mode], abs=ROUNDING)
    assert read.figures == direct
    assert read.rows[0].group == "tp"
    assert read.rows[0].group_size == 2
    assert read.rows[0].bytes == 8 << 20


def test_exported_passes_are_read_back(tmp_path: Path) -> None:
    """With one strand, bounds and simulation of the file are those of the run."""
    run = RecordedRun(tmp_path, {"1": {0: recorded_step()}}, {"tp": 2}, {})
    [path] = write_kineto(run, tmp_path / "traces")
    read, direct = explain([path]).gains, explain([_saved(tmp_path)]).gains
    assert read is not None
    assert direct is not None
    assert read.ways == direct.ways
    assert read.traced_micro_batches == 2
    assert read.step_ns == direct.step_ns == recorded_step().length_ns


def _saved(folder: Path) -> Path:
    """The same step in the folder of a run."""
    from interlace.ir import store

    run = folder / "run"
    run.mkdir()
    (run / "run.toml").write_text("[parallel]\ntensor = 2\n")
    store.save(recorded_step(), run / "timelines" / "1-rank0.json")
    return run
