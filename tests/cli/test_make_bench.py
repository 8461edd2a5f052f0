"""`make bench` runs every bench of README and results, and writes the files that it names."""

import re
import runpy
from pathlib import Path

import pytest

from interlace.cli.bench import bench_summaries

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench.py"


def test_every_bench_of_the_results_is_run() -> None:
    """Word by word, into files that exist; and each bench of the list is one of ours."""
    listed = [" ".join(bench.words) for bench in runpy.run_path(str(SCRIPT))["BENCHES"]]
    pages = [ROOT / "README.md", ROOT / "docs" / "results.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"`interlace (bench [^`]+)`", text)
    assert len(named) >= 4
    assert set(named) <= set(listed)
    for words in listed:
        _, name, _, path = words.split()
        assert name in bench_summaries()
        assert (ROOT / path).is_file()
    assert "scripts/bench.py" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_what_needs_root_is_named_as_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without root nothing of real links is started; what failed makes the whole fail."""
    script = runpy.run_path(str(SCRIPT))
    started: list[str] = []

    def fake(command: list[str], **_: object) -> object:
        started.append(command[4])
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("subprocess.run", fake)
    assert script["main"]() == 1
    assert started == ["checks", "searched", "simulator"]
    printed = capsys.readouterr().out
    assert "strands    skipped: real links need Linux and root" in printed
    assert "checks     FAILED with exit code 1" in printed
