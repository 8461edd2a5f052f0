"""The examples that need one process do what they say: run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


def run(example: str, *options: str, folder: Path) -> str:
    """What the example prints, run elsewhere than in the repository."""
    done = subprocess.run(
        [sys.executable, *options, str(ROOT / "examples" / example)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_toy_is_planned_without_torch(tmp_path: Path) -> None:
    """In 60 lines: the plan as text, and a predicted time that is shorter than with one strand.
    The example itself asserts that torch was not imported."""
    text = (ROOT / "examples" / "toy_plan.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 60
    assert 'assert "torch" not in sys.modules' in text
    printed = run("toy_plan.py", folder=tmp_path)
    assert printed.startswith("interlace plan 3\nsearch merge")
    assert "phase rest+next+backward" in printed
    found = re.search(r"8 micro-batches: ([\d.]+) ms, one strand ([\d.]+) ms", printed)
    assert found is not None
    assert 0 < float(found[1]) < 0.8 * float(found[2])


def test_a_schedule_of_ones_own_runs(tmp_path: Path) -> None:
    """On one process, with the actions of the file and the bits of one strand."""
    printed = run("pairs_schedule.py", "-W", "error", folder=tmp_path)
    assert "__main__:pairs: loss" in printed
    assert "    forward 2 | backward 1\n    backward 2\n    forward 3\n" in printed
    assert "4 gradients, the same bits" in printed
