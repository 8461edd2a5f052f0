"""The structure that the design promises: where private APIs live, how long files are."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "interlace"
FILES = sorted(SOURCE.rglob("*.py"))
PRIVATE_HOME = SOURCE / "graphs" / "torch_private.py"
LONGEST_FILE = 400
LONGEST_FUNCTION = 70


def _imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_torch_lives_in_one_module(path: Path) -> None:
    """No other module imports an underscore name of torch, or torch.testing."""
    names = [name for name in _imports(ast.parse(path.read_text())) if name.startswith("torch.")]
    private = [name for name in names if re.search(r"\._|^torch\.testing", name)]
    assert path == PRIVATE_HOME or not private


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    """One idea each."""
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


def test_no_function_level_mutable_globals() -> None:
    """Modules hold no `global` statement."""
    for path in FILES:
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not any(isinstance(node, ast.Global) for node in nodes), path
