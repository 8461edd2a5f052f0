"""Proves that the report of a cost file shows what the file holds, alone and with a run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from run_directory import write_run
from test_ir_store import COSTS

from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable, PairCost, Together
from interlace.ir.graph import Kind
from interlace.report.build import build_report
from interlace.report.cost_tables import cost_summary
from interlace.report.heatmap import oef_png
from interlace.report.theme import DARK

TABLE = replace(
    COSTS,
    pairs=(
        PairCost(Kind.MATMUL, Kind.ALL_GATHER, "tp", 1.07, 1.04, 0.93, 7, 5, 8),
        PairCost(Kind.MATMUL, Kind.REDUCE_SCATTER, "tp", 1.0, 1.0, -0.25, 7, 5, 8),
        PairCost(Kind.ATTENTION, Kind.ALL_GATHER, "tp", 1.2, 1.5, 0.71, 7, 5, 8),
    ),
    compute_pairs=(Together("matmul", "matmul", 4_000_000, 4_000_000, 8_800_000),),
)


def lines(table: CostTable) -> list[list[str]]:
    return [line.split() for line in cost_summary(table).splitlines()]


def test_the_summary_is_a_grid_of_kinds() -> None:
    """Rows are compute kinds, columns collectives; what was not measured is a dash."""
    found = lines(TABLE)
    assert ["all-gather", "tp", "reduce-scatter", "tp"] in found
    assert ["matmul", "0.93", "-0.25"] in found
    assert ["attention", "0.71", "-"] in found
    assert ["attention", "1.20", "/", "1.50", "-"] in found
    assert ["all-gather", "tp", "50.0", "2,000", "0.57", "0", "%"] in found
    assert ["matmul", "+", "matmul", "4.00", "4.00", "8.80", "-0.20"] in found
    assert ["lanes", "that", "share", "a", "link:", "dp:", "nic,", "tp:", "nic"] in found


def test_a_table_without_pairs_says_what_it_has() -> None:
    """A computed table for a CPU has neither pairs nor a heat map."""
    bare = replace(TABLE, pairs=(), fits=(), lane_pairs=(), compute_pairs=(), links={})
    assert len(lines(bare)) == 1


def test_the_heat_map_depends_on_the_values() -> None:
    """A PNG; another effectiveness, another theme, another picture."""
    picture = oef_png(TABLE)
    assert picture.startswith(b"\x89PNG")
    other = replace(TABLE, pairs=(replace(TABLE.pairs[0], oef=0.1), *TABLE.pairs[1:]))
    assert len({picture, oef_png(other), oef_png(TABLE, theme=DARK)}) == 3
    assert oef_png(TABLE) == picture


def test_the_report_of_a_cost_file(tmp_path: Path) -> None:
    """A page and a picture beside it, also when its folder is given."""
    file = tmp_path / "mine.json"
    store.save(TABLE, file)
    written = build_report(file)
    assert [path.name for path in written] == ["mine.html", "mine-oef.png"]
    page = written[0].read_text()
    assert all(text in page for text in ("-0.25", "1.20 / 1.50", "data:image/png"))
    shutil.move(file, tmp_path / "costs.json")
    elsewhere = build_report(tmp_path, tmp_path / "out" / "page.html")
    assert [path.name for path in elsewhere] == ["page.html", "page-oef.png"]


def test_a_run_with_a_cost_file_shows_it(tmp_path: Path) -> None:
    """The run's page gains a section and a picture; without the file it has neither."""
    write_run(tmp_path)
    without = build_report(tmp_path)
    assert "<h2>Costs</h2>" not in without[0].read_text()
    store.save(TABLE, tmp_path / "costs.json")
    written = build_report(tmp_path)
    assert "<h2>Costs</h2>" in written[0].read_text()
    assert {path.name for path in written} - {path.name for path in without} == {"oef.png"}


def test_a_damaged_cost_file_is_named(tmp_path: Path) -> None:
    """As every damaged file of a run."""
    (tmp_path / "costs.json").write_text('{"operators": {}}')
    with pytest.raises(InputError, match=r"costs\.json is not a valid CostTable"):
        build_report(tmp_path)
