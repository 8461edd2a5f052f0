"""`interlace plan` of a pipeline as typed: all schedules on the chunks of one model."""

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.__main__ import main
from interlace.ir.actions import Direction
from interlace.schedules.finder import names
from interlace.schedules.schedule_text import read_schedule
from interlace.schedules.verify import check_ranks

STAGES, MICRO_BATCHES = 2, 6
SETTINGS = {
    "parallel.tensor": "1",
    "parallel.pipeline": str(STAGES),
    "model.layers": "4",
    "train.micro_batches": str(MICRO_BATCHES),
    "hardware.peak_tflops": "1",
    "hardware.memory_gb_per_s": "10",
    "link.rate": "10gbit",
}
WIDTH, FFN, VOCABULARY = 128, 256, 256


def planned(folder: Path, *words: str, **settings: str) -> dict[str, Any]:
    """What `interlace plan` of quickstart in stages writes as JSON."""
    given = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
    path = folder / "plan.json"
    options = [f"--{key}={value}" for key, value in given.items()]
    assert main(["plan", "quickstart", *options, *words, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan by 1F1B."""
    return planned(tmp_path_factory.mktemp("plan"))


def by_name(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Steps by schedule."""
    return {each["schedule"]: each for each in plan["schedules"]}


def test_all_schedules_are_compared(plan: dict[str, Any]) -> None:
    """Those of several ranks, the fastest first; the one of the run file among them."""
    found = by_name(plan)
    assert found.keys() | plan["left_out"].keys() == set(names())
    assert list(plan["left_out"]) == ["two_strand"]
    times = [each["step_ns"] for each in plan["schedules"]]
    assert times == sorted(times)
    assert plan["chosen"] == found["one_f_one_b"]


def test_schedules_of_the_same_chunks_compute_the_same(plan: dict[str, Any]) -> None:
    """One chunk on each rank: the time of all passes, which is that of the step without its
    bubble, is the same by GPipe, 1F1B and one after the other, and in finer chunks too."""
    found = by_name(plan)

    def computing(name: str) -> list[int]:
        each = found[name]
        return [each["step_ns"] - bubble for bubble in each["bubble_ns"]]

    assert computing("gpipe") == computing("one_f_one_b") == computing("one_strand")
    assert sum(computing("interleaved")) == sum(computing("one_f_one_b"))
    assert found["one_f_one_b"]["step_ns"] <= found["gpipe"]["step_ns"]
    assert found["one_f_one_b"]["kept_bytes"][0] * 3 == found["gpipe"]["kept_bytes"][0]


def test_constant_memory_by_hand(plan: dict[str, Any]) -> None:
    """16 bytes for each parameter, whichever rank has it; rotary tables on both ranks."""
    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * FFN + 2 * WIDTH
    elements = 2 * VOCABULARY * WIDTH + 4 * layer + WIDTH
    rotary = 4 * 2 * 4 * 128 * 16
    for each in plan["schedules"]:
        assert sum(each["constant_bytes"]) == 16 * elements + STAGES * rotary, each["schedule"]


def test_ranks_that_share_an_optimizer_need_less(tmp_path: Path) -> None:
    """ZeRO-1 over two ranks: of 16 bytes for each parameter 4 are its weight and 4 its gradient; 8
    of state become 4, beside 2 for the rank's part of the weight."""
    shared, gathered = (
        by_name(planned(tmp_path, parallel__data_shard="2", parallel__zero=zero))
        for zero in ("1", "3")
    )
    whole = by_name(planned(tmp_path, parallel__data_replicate="2"))
    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * FFN + 2 * WIDTH
    elements = 2 * VOCABULARY * WIDTH + 4 * layer + WIDTH
    for name, each in shared.items():
        saved = sum(whole[name]["constant_bytes"]) - sum(each["constant_bytes"])
        assert saved == 2 * elements, name
        # ZeRO-3 keeps half of each weight, and has to gather it for each pass.
        less = sum(each["constant_bytes"]) - sum(gathered[name]["constant_bytes"])
        assert less == 2 * elements, name
        assert gathered[name]["step_ns"] > each["step_ns"], name


def test_a_slow_link_costs_most_where_most_is_sent(plan: dict[str, Any], tmp_path: Path) -> None:
    """A folded model crosses the boundary more often than one of as many chunks as ranks."""
    slow = by_name(planned(tmp_path, link__rate="50mbit"))
    fast = by_name(plan)
    more = {name: slow[name]["step_ns"] - fast[name]["step_ns"] for name in fast}
    assert 0 < more["one_f_one_b"] < more["folded"]
    assert more["gpipe"] > 0


def test_no_further_ahead_than_it_pays(tmp_path: Path) -> None:
    """Of two micro-batches none runs further ahead than in the W shape: the least depth does as
    well, and has a row of its own; its name is one that `pipeline.schedule` takes."""
    found = by_name(planned(tmp_path, train__micro_batches="2"))
    least = found["eager_folded(depth=2)"]
    assert least["step_ns"] == found["eager_folded"]["step_ns"]
    assert least["step_ns"] == found["folded"]["step_ns"]
    given = planned(tmp_path, train__micro_batches="2", pipeline__schedule="eager_folded(depth=2)")
    assert given["chosen"] == least


def test_the_plan_is_a_list_of_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all ranks, as `interlace schedule` reads it back; with a picture."""
    picture = tmp_path / "p.png"
    planned(tmp_path, "--picture", str(picture), pipeline__schedule="folded")
    actions = read_schedule(capsys.readouterr().out, "stdout")
    check_ranks(actions, micro_batches=MICRO_BATCHES, chunks=2 * STAGES, name="stdout")
    forwards = [s for own in actions for a in own for s in a.slots
                if s.strand.direction == Direction.FORWARD]  # fmt: skip
    assert len(forwards) == 2 * STAGES * MICRO_BATCHES
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel__pipeline": "400"}, "too few for 400 chunks"),
        (
            {"pipeline__schedule": "folded", "pipeline__split_at": "model.blocks.1"},
            "split_at names 1 sub-modules, and the schedule has 4 chunks",
        ),
        ({"pipeline__schedule": "wombat"}, "unknown schedule 'wombat'"),
        ({"plan__file": "plan.txt"}, "plan.file = 'plan.txt'"),
        ({"strands": "1"}, "strands = '1'"),
        ({"parallel__reduce": "micro_batch"}, "parallel.reduce = 'micro_batch'"),
        ({"train__reduce_dtype": "bfloat16"}, "train.reduce_dtype = 'bfloat16'"),
        ({"compare__steps": "2"}, "compare.steps = 2"),
        ({"overlap__decompose": "ring", "overlap__passes": "ends"}, "overlap.passes = 'ends'"),
        ({"parallel__pipeline": "1", "pipeline__schedule": "zb_v"}, "[pipeline] says how stages"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], words: str
) -> None:
    """By name, with exit code 2."""
    given = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
    options = [f"--{key}={value}" for key, value in given.items()]
    assert main(["plan", "quickstart", *options, "-o", str(tmp_path / "plan")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()
