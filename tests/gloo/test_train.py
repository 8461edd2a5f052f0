"""Proves what `interlace train` promises, on two real ranks: results, files, refusals.

Wide are two strands that are asked for, which a run has by itself, a second field in which ranks
disagree, and plans with an operator too few or too many, which `pure/test_ir_plan.py` has too.
"""

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import free_port
from training import Workplace

from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.ir import plan as plans
from interlace.ir import store
from interlace.ir.timeline import Timeline, overlaps
from interlace.report.cost_tables import headline
from interlace.train.environment import describe_environment
from phases import both
from wide import WIDE

ALONE = ("--parallel.tensor", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace in which `out` holds a finished run of two strands, compared with the others."""
    place = Workplace(tmp_path_factory.mktemp("training"))
    place.train("--compare.steps", "2", out="out", afresh=True)
    return place


def test_a_run_leaves_its_results(place: Workplace) -> None:
    """Metrics, comparison, timelines, environment, plan and the resolved run file."""
    out = place.folder / "out"
    steps, tests = place.events("out", "step"), place.events("out", "evaluate")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert all(event["tokens_per_s"] > 0 and event["grad_norm"] > 0 for event in steps)
    assert [event["step"] for event in steps if "exposed_ms" in event] == [3, 4]
    assert all(0 <= event["hidden_fraction"] <= 1 for event in steps if "exposed_ms" in event)
    assert [event["step"] for event in tests] == [0, 4]
    assert tests[0]["bits_per_byte"] == pytest.approx(8, abs=0.1)  # a guess among 256 bytes
    assert tests[1]["bits_per_byte"] < tests[0]["bits_per_byte"] - 0.5
    (end,) = place.events("out", "end")
    assert (end["step"], end["reason"]) == (4, "finished")

    environment = json.loads((out / "environment.json").read_text())
    assert {"interlace", "torch", "python", "device", "link", "data", "command"} <= set(environment)
    assert (environment["world_size"], environment["seed"]) == (2, 1)
    again = load_run_config(str(out / "run.toml"), {})
    first = load_run_config(str(place.folder / "run.toml"), {"compare.steps": "2"})
    assert again == first
    names = sorted(path.name for path in (out / "timelines").iterdir())
    assert names == [f"{mode}-rank{rank}.json" for mode in ("1", "2", "eager") for rank in (0, 1)]
    for name in names:
        timeline = store.load(out / "timelines" / name, Timeline)
        assert timeline.length_ns > 0
        assert timeline.collectives
        assert not overlaps(tuple(span for span in timeline.spans if span.lane == "compute"))


def test_the_comparison_says_that_strands_change_nothing(place: Workplace) -> None:
    """Bits of one and two strands, and distance to eager autograd."""
    comparison = json.loads((place.folder / "out" / "comparison.json").read_text())
    assert comparison["losses_identical"] is True
    assert comparison["max_relative_difference_to_eager"] <= 1e-6
    modes = comparison["modes"]
    assert set(modes) == {"eager", "1", "2"}
    assert modes["1"]["loss_bits"] == modes["2"]["loss_bits"]
    assert all(len(mode["step_ms"]) == len(mode["losses"]) == 2 for mode in modes.values())
    # Compared steps are the first steps of training, which starts again from the same weights.
    assert modes["2"]["losses"] == place.losses("out")[:2]


@pytest.mark.parametrize("strands", [pytest.param("2", marks=WIDE), "1", "eager"])
def test_every_way_to_run_gives_the_same_losses(place: Workplace, strands: str) -> None:
    """Bit for bit for strands, with the same seed and without a comparison before."""
    out = f"out-{strands}"
    place.train("--strands", strands, out=out)
    if strands == "eager":
        assert place.losses(out) == pytest.approx(place.losses("out"), rel=1e-5)
    else:
        assert place.losses(out) == place.losses("out")
        assert (
            place.events(out, "evaluate")[1]["loss"] == place.events("out", "evaluate")[1]["loss"]
        )


def test_a_plan_made_without_ranks_is_run(place: Workplace) -> None:
    """`interlace plan` traces the same graph as the ranks do; its plan gives the same losses."""
    place.interlace("plan", "run.toml", "--output", "plan.txt")
    place.train("--plan.file", "plan.txt", out="out-planned")
    planned = plans.read(place.folder / "plan.txt")
    assert plans.read(place.folder / "out-planned" / "plan.txt") == planned
    measured = plans.read(place.folder / "out" / "plan.txt")
    assert planned.graph_digest == measured.graph_digest
    assert planned.cost_digest != measured.cost_digest
    assert place.losses("out-planned") == place.losses("out")


@pytest.mark.parametrize(
    "name", ["moved", pytest.param("gone", marks=WIDE), pytest.param("doubled", marks=WIDE)]
)
def test_an_edited_plan_is_refused(place: Workplace, name: str) -> None:
    """An operator moved before its input, taken out or doubled: exit 2, naming it."""
    place.interlace("plan", "run.toml", *ALONE, "--output", "alone.txt")
    lines = (place.folder / "alone.txt").read_text().splitlines()
    phases = plans.read(place.folder / "alone.txt").phases
    phase = both(phases)
    order = phases[phase].order
    head = next(i for i, line in enumerate(lines) if line.startswith(f"phase {phase} "))
    body = lines[head + 2 : head + 2 + len(order)]
    edits = {
        "gone": (body[:-1], f"operator {order[-1]!r} of the graph is missing"),
        "doubled": ([*body, body[0]], f"{order[0]!r} comes twice"),
        "moved": ([*body[1:], body[0]], f"comes before its input {order[0]!r}"),
    }
    edited, message = edits[name]
    title = lines[head].replace(f"operators {len(order)} ", f"operators {len(edited)} ")
    rest = lines[head + 2 + len(order) :]
    text = [*lines[:head], title, lines[head + 1], *edited, *rest]
    (place.folder / f"{name}.txt").write_text("\n".join(text) + "\n")
    said = place.train(*ALONE, "--plan.file", f"{name}.txt", out=f"out-{name}", code=2)
    assert f"plan, phase {phase!r}" in said
    assert message in said
    assert not (place.folder / f"out-{name}" / "metrics.jsonl").exists()


def test_a_plan_of_another_model_is_refused(place: Workplace) -> None:
    """The graph's hash is in the plan."""
    plan = place.folder / "out" / "plan.txt"
    said = place.train(*ALONE, "--plan.file", str(plan), out="out-other", code=2)
    assert "was made for graph" in said
    assert "plan again for this model" in said


def test_the_folder_of_an_earlier_run_is_kept(place: Workplace) -> None:
    """Without output.overwrite nothing in it changes."""
    out = place.folder / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    said = place.train(*ALONE, out="out", code=2)
    assert "holds an earlier run" in said
    assert "output.overwrite" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_s_own_costs_are_in_its_report(place: Workplace, tmp_path: Path) -> None:
    """The times that its plan was made from, under the name by which the report looks for them."""
    from interlace.ir.costs import CostTable
    from interlace.report.build import build_report

    shutil.copytree(place.folder / "out", tmp_path / "out")
    table = store.load(tmp_path / "out" / "costs.json", CostTable)
    page, *others = build_report(tmp_path / "out")
    assert "<h2>Costs</h2>" in page.read_text()
    assert headline(table) in page.read_text()
    assert {path.name for path in others} == {"timeline.png", "trace.json.gz", "oef.png"}


def test_a_new_run_leaves_nothing_of_the_earlier_one(place: Workplace) -> None:
    """Neither what that run wrote, nor what was drawn from it; which is said. Other files stay."""
    from interlace.report.build import build_report

    shutil.copytree(place.folder / "out", place.folder / "again")
    folder = place.folder / "again"
    drawn = [path.name for path in build_report(folder)]
    events = folder / "tensorboard" / "events.out.tfevents.1.host.2.0"
    events.parent.mkdir()
    events.write_bytes(b"")
    for mine in ("notes.txt", "monday.html", "timelines/notes.json"):
        (folder / mine).write_text("mine")
    alone = (*ALONE, "--strands", "1", "--train.steps", "1", "--hardware.peak_tflops", "0.1")
    said = place.train("--output.overwrite", *alone, out="again")
    assert "again holds the results of an earlier run, which this one replaces: " in said
    gone = [*drawn, "comparison.json", "costs.json", "plan.txt"]
    assert [name for name in gone if (folder / name).exists() or name not in said] == []
    assert not events.exists()
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    written = {".interlace.lock", "run.toml", "environment.json", "metrics.jsonl"}
    written |= {"timelines/1-rank0.json"}
    assert left == written | {"notes.txt", "monday.html", "timelines/notes.json"}
    (step,) = place.events("again", "step")
    assert 0 < step["mfu"] < 1


def test_going_on_with_other_ranks_leaves_no_records_of_those_that_are_gone(
    tmp_path: Path,
) -> None:
    """Files of an earlier layout would be shown as this run's."""
    config = replace(RunConfig(), strands="eager")
    session: Any = SimpleNamespace(
        config=config, asked=config, device=torch.device("cpu"), world_size=2,
        dataset=SimpleNamespace(digest=""),
        costs=None, main=None, plan=None,
    )  # fmt: skip
    for rank in (0, 1, 2, 3, 10):
        store.write_whole(tmp_path / "timelines" / f"eager-rank{rank}.json", b"")
    for name in ("costs.json", "plan.txt", "decompose.json", "comparison.json"):
        store.write_whole(tmp_path / name, b"")
    describe_environment(session, tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    records = {"timelines/eager-rank0.json", "timelines/eager-rank1.json", "comparison.json"}
    assert left == {*records, "environment.json", "run.toml"}


def test_a_loss_that_is_not_finite_ends_the_run(place: Workplace) -> None:
    """Exit 1, the step and what to set; what was written stays readable."""
    said = place.train(
        "--optimizer.learning_rate", "1e6", "--optimizer.warmup_steps", "0",
        "--optimizer.clip_norm", "0", out="out-diverged", code=1,
    )  # fmt: skip
    assert re.search(r"error: rank \d: the (loss|gradient norm) of step \d is (nan|inf)", said)
    assert "lower optimizer.learning_rate" in said
    losses = place.losses("out-diverged")
    assert 1 <= len(losses) < 4
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--model.width", "128"), "model.width"),
        pytest.param(("--train.seed", "2"), "train.seed", marks=WIDE),
    ],
)
def test_ranks_with_different_configurations_stop(
    place: Workplace, words: tuple[str, ...], field: str
) -> None:
    """Two ranks started by hand; also when their tensors would not fit together."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begun = time.monotonic()
    arguments = ("train", "run.toml", "--output.directory", f"out-{field}")
    with (
        place.start(*arguments, **shared, RANK="0", LOCAL_RANK="0").running() as first,
        place.start(*arguments, *words, **shared, RANK="1", LOCAL_RANK="1").running() as second,
    ):
        for command in (first, second):
            code, said = command.end()
            assert code == 1
            assert f"rank 1 disagrees with the other 1 about {field!r}" in said
    assert time.monotonic() - begun < 60
    assert not (place.folder / f"out-{field}" / "metrics.jsonl").exists()


def test_nothing_is_left_but_results(place: Workplace) -> None:
    """No half-written file anywhere in the workplace, the cache included."""
    found: list[Path] = [*place.folder.rglob("*.part"), *place.folder.rglob("*.tmp")]
    assert found == []
