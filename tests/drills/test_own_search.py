"""Drill: a search from one file of the user's own, for a plan as data and for `interlace plan`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from interlace.__main__ import main
from interlace.errors import InputError
from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import OpGraph
from interlace.schedules.finder import sequential, validate
from interlace.search.planner import make_plan
from interlace.search.problem import Problem
from interlace.sim.simulated_step import simulate_step
from layers import ISSUE_NS, backward_graph, forward_graph, layers_problem

NAME = "own_search:first_come"
RUN = """
[model]
layers = 2
width = 64
heads = 4
kv_heads = 4
ffn_width = 96
[parallel]
tensor = 2
[data]
sequence_length = 32
[train]
micro_batches = 4
[link]
rate = "1gbit"
[hardware]
peak_tflops = 0.1
memory_gb_per_s = 5
[plan]
search = "own_search:first_come"
"""


def backwards(problem: Problem) -> Sequence[str]:
    """No order at all: operators come before their inputs."""
    return problem.graph.order[::-1]


def forgetful(problem: Problem) -> Sequence[str]:
    """The last operator is missing."""
    return problem.graph.order[:-1]


def two_layers() -> tuple[dict[str, OpGraph], CostTable]:
    """Graphs of two Llama layers; transfers take as long as compute."""
    graphs = {"forward": forward_graph(2), "backward": backward_graph(2)}
    problem = layers_problem(2)
    times = {op.key: cost_of(op, problem.solo_ns[op.id]) for op in problem.graph.operators}
    return graphs, CostTable(operators=times, source="made up", issue_ns=ISSUE_NS)


def test_a_plan_is_made_with_it() -> None:
    """The plan is valid, names the search, and hides communication."""
    graphs, costs = two_layers()
    plan = make_plan(graphs, costs, NAME)
    validate(plan, graphs, "the plan")
    assert plan.search == NAME
    mine = simulate_step(plan, graphs, costs, 4)
    one = simulate_step(sequential(graphs), graphs, costs, 4)
    assert mine.length_ns < 0.9 * one.length_ns
    assert make_plan(graphs, costs, NAME).digest == plan.digest != make_plan(
        graphs, costs, "list"
    ).digest  # fmt: skip


def test_interlace_plan_shows_it_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of the table, the figures in JSON, and the plan itself."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    assert (
        main(["plan", "run.toml", "--compare-searches", "-o", "plan.txt", "--json", "plan.json"])
        == 0
    )
    table = capsys.readouterr().err
    assert f"{NAME} *" in table
    assert all(name in table for name in ("merge", "list", "segment_pairs"))
    assert f"search {NAME}  graph" in Path("plan.txt").read_text()
    assert NAME in json.loads(Path("plan.json").read_text())["searches"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first_come", "unknown search 'first_come'"),
        ("no_such_file:order", "search 'no_such_file:order' cannot be imported"),
        ("own_search:first_comes", "'own_search' has no 'first_comes'"),
        ("own_search:__name__", "is a str, not a function"),
        ("test_own_search:backwards", "test_own_search:backwards.*comes before its input"),
        ("test_own_search:forgetful", "test_own_search:forgetful.*is missing"),
    ],
)
def test_what_is_no_search_is_refused(name: str, message: str) -> None:
    """Wrong names, and functions that give no order."""
    with pytest.raises(InputError, match=message):
        make_plan(*two_layers(), name)


def test_the_run_file_refuses_a_wrong_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is built: neither a search of ours nor code that Python finds."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.replace("own_search:first_come", "own_serch"))
    assert main(["plan", "run.toml"]) == 2
    assert 'plan.search = \'own_serch\' must be one of "merge", "list", "segment_pairs"' in (
        capsys.readouterr().err
    )
