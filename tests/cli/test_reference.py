"""The generated reference page is the one that the code describes."""

import runpy
from pathlib import Path

from interlace.cli.run_file import preset_files

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "write_reference.py"


def test_the_run_file_page_is_current():
    """After a change in config.py: python scripts/write_reference.py."""
    script = runpy.run_path(str(SCRIPT))
    assert script["TARGET"].read_text(encoding="utf-8") == script["render"]() + "\n"


def test_the_list_of_decisions_is_complete():
    """After a new one: python scripts/write_reference.py. Numbers and titles are those of files."""
    script = runpy.run_path(str(SCRIPT))
    page = script["INDEX"].read_text(encoding="utf-8")
    assert page == script["with_decisions"](page)
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [file.read_text(encoding="utf-8").split(".")[0] for file in files]
    assert numbers == [f"# {int(file.name[:4])}" for file in files]


def test_a_field_without_help_is_noticed():
    """The page takes the docstring under a field; a field that has none has no entry."""
    script = runpy.run_path(str(SCRIPT))
    texts = script["field_help"](
        'class A:\n    x: int = 1\n    """Some\n    help."""\n    y: int = 2\n'
    )
    assert texts == {("A", "x"): "Some help."}


def test_the_command_line_page_names_the_presets():
    """Each preset that ships is in cli.md."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in preset_files())
