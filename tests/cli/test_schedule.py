"""`interlace schedule` as a user types it: tables, grids, files that read back, and what is
wrong."""

import json

import pytest

from interlace.__main__ import main


def run(*arguments: str) -> int:
    return main(["schedule", *arguments])


def test_all_schedules_beside_each_other(capsys, tmp_path):
    """The fastest first; times of 1F1B and GPipe are those of their formula."""
    file = tmp_path / "all.json"
    assert run("--ranks", "2", "--micro-batches", "4", "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks, 4 micro-batches, by simulation"
    found = json.loads(file.read_text())
    steps = {row["schedule"]: row["step_ns"] for row in found["schedules"]}
    assert steps["one_f_one_b"] == steps["gpipe"] == 15_000_000
    assert steps["one_strand"] == 24_000_000
    assert list(steps.values()) == sorted(steps.values())
    assert [line.split()[0] for line in lines[4 : 4 + len(steps)]] == list(steps)
    assert "two_strand" not in steps
    assert lines[-1] == "left out: two_strand runs one stage, not 2"


def test_one_schedule_as_grid_and_picture(capsys, tmp_path):
    """With the numbers of the step, and the name that a paper gives it."""
    picture = tmp_path / "a.png"
    arguments = ("1F1B", "--ranks", "2", "--micro-batches", "3", "--picture", str(picture))
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 0  F0.1 F0.2 .    B0.1 F0.3 B0.2 .    B0.3\n")
    assert "one_f_one_b on 2 ranks, 3 micro-batches, by simulation: 12.0 ms, bubble 25.0 %" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("form", ["text", "csv"])
@pytest.mark.parametrize("messages", [(), ("--messages",)])
def test_what_is_written_reads_back(form, messages, capsys, tmp_path):
    """With the same numbers as the schedule that it was written from."""
    assert run("zb_v", "--ranks", "3", "--micro-batches", "7", "--form", form, *messages) == 0
    file = tmp_path / f"mine.{'txt' if form == 'text' else 'csv'}"
    file.write_text(capsys.readouterr().out)
    assert run(str(file)) == 0
    again = capsys.readouterr().out
    assert run("zb_v", "--ranks", "3", "--micro-batches", "7") == 0
    assert again.replace(str(file), "zb_v") == capsys.readouterr().out


def test_eager_folded_runs_as_far_ahead_as_times_ask_for(tmp_path):
    """And keeps more for it."""
    peaks = []
    for transfer in ("0", "0.4"):
        file = tmp_path / f"{transfer}.json"
        assert run("eager_folded", "--transfer-ms", transfer, "--json", str(file)) == 0
        peaks.append(json.loads(file.read_text())["schedules"][0]["peak_micro_batches"])
    assert peaks == [4.5, 7.5]


WRONG_LISTS = """\
rank 0: forward_0 1, backward_0 1, forward_0 2, backward_0 2
rank 1: forward_1 1, forward_1 2, backward_1 1, backward_1 2
"""


def test_a_file_that_cannot_run_is_drawn(capsys, tmp_path):
    """Both ranks that wait for each other are named and marked."""
    file = tmp_path / "wrong.txt"
    file.write_text(WRONG_LISTS)
    assert run(str(file)) == 2
    said = capsys.readouterr().err
    assert "would never end: rank 0 cannot run the backward of micro-batch 1" in said
    assert "rank 0  F0.1   [B0.1] F0.2   B0.2\nrank 1  F1.1   [F1.2] B1.1   B1.2\n" in said
    assert "hint: change the order of one of these ranks" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "ranks = 0"),
        (("--micro-batches", "0"), "micro_batches = 0"),
        (("--forward-ms", "-1"), "--forward-ms -1 is no time"),
        (("--input-ms", "nan"), "--input-ms nan is no time"),
        (("--overlap", "1.5"), "--overlap 1.5 is no share"),
        (("--forward-ms", "0", "--input-ms", "0", "--weight-ms", "0"), "all passes take no time"),
        (("--picture", "a.png"), "a picture shows one schedule"),
        (("gpipe", "--picture", "a.jpg"), "a.jpg is not a .png file"),
        (("gpipe", "--messages"), "the grid shows no messages"),
        (("gpip",), "unknown schedule 'gpip'"),
        (("two_strand",), "two_strand runs one stage, not 4"),
        (("nowhere.txt",), "cannot read nowhere.txt"),
    ],
)
def test_what_is_asked_wrongly(arguments, message, capsys):
    """A message and a hint, and nothing is written."""
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "hint: " in said


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.txt", "", "has no actions"),
        ("odd.csv", "0F0,1F0,1B0,0B0\n2F0,2B0\n", "has 3 chunks on 2 ranks"),
        ("half.csv", "0F0,0SEND_F0,0B0\n1F0,1B0\n", "is not received"),
        ("what.csv", "0F0,what\n", "line 1: 'what' is no action"),
    ],
)
def test_files_that_are_wrong(name, text, message, capsys, tmp_path):
    """Named, with the line or the item."""
    file = tmp_path / name
    file.write_text(text)
    assert run(str(file)) == 2
    assert message in capsys.readouterr().err
