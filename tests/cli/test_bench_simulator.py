"""`interlace bench simulator` prints its scores, says what it left out, and writes them down."""

import json
import re
from pathlib import Path

import pytest

from interlace.__main__ import main
from interlace.bench.simulator_lab import TABLE, lab_rows, lab_scores


def test_it_prints_and_writes_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each source, eight of A100 that the step model describes, reasons below, and the
    rows in the form of all benches."""
    path = tmp_path / "simulator.json"
    assert main(["bench", "simulator", "--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    table, _, reasons = printed.partition("left out:")
    sources = [line for line in table.splitlines() if "A100" in line]
    assert sum("simulated" in line for line in sources) == 2
    assert len(sources) == 13
    assert "SimuMax, B200-SXM: 12 rows, mixture of experts" in reasons
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    metrics = {row["metric"]: row for row in rows if row["case"] == "vTrain, A100-SXM"}
    assert metrics["rows_used"]["ours"] == metrics["rows_used"]["baseline"] == 109
    held_out = metrics["held_out_error"]
    assert held_out["ratio"] == pytest.approx(held_out["baseline"] / held_out["ours"])
    assert "memory_error" not in metrics
    matmuls = {row["case"]: row["ours"] for row in rows if row["case"].startswith("matmuls")}
    assert matmuls == {
        "matmuls, A100-PCIe-80G": pytest.approx(0.041, abs=0.001),
        "matmuls, B200-SXM": pytest.approx(0.151, abs=0.001),
    }
    recipes = sum(
        row["ours"] for row in rows if row["metric"] == "rows_used" and "NeMo" in row["case"]
    )
    assert recipes == 15  # of 59
    decomposed = {row["metric"]: row for row in rows if row["case"] == "decomposed, CommFuse"}
    assert decomposed["data_slicing_ms"]["ours"] == pytest.approx(78.5 + 43.8 / 8, abs=0.1)
    assert decomposed["decomposed_ms"]["ours"] == pytest.approx(78.5, abs=0.1)
    assert re.search(r"\ndecomposed +77\.1 +78\.5 +1\.02", printed)
    strands = [row for row in rows if row["metric"] == "factor"]
    assert "GPT 18B, A40, 8K: dp 8, tp 8  " in printed
    assert all(row["ours"] > 1 for row in strands)
    assert next(row for row in rows if row["metric"] == "within_6_points")["baseline"] == 4


def test_own_benches_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is what the script makes of the benches' files, and has each of the kinds that are
    asked for; the score is the median error."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import record_lab

    assert TABLE.read_text(encoding="utf-8") == record_lab.lab_csv()
    scores = {each.bench: each for each in lab_scores()}
    assert {"strands", "zero3", "pipeline", "moe_strands", "reshard"} <= scores.keys()
    file = record_lab.RESULTS / "cpu" / "zero3.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    errors = sorted(abs(r["ratio"] - 1) for r in rows if r["metric"].startswith("predicted_over"))
    assert scores["zero3"].steps == len(errors) == 9
    assert scores["zero3"].error == pytest.approx(errors[4], abs=1e-4)
    assert scores["zero3"].worst == pytest.approx(errors[-1], abs=1e-4)
    written = {(row.case, row.metric): row.ours for row in lab_rows([scores["zero3"]])}
    assert written["own bench zero3, AMD EPYC", "median_error"] == scores["zero3"].error
