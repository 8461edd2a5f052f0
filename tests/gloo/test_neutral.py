"""Holds changes of structure to `neutral.json`: the same graphs, plans, losses, gradients, weights.

The record was made before the structure changed (`neutral_runs.py --record`). All run files are
traced and planned, and some trained. `make test` does so with one run file of each pass over
graphs; wide are the others, which differ by their layout alone, and those that are trained beside
one. With INTERLACE_NEUTRAL=all all are trained, in all ways: a setting, not a mark, as their bits
are those of one kind of CPU, and elsewhere nothing comes of the time. Where graphs may differ
because torch or transformers is another version, or bits because the CPU is another one, a
difference skips with these words; one strand and two must have equal bits anywhere.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neutral_runs import (
    ENVIRONMENT,
    QUICK,
    RECORD,
    RUNS,
    STEPS,
    plan_all,
    prepare,
    ranks_of,
    this_cpu,
    train,
    versions,
    ways_of,
)

from wide import asked, wide_unless

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(900)]  # the first test plans for all
ALL = os.environ.get("INTERLACE_NEUTRAL") == "all"
PLANNED = ("zero 3", "cp ring", "hugging face", "recompute budget", "decompose ends", "bf16")
"""Run files whose plans are not wide: of unlike layouts, models and passes."""
TRAINED = ("zero 3",)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """What was, by run file, and what it was made with."""
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("neutral"))


@pytest.fixture(scope="module")
def planned(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Graphs and plans of the run files that were asked for."""
    pytest.importorskip("transformers")
    return plan_all(folder, tuple(dict.fromkeys(asked(request, "name"))))


def differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    """Where two values of a record differ, as `plans / one strand / ahead: 0, now 1`."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in was | now:
            yield from differences(was.get(key), now.get(key), f"{where} / {key}" if where else key)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from differences(one, other, f"{where} / {index}")
    elif was != now:
        yield f"{where}: {was!r}, now {now!r}"


def other_versions(name: str, record: dict[str, Any]) -> str:
    """Which versions of what makes the graphs of a run file are not those of the record."""
    matter = ("torch", "transformers") if "model.config" in RUNS[name] else ("torch",)
    was, now = record["made with"]["versions"], versions()
    return ", ".join(
        f"{each} {was[each]}, here {now[each]}" for each in matter if was[each] != now[each]
    )


def skip_if_other(reason: str, found: list[str]) -> None:
    """Skip where a difference has a known reason outside the package."""
    if found and reason:
        pytest.skip(f"{reason}; {len(found)} values differ, the first: {found[0]}")


def test_the_record_has_every_run_file_and_each_way(record: dict[str, Any]) -> None:
    """At least the 14 that were asked for, of one and of two strands, five steps on every rank."""
    assert list(record["runs"]) == list(RUNS)
    assert len(RUNS) >= 14
    assert record["made with"]["environment"] == ENVIRONMENT
    for name, run in record["runs"].items():
        assert tuple(run["training"]) == ways_of(name)
        for trained in run["training"].values():
            assert len(trained["ranks"]) == ranks_of(name)
            assert all(len(rank["gradients"]) == STEPS for rank in trained["ranks"])
    digests = {run["graphs"]["all"]["digest"] for run in record["runs"].values()}
    assert len(digests) >= 14  # accumulation, dropout and memory leave graphs as they are


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=wide_unless(each in PLANNED)) for each in RUNS]
)
def test_graphs_and_plans_are_those_of_the_record(
    name: str, record: dict[str, Any], planned: dict[str, Any]
) -> None:
    """Every operator of every strand, every order and barrier, every predicted time and peak."""
    was = {key: record["runs"][name][key] for key in ("graphs", "plans")}
    found = list(differences(was, planned[name]))
    other = other_versions(name, record)
    skip_if_other(f"the record's graphs are of {other}" if other else "", found)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=wide_unless(each in TRAINED)) for each in (RUNS if ALL else QUICK)],
)
def test_five_steps_have_the_bits_of_the_record(
    name: str, record: dict[str, Any], folder: Path, planned: dict[str, Any]
) -> None:
    """Losses, gradient norms, and on every rank the hashes of gradients, weights and state."""
    assert planned[name]
    now = {way: train(folder, name, way) for way in ways_of(name) if ALL or way != "eager"}
    if "2" in now:
        found = list(differences(now["1"], now["2"]))
        assert not found, "one strand and two differ:\n" + "\n".join(found)
    recorded = record["runs"][name]["training"]
    found = list(differences({way: recorded[way] for way in now}, now))
    other = other_versions(name, record)
    if record["made with"]["cpu"] != this_cpu():
        was = record["made with"]["cpu"]["model"]
        other = f"{other}, and of another CPU, {was}" if other else f"another CPU, {was}"
    skip_if_other(f"the bits of the record are of {other}" if other else "", found)
    assert not found, "\n".join(found)
