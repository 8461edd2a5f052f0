"""Rows that `make test` leaves to `make test-all`: those marked `wide`.

A row is wide if another row, of its table or of a table named beside it, runs the same mechanism;
what it adds is one more combination. Each file says which. `gloo/test_wide_rows.py` holds that no
file has wide rows alone.
"""

from typing import Any

import pytest

WIDE = pytest.mark.wide


def wide_unless(quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a row that is wide unless it is quick."""
    return () if quick else (WIDE,)


def asked(request: pytest.FixtureRequest, name: str, **others: Any) -> list[Any]:
    """The values of a parameter for which tests of this file run, where other parameters have these
    values: what one start of ranks has to run for all of them."""
    found = []
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        fits = all(given.get(key) == value for key, value in others.items())
        if item.path == request.path and name in given and fits:
            found.append(given[name])
    return found
