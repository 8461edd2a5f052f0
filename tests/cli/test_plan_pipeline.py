"""`interlace plan` of a pipeline as typed: all schedules on the chunks of one model."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlace.__main__ import main
from interlace.cli.run_file import load_run_config
from interlace.ir import store
from interlace.ir.actions import Direction
from interlace.ir.costs import CostTable, OperatorCost
from interlace.schedules.finder import names
from interlace.schedules.schedule_text import read_schedule
from interlace.schedules.verify import check_ranks
from interlace.train.fake_trace import trace_fake
from interlace.train.plan_costs import computed_costs

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


def test_a_pipeline_is_searched_for_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head of many words is heavier than layers. The searched pipeline is the plan, no slower
    than any schedule, and runs as the settings that are printed say."""
    file = tmp_path / "searched.txt"
    heavy = {"model__vocab_size": "8192", "train__micro_batches": "8"}
    words = ("--search-pipeline", "-o", str(file))
    found = planned(tmp_path, *words, **heavy)
    steps = by_name(found)
    assert found["chosen"] == steps["searched"] == found["schedules"][0]
    assert found["chosen"]["step_ns"] < 0.9 * steps["interleaved"]["step_ns"]
    printed = capsys.readouterr().err
    settings = tomllib.loads(printed[printed.index("[pipeline]") :].split("\n\n")[0])["pipeline"]
    assert settings == {"schedule": str(file)}
    again = planned(tmp_path, **heavy, pipeline__schedule=str(file))
    assert again["chosen"]["split_at"] == found["chosen"]["split_at"]
    assert again["chosen"]["step_ns"] == found["chosen"]["step_ns"]
    assert again["chosen"]["kept_bytes"] == found["chosen"]["kept_bytes"]


def test_a_limit_of_memory_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What every rank holds and keeps is within it, or the least that would do is said."""
    free = planned(tmp_path, "--search-pipeline")["chosen"]
    needs = max(map(sum, zip(free["constant_bytes"], free["kept_bytes"], strict=True)))
    least = by_name(planned(tmp_path))["one_strand"]
    floor = max(map(sum, zip(least["constant_bytes"], least["kept_bytes"], strict=True)))
    assert floor < needs
    limit = (floor + needs) / 2
    bound = planned(tmp_path, "--search-pipeline", "--memory-gib", str(limit / 2**30))["chosen"]
    for constant, kept in zip(bound["constant_bytes"], bound["kept_bytes"], strict=True):
        assert constant + kept <= limit
    capsys.readouterr()
    words = ["--search-pipeline", "--memory-gib", "0.001"]
    options = [f"--{key}={value}" for key, value in SETTINGS.items()]
    assert main(["plan", "quickstart", *options, *words]) == 2
    assert "no pipeline was found that fits into 1.0 MiB a rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ({"parallel.pipeline": "1"}, "--search-pipeline", "parallel.pipeline = 1"),
        ({}, "--memory-gib 10", "--memory-gib 10 is for --search-pipeline"),
        ({}, "--search-pipeline --memory-gib -1", "--memory-gib -1 is no size"),
        ({}, "--search-pipeline --global-batch 8 --cluster h100x8", "--search-pipeline and"),
    ],
)
def test_wishes_that_say_nothing(
    capsys: pytest.CaptureFixture[str], settings: dict[str, str], words: str, said: str
) -> None:
    """Before anything is traced."""
    options = [f"--{key}={value}" for key, value in (SETTINGS | settings).items()]
    assert main(["plan", "quickstart", *options, *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_measured_times_decide_where_it_is_cut(tmp_path: Path) -> None:
    """Of a profile of the same model on one stage. Where operators of the size of the head's took
    ten times as long as their arithmetic says, its rank has fewer layers."""
    alone = SETTINGS | {"parallel.pipeline": "1", "model.layers": "6", "model.vocab_size": "1024"}
    strands = trace_fake(load_run_config("quickstart", alone)).whole
    costs, _ = computed_costs(load_run_config("quickstart", alone), strands.op_graphs)
    head = max(cost.flops for cost in costs.operators.values())
    slow = {
        key: replace(cost, solo_ns=cost.solo_ns * (10 if cost.flops == head else 1))
        for key, cost in costs.operators.items()
    }

    def layers_beside_the_head(operators: Mapping[str, OperatorCost]) -> int:
        file = tmp_path / "cost.json"
        table = CostTable(operators=dict(operators), issue_ns=costs.issue_ns, source="profile",
                          graph_digest=strands.digest)  # fmt: skip
        store.save(table, file)
        words = ("--search-pipeline", "--cost", str(file))
        found = planned(tmp_path, *words, model__layers="6", model__vocab_size="1024")
        assert found["costs"].startswith("profile, ")
        chosen = found["chosen"]
        blocks = [f"model.blocks.{number}" for number in range(6)]
        starts = [0, *((*blocks, "model.norm", "model.head").index(n) for n in chosen["split_at"])]
        own = [rank == chosen["rank_of_chunk"][-1] for rank in chosen["rank_of_chunk"]]
        chunk_of = [sum(start <= number for start in starts) - 1 for number in range(6)]
        return sum(own[chunk] for chunk in chunk_of)

    assert layers_beside_the_head(slow) < layers_beside_the_head(costs.operators)


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
