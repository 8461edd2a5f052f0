"""Proves that a cache of measured times is taken where it can be trusted, and never in the way."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from processes import gloo_group, run_ranks
from test_ir_store import COSTS

from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable, PairCost
from interlace.ir.graph import Kind
from interlace.measure.cache import cached
from interlace.measure.repeats import least_noisy
from interlace.ranks.small_collectives import largest
from interlace.train.profiling import Files, starting_point

STRANGE = PairCost(Kind.MATMUL, Kind.ALL_GATHER, "tp", 1.0, 1.0, -29.0, 7, 5, 157)
NOISY = replace(COSTS, pairs=(STRANGE,))
FILE = f"{COSTS.graph_digest}-{COSTS.machine}.json"


class Bench:
    """A stand-in for measuring: gives what it was told, and counts."""

    def __init__(self, *tables: CostTable) -> None:
        self.tables = list(tables)
        self.said: list[str] = []

    def ask(self, folder: Path | None) -> CostTable:
        """What a run does at start-up."""
        return cached(
            folder,
            COSTS.machine,
            COSTS.graph_digest,
            lambda: self.tables.pop(0),
            say=self.said.append,
        )


def test_quiet_times_are_measured_once(tmp_path: Path) -> None:
    """The second run takes them, and neither has anything to say."""
    bench = Bench(COSTS)
    assert bench.ask(tmp_path / "costs") == COSTS
    assert bench.ask(tmp_path / "costs") == COSTS
    assert not bench.tables
    assert not bench.said


def test_noisy_times_are_said_and_not_kept(tmp_path: Path) -> None:
    """The run goes on with them and says so; the next run measures again and keeps what it got."""
    bench = Bench(NOISY, COSTS)
    assert bench.ask(tmp_path) == NOISY
    [warning] = bench.said
    assert warning.startswith("warning: the measured times are noisy")
    assert "-29.00" in warning
    assert "\n" not in warning
    assert not list(tmp_path.iterdir())
    assert bench.ask(tmp_path) == COSTS
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert Bench(NOISY).ask(None) == NOISY


def test_noisy_times_of_an_earlier_version_are_not_taken(tmp_path: Path) -> None:
    """A file that holds them is measured again, and replaced by quiet ones."""
    store.save(NOISY, tmp_path / FILE)
    bench = Bench(COSTS)
    assert bench.ask(tmp_path) == COSTS
    [said] = bench.said
    assert "are noisy" in said
    assert said.endswith("measuring again")
    assert store.load(tmp_path / FILE, CostTable) == COSTS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        store.dumps(COSTS)[:40].encode(),
        b'{"of": "another version"}',
        store.dumps(replace(COSTS, machine="another")).encode(),
        "folder",
        "forbidden",
        "loop",
    ],
)
def test_a_cache_that_cannot_be_read_counts_as_absent(
    tmp_path: Path, content: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so; the run, and the one after it, have their times."""
    path = tmp_path / FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path)
    else:  # root may read everything, so that a mode would not do

        def refuse(*_: object, **__: object) -> str:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_text", refuse)
    bench = Bench(COSTS, COSTS)
    assert bench.ask(tmp_path) == COSTS
    assert "are not taken from the cache" in bench.said[0]
    assert FILE in bench.said[0]
    assert "\n" not in bench.said[0]
    monkeypatch.undo()
    assert bench.ask(tmp_path) == COSTS


def test_a_cache_that_cannot_be_written_costs_only_the_next_run(tmp_path: Path) -> None:
    """The run has its times."""
    (tmp_path / "file").write_text("")
    bench = Bench(COSTS)
    assert bench.ask(tmp_path / "file") == COSTS
    assert "are not kept" in bench.said[-1]


def on_two_ranks(folder: str) -> list[object]:
    """A child: the first rank's file is noisy, and what the ranks measure differs and is noisy."""
    with gloo_group():
        rank = int(os.environ["RANK"])
        tries = [9 + rank, 7 + rank, 8 - 4 * rank]

        def measure() -> CostTable:
            agreed = largest({"issue": tries.pop(0)})["issue"]
            return replace(NOISY, issue_ns=agreed)

        said: list[str] = []
        table = cached(
            Path(folder),
            COSTS.machine,
            COSTS.graph_digest,
            lambda: least_noisy(measure, lambda found: found.issue_ns),
            say=said.append,
        )
    return [store.dumps(table), len(said), len(tries)]


def test_ranks_agree_on_what_to_measure_again(tmp_path: Path) -> None:
    """All try equally often and end with one table; only the first one speaks."""
    store.save(NOISY, tmp_path / FILE)
    results = run_ranks("test_cost_cache:on_two_ranks", 2, args=[str(tmp_path)])
    tables, said, left = zip(*(result.value for result in results), strict=True)
    assert {store.loads(table, CostTable, "table").issue_ns for table in tables} == {8}
    assert said == (2, 0)
    assert left == (0, 0)
    assert store.load(tmp_path / FILE, CostTable).issue_ns == NOISY.issue_ns


def test_a_profile_with_noise_is_not_current(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """`interlace profile` measures again what is noisy in its output, and no more."""
    files, empty = Files(tmp_path / "cost.json", again=False), replace(COSTS, operators={})
    good = replace(STRANGE, compute=Kind.ATTENTION, oef=0.9)
    store.save(replace(COSTS, pairs=(good, STRANGE)), files.output)
    assert starting_point(files, empty) == (replace(COSTS, pairs=(good,)), False)
    assert "cost.json is measured again in part: overlap effectiveness" in capfd.readouterr().err
    store.save(COSTS, files.output)
    assert starting_point(files, empty) == (COSTS, True)


def test_what_an_interrupted_profile_left_counts_as_absent_if_it_cannot_be_read(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The output itself, which the user named, is never replaced if it is no cost file."""
    files, empty = Files(tmp_path / "cost.json", again=False), replace(COSTS, operators={})
    files.partial.write_text('{"operators": {')
    assert starting_point(files, empty) == (empty, False)
    assert "starting afresh" in capfd.readouterr().err
    files.output.write_text("mine")
    with pytest.raises(InputError, match="is not valid JSON"):
        starting_point(files, empty)
