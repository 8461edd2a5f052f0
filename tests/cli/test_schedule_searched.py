"""`interlace schedule searched` as a user types it: the page, files that read back, and what is
wrong with a file of units."""

import json
from pathlib import Path

import pytest

from interlace.__main__ import main
from interlace.cli.schedule import SearchFlags
from interlace.schedules.finder import find
from interlace.search.pipelines.pipeline_search import TRIES
from interlace.search.pipelines.units_file import read_units

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "uneven_pipeline.toml"
QUICK = ("--tries", "60", "--micro-batches", "8")
SMALL = """\
[link]
gb_per_s = 1.0
latency_us = 3.0
[kind.even]
forward_ms = 1
input_ms = 2
weight_ms = 0.5
boundary_mib = 2
[kind.odd]
forward_ms = 3
input_ms = 3
weight_ms = 3
[[unit]]
name = "first"
forward_ms = 0.25
input_ms = 0
weight_ms = 0
saved_mib = 1.5
kept_mib = 1
held_mib = 4
boundary_ms = 0.125
[[unit]]
name = "layers"
count = 3
kinds = ["even", "odd"]
"""


def searched(*arguments: str) -> int:
    return main(["schedule", "searched", "--costs", str(EXAMPLE), *arguments])


def test_the_page_of_a_searched_pipeline(capsys, tmp_path) -> None:
    """The cut, the table with interleaved 1F1B as users cut it, memory on each rank; JSON with the
    same numbers, and a picture."""
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    assert searched(*QUICK, "--json", str(file), "--picture", str(picture)) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "4 ranks, 8 micro-batches, 34 units, by simulation" in out
    rows = [line.split() for line in out.splitlines()]
    ours = next(row for row in rows if row[:2] == ["searched", "searched"])
    assert ours[3] == f"{found['step_ns'] / 1e6:.0f}"
    assert ours[4] == f"{found['against']['step_ns'] / found['step_ns']:.2f}x"
    assert float(ours[4].rstrip("x")) > 1.3
    assert found["floor_ns"] <= found["step_ns"] <= min(e["step_ns"] for e in found["fixed"])
    units = [name for chunk in found["chunks"] for name in chunk["units"]]
    assert units == [unit.name for unit in read_units(EXAMPLE)]
    assert found["split_at"] == [chunk["units"][0] for chunk in found["chunks"][1:]]
    assert {chunk["rank"] for chunk in found["chunks"]} == {0, 1, 2, 3}


@pytest.mark.parametrize(("form", "end"), [("text", ".txt"), ("csv", ".csv")])
def test_what_was_searched_reads_back(form: str, end: str, capsys, tmp_path) -> None:
    """As a file of `interlace schedule`, and as a schedule of `compile_step`; with a limit."""
    file, numbers = tmp_path / f"found{end}", tmp_path / "found.json"
    limit = ("--memory-gib", "10.1", "--json", str(numbers))
    assert searched(*QUICK, *limit, "--form", form, "--messages") == 0
    file.write_text(capsys.readouterr().out)
    assert max(json.loads(numbers.read_text())["peak_bytes"]) <= 10.1 * 2**30
    assert main(["schedule", str(file), "--form", form, "--messages"]) == 0
    assert capsys.readouterr().out == file.read_text()
    assert len(find(str(file)).of_ranks(4, 8)) == 4


def test_tries_of_the_command_are_those_of_the_function() -> None:
    """The command is parsed without loading the search, so the number stands in both."""
    assert SearchFlags().tries == TRIES


def test_units_of_a_file(tmp_path) -> None:
    """Kinds take turns, sizes become bytes, and a boundary takes latency and bytes / rate."""
    file = tmp_path / "units.toml"
    file.write_text(SMALL)
    first, *layers = read_units(file)
    assert (first.forward_ns, first.boundary_ns) == (250_000, 125_000)
    assert (first.saved_bytes, first.kept_bytes, first.held_bytes) == (3 << 19, 1 << 20, 4 << 20)
    assert [unit.name for unit in layers] == ["layers.0", "layers.1", "layers.2"]
    assert [unit.input_ns for unit in layers] == [2_000_000, 3_000_000, 2_000_000]
    assert [unit.boundary_ns for unit in layers] == [2_100_152, 0, 2_100_152]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("gb_per_s = 1.0", "gb_per_s = 0", "has boundary_mib, and [link] no gb_per_s"),
        ("gb_per_s = 1.0", "rate = 1", "[link]: unknown key 'rate'"),
        ("[kind.odd]\nforward_ms = 3", "[kind.odd]", "[kind.odd] has no forward_ms"),
        ("forward_ms = 3", "forward_ms = -3", "[kind.odd]: forward_ms = -3"),
        ("forward_ms = 3", 'forward_ms = "3"', "[kind.odd]: forward_ms = '3'"),
        ('"odd"]', '"od"]', "[[unit]] 2: there is no [kind.od]"),
        ("count = 3", "count = 0", "[[unit]] 2: count = 0"),
        ("count = 3", "forward_ms = 3", "[[unit]] 2 has kinds and costs of its own"),
        ('["even", "odd"]', '"even"', "[[unit]] 2: kinds = 'even'"),
        ('name = "first"', "", "[[unit]] 1 has no name"),
        ('name = "first"', 'name = "layers.1"', "two units are called 'layers.1'"),
        ("[link]", "link = 3\n[kind.x]", "[link] is no table"),
        ("[kind.odd]", "[kind.even]", "this key or table was given before"),
        (SMALL, "", "has no [[unit]]"),
    ],
)
def test_files_that_are_wrong(before: str, after: str, message: str, tmp_path, capsys) -> None:
    """Each is refused with the file and the place."""
    file = tmp_path / "units.toml"
    assert before in SMALL
    file.write_text(SMALL.replace(before, after, 1))
    assert main(["schedule", "searched", "--costs", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["searched"], "'searched' needs --costs FILE"),
        (["zb_v", "--costs", str(EXAMPLE)], "belong to a search"),
        (["--memory-gib", "3"], "belong to a search"),
        (["searched", "--costs", str(EXAMPLE), "--forward-ms", "2"], "takes times from"),
        (["searched", "--costs", "none.toml"], "cannot read none.toml"),
        (["searched", "--costs", str(EXAMPLE), "--memory-gib", "-1"], "--memory-gib -1 is no size"),
        (["searched", "--costs", str(EXAMPLE), "--tries", "0"], "--tries 0"),
        (["searched", "--costs", str(EXAMPLE), "--overlap", "2"], "overlap = 2 is no share"),
        (["searched", "--costs", str(EXAMPLE), "--messages"], "the grid shows no messages"),
        (["searched", "--costs", str(EXAMPLE), "--picture", "a.jpg"], "is not a .png file"),
        (["searched", "--costs", str(EXAMPLE), "--ranks", "40"], "34 units cannot be cut"),
    ],
)
def test_what_cannot_be_searched(arguments: list[str], message: str, capsys) -> None:
    """With what to set."""
    assert main(["schedule", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "hint: " in error or "none.toml" in error


def test_memory_that_is_too_small_is_refused_with_numbers(capsys) -> None:
    """What one micro-batch at a time takes, and what of it is held."""
    assert searched(*QUICK, "--memory-gib", "3") == 2
    error = capsys.readouterr().err
    assert "no pipeline was found that fits into 3.0 GiB a rank" in error
    assert "hint: give " in error
