"""docs/extending.md shows the very files that the drills run."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = sorted(HERE.glob("own_*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_page_shows_the_file(file: Path) -> None:
    """Word for word, as one block, and it names the file; a test beside the file uses it."""
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert file.read_text(encoding="utf-8") in shown
    assert f"`{file.name}`" in PAGE
    assert file.stem in (HERE / f"test_{file.stem}.py").read_text(encoding="utf-8")


def test_there_is_one_for_each_thing() -> None:
    """The six that the page promises."""
    names = {file.stem.removeprefix("own_") for file in FILES}
    assert names == {"schedule", "search", "model", "collective", "cluster", "bench"}
