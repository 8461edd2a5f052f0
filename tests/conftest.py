"""Every test carries the name of its folder as marker: `pytest -m "pure or oracle"`."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder, *rest = item.path.relative_to(_HERE).parts
        if rest:
            item.add_marker(folder)
