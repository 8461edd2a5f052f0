"""Every test carries the name of its folder as marker: `pytest -m "pure or oracle"`. Those of the
lab and of files marked `alone` run one at a time, after the others (`make test`)."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_HERE = Path(__file__).parent
# Of the tests' own processes, and of all that they start. Threads of torch wait for each other by
# spinning: two test files at a time on two cores took five times as long with two threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """In a script `make test &` ignores SIGINT, and so would all that the tests start. No test of
    Hypothesis depends on a time: machines are shared, and their load is no property of the code."""
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder, *rest = item.path.relative_to(_HERE).parts
        if rest:
            item.add_marker(folder)
        if folder == "lab":
            item.add_marker("alone")
