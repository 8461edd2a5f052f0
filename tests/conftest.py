"""Every test carries the name of its folder as marker: `pytest -m "pure or oracle"`. Those marked
`alone` run one at a time, after the others, and those marked `wide` in `make test-all` only."""

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


_LONGEST = (
    "train", "train_pipeline", "hugging_face_experts", "u_transformer", "profile", "architectures",
    "docs", "repeat", "hf_trainer", "strands", "deep_forward", "train_experts", "fully_shard",
    "torchtitan", "neutral", "pipeline_models", "stage_layouts_models", "plan_pipeline",
    "decompose_pass", "decompose_attention", "decompose_choose", "strange_modules", "compile_step",
    "expert_parallel", "layout_search",
)  # fmt: skip
"""Files that take more than 65 s of a worker in `make test`, the longest first."""
_LONG_FIRST = ("gloo", "drills", "cli", "oracle", "pure")
"""Where files run beside others, those of several processes come first: short ones fill what is
left at the end, where a long one would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder, *rest = item.path.relative_to(_HERE).parts
        if rest:
            item.add_marker(folder)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, int]:
    name, folder = item.path.stem.removeprefix("test_"), item.path.relative_to(_HERE).parts[0]
    length = _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
    place = _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)
    return length, place
