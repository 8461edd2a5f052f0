"""Proves that `make test` leaves out no whole file: one that has rows marked `wide` has others too,
and says what it adds by them."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

TESTS = Path(__file__).parents[1]


def of_two_kinds() -> list[Path]:
    """The files that import the mark."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if "wide" in names and path != Path(__file__):
            found.append(path)
    return found


def marks_of(test: FunctionType) -> list[pytest.Mark]:
    return list(getattr(test, "pytestmark", ()))


def is_wide(marks: Iterator[pytest.Mark]) -> bool:
    return any(mark.name == "wide" for mark in marks)


def rows_of(mark: pytest.Mark) -> tuple[int, int]:
    """How many rows of a parametrization there are, and how many of them are wide."""
    rows = list(mark.args[1])
    marked = (each for each in rows if is_wide(iter(getattr(each, "marks", ()))))
    return len(rows), sum(1 for _ in marked)


def runs(module: ModuleType) -> tuple[int, int]:
    """How many tests of a module have rows in `make test`, and how many have wide ones."""
    quick = wide = 0
    for name, test in vars(module).items():
        if not name.startswith("test_") or not isinstance(test, FunctionType):
            continue
        tables = [rows_of(mark) for mark in marks_of(test) if mark.name == "parametrize"]
        alone = is_wide(iter(marks_of(test)))
        quick += not alone and all(wide < count for count, wide in tables)
        wide += alone or any(wide for _, wide in tables)
    return quick, wide


@pytest.mark.parametrize("path", of_two_kinds(), ids=lambda path: path.stem)
def test_a_file_with_wide_rows_has_others(path: Path) -> None:
    module = importlib.import_module(path.stem)
    quick, _ = runs(module)
    assert quick, "make test runs nothing of this file"
    assert "wide" in (module.__doc__ or "").lower(), "say what the wide rows add"


def test_there_are_such_files() -> None:
    assert len(of_two_kinds()) > 10


def test_a_file_of_wide_rows_alone_is_found() -> None:
    module = ModuleType("all_wide")

    @pytest.mark.wide
    def whole() -> None: ...

    @pytest.mark.parametrize("row", [pytest.param(1, marks=pytest.mark.wide)])
    def rows(row: int) -> None: ...

    @pytest.mark.parametrize("row", [1, pytest.param(2, marks=pytest.mark.wide)])
    def some(row: int) -> None: ...

    vars(module).update(test_whole=whole, test_rows=rows)
    assert runs(module) == (0, 2)
    vars(module).update(test_some=some)
    assert runs(module) == (1, 3)
