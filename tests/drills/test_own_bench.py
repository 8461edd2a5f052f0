"""Drill: a bench from one file of the user's own, run by `interlace bench`."""

import json
import re
from pathlib import Path

import pytest

from interlace.__main__ import main


def no_options() -> int:
    """Not a bench: it takes neither quick nor json_path."""
    return 0


def test_it_prints_its_table_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an option of its own, as the type that the file annotates."""
    file = tmp_path / "rows.json"
    words = ["bench", "own_bench:run", "--quick", "--width", "32", "--json", str(file)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"width 32 +\d+\.\d+ ms +\d+\.\d+ ms +\d+\.\d\d", printed)
    [row] = json.loads(file.read_text())["rows"]
    assert row["case"] == "width 32"
    assert row["ours"] > 0 < row["baseline"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("own_bench", "there is no bench 'own_bench'"),
        ("own_bensh:run", "bench 'own_bensh:run' cannot be imported"),
        ("own_bench:walk", "'own_bench' has no 'walk'"),
        ("test_own_bench:no_options", "takes no quick and no json_path"),
        ("own_bench:run --widht 3", "bench own_bench:run has no option --widht"),
        ("own_bench:run --width wide", "--width wide must be a whole number"),
    ],
)
def test_wrong_names_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what was wrong."""
    assert main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err
