"""Proves that graphs, cost tables and timelines survive their files, and that bad files do not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ir_graph import CHAIN

from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable, LinkFit, PairCost, Together, cost_of
from interlace.ir.graph import Kind, OpGraph
from interlace.ir.timeline import Timeline
from interlace.sim.lanes import simulate
from strategies import op_graphs, orders_of, solo_times

COSTS = CostTable(
    operators={"a": cost_of(CHAIN.by_id["a"], 5), "b": cost_of(CHAIN.by_id["b"], 7, 1)},
    source="profile",
    issue_ns=3,
    pairs=(PairCost(Kind.MATMUL, Kind.ALL_GATHER, "tp", 1.07, 1.0, 0.93, 7, 5, 8),),
    fits=(LinkFit(Kind.ALL_GATHER, "tp", 50e3, 0.5),),
    links={"tp": "nic", "dp": "nic"},
    lane_pairs=(Together("dp", "tp", 5, 7, 12),),
    graph_digest="graph",
    machine="machine",
)


@given(data=st.data(), graph=op_graphs(operators=(1, 10)))
def test_everything_reads_back(data: st.DataObject, graph: OpGraph) -> None:
    """Equal values and hashes, for graphs, tables and timelines."""
    again = store.loads(store.dumps(graph), OpGraph, "text")
    assert again == graph
    assert again.digest == graph.digest
    solo_ns = data.draw(solo_times(graph))
    costs = {op.key: cost_of(op, solo_ns[op.id]) for op in graph.operators}
    table = CostTable(operators=costs, source="profile")
    assert store.loads(store.dumps(table), CostTable, "text") == table
    timeline = simulate(graph, data.draw(orders_of(graph)), solo_ns)
    assert store.loads(store.dumps(timeline), Timeline, "text") == timeline


def changed(value: object, path: str, new: Any) -> str:
    """The JSON of a value with the place `a.0.b` set to `new`, or dropped if `new` is `...`."""
    data = json.loads(store.dumps(value))
    place: Any = data
    *walk, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in walk:
        place = place[key]
    if new is ...:
        del place[last]
    else:
        place[last] = new
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("name", ..., "required field missing @ $.name"),
        ("colour", "red", "extra fields found (colour)"),
        ("operators.1.flops", ..., "required field missing @ $.operators[1].flops"),
        ("operators.1.colour", 3, "extra fields found (colour) @ $.operators[1]"),
        ("operators.1.flops", "5", "$.operators[1].flops"),
        ("operators.1.flops", 1.7, "$.operators[1].flops"),
        ("operators.1.flops", True, "$.operators[1].flops"),
        ("operators.1.flops", None, "$.operators[1].flops"),
        ("operators.1.id", 5, "$.operators[1].id"),
        ("operators.1.inputs", "a", "$.operators[1].inputs"),
        ("operators.1.inputs.0", 5, "$.operators[1].inputs[0]"),
        ("operators.1.kind", "matmull", "$.operators[1].kind"),
        ("operators", {}, "$.operators"),
        ("inputs.0.bytes", "many", "$.inputs[0].bytes"),
        ("operators.1.inputs.0", "c", "operator 'b' comes before its input 'c'"),
    ],
)
def test_a_graph_that_is_not_one_is_refused(path: str, new: Any, message: str) -> None:
    """Missing, unknown and mistyped fields, and unsound graphs; file and place are named."""
    with pytest.raises(InputError) as caught:
        store.loads(changed(CHAIN, path, new), OpGraph, "g.json")
    assert "g.json" in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize("new", ["5", 1.5, None, [1], -1])
def test_times_are_whole_nanoseconds(new: Any) -> None:
    with pytest.raises(InputError, match=r"costs.json .*solo_ns"):
        store.loads(changed(COSTS, "operators.a.solo_ns", new), CostTable, "costs.json")


@pytest.mark.parametrize("new", ["2", True, None, 0.9, float("nan"), float("inf")])
def test_factors_are_numbers_from_1_up(new: Any) -> None:
    with pytest.raises(InputError, match=r"costs.json .*compute_factor"):
        store.loads(changed(COSTS, "pairs.0.compute_factor", new), CostTable, "costs.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"text"', "null"])
def test_text_that_is_no_such_value(text: str) -> None:
    with pytest.raises(InputError, match=r"file\.json is not"):
        store.loads(text, OpGraph, "file.json")


def test_files(tmp_path: Path) -> None:
    """A file appears whole, in a folder made for it; what cannot be read is named."""
    path = tmp_path / "deep" / "costs.json"
    store.save(COSTS, path)
    assert store.load(path, CostTable) == COSTS
    store.save(replace(COSTS, issue_ns=9), path)
    assert store.load(path, CostTable).issue_ns == 9
    assert [each.name for each in path.parent.iterdir()] == ["costs.json"]
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for bad in (tmp_path / "missing.json", tmp_path, tmp_path / "binary"):
        with pytest.raises(InputError, match="cannot read"):
            store.load(bad, CostTable)


def test_a_save_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    """A value that is no JSON is found before anything is replaced."""
    path = tmp_path / "costs.json"
    store.save(COSTS, path)
    with pytest.raises(TypeError):
        store.save(replace(COSTS, links={"tp": {1, 2}}), path)
    assert store.load(path, CostTable) == COSTS


WRITES = 60
WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from interlace.ir import store
from interlace.ir.costs import CostTable

path, count, own = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
table = store.load(path, CostTable)
for number in range(count):
    store.save(replace(table, issue_ns=own * count + number), path)
    store.load(path, CostTable)
"""


def test_processes_that_save_and_read_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Every save succeeds, every read finds a whole table, and nothing else is left behind."""
    path = tmp_path / "costs.json"
    store.save(COSTS, path)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(WRITES), str(own)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in range(4)
    ]
    said = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4, said
    assert store.load(path, CostTable).issue_ns % WRITES == WRITES - 1
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]


def test_a_save_that_the_disk_refuses_leaves_nothing(tmp_path: Path) -> None:
    """Such as one onto a folder; the error is the system's own."""
    (tmp_path / "costs.json").mkdir()
    with pytest.raises(OSError, match=r"costs\.json"):
        store.save(COSTS, tmp_path / "costs.json")
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000])
def test_text_beyond_the_limits_of_python(text: str) -> None:
    """Nested too deep, or a number too long: a bad file like any other."""
    with pytest.raises(InputError, match=r"file\.json is not"):
        store.loads(text, CostTable, "file.json")
