"""Proves that an OpGraph is always a sound graph, and that its hash covers all of it."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from interlace.errors import InputError
from interlace.ir.graph import COMPUTE_LANE, GraphInput, Kind, Operator, OpGraph, merge
from strategies import op_graphs, pair_graphs


def operator(name: str, *inputs: str, **fields: Any) -> Operator:
    given_fields = {
        "kind": Kind.MATMUL,
        "target": "aten.mm.default",
        "lane": COMPUTE_LANE,
        "inputs": inputs,
        "reads": (),
        "key": name,
        "bytes_in": 8,
        "bytes_out": 4,
        "flops": 2,
    }
    return Operator(id=name, **(given_fields | fields))


CHAIN = OpGraph(
    "forward",
    (
        operator("a", reads=("weight",)),
        operator("b", "a", kind=Kind.ALL_GATHER, lane="tp"),
        operator("c", "b"),
    ),
    (GraphInput("weight", "parameter", 64),),
    ("c",),
)


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ((operator("a", "b"), operator("b")), "operator 'a' comes before its input 'b'"),
        ((operator("a", "a"),), "operator 'a' comes before its input 'a'"),
        ((operator("a", "nobody"),), "comes before its input 'nobody'"),
        ((operator("a"), operator("a")), "two operators are named 'a'"),
    ],
)
def test_an_unsound_graph_cannot_be_made(operators: tuple[Operator, ...], message: str) -> None:
    """Cycles, unknown inputs and names used twice are refused, naming the operator."""
    with pytest.raises(InputError, match=message):
        OpGraph("forward", operators, (), ())


def test_lookups() -> None:
    """Order, names, lanes and collectives."""
    assert CHAIN.order == ("a", "b", "c")
    assert CHAIN.by_id["b"].is_collective
    assert [op.id for op in CHAIN.collectives] == ["b"]
    assert CHAIN.lanes == ("compute", "tp")
    assert OpGraph("empty", (), (), ()).lanes == ("compute",)


CHANGES: list[dict[str, Any]] = [
    {"id": "z"},
    {"kind": Kind.OTHER},
    {"target": "aten.bmm.default"},
    {"lane": "dp"},
    {"inputs": ("a",)},
    {"reads": ("weight",)},
    {"key": "other"},
    {"bytes_in": 9},
    {"bytes_out": 9},
    {"flops": 9},
    {"writes": ("weight",)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_hash_covers_every_field_of_an_operator(change: dict[str, Any]) -> None:
    """A plan or cost table for one graph is never taken for another's."""
    assert {next(iter(change)) for change in CHANGES} == set(Operator.__slots__)
    last = replace(CHAIN.operators[-1], **change)
    changed = replace(CHAIN, operators=(*CHAIN.operators[:-1], last), outputs=())
    assert changed.digest != replace(CHAIN, outputs=()).digest


@pytest.mark.parametrize(
    "changed",
    [
        replace(CHAIN, name="backward"),
        replace(CHAIN, outputs=("a",)),
        replace(CHAIN, inputs=()),
        replace(CHAIN, inputs=(GraphInput("weight", "parameter", 65),)),
    ],
)
def test_the_hash_covers_the_rest_of_the_graph(changed: OpGraph) -> None:
    """Name, inputs and outputs."""
    assert changed.digest != CHAIN.digest


def test_the_hash_is_the_same_in_another_process() -> None:
    """Ranks compare it, and files are named by it: Python's own hash seed must play no part."""
    program = "import test_ir_graph; print(test_ir_graph.CHAIN.digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {CHAIN.digest}


@given(one=op_graphs(name="forward"), other=op_graphs(name="backward"))
def test_merging_keeps_both_graphs_and_joins_nothing(one: OpGraph, other: OpGraph) -> None:
    """Each strand's operators keep their order and edges; no edge goes between strands."""
    merged = merge("pair", {"forward": one, "backward": other})
    for strand, graph in (("forward", one), ("backward", other)):
        prefix = f"{strand}."
        mine = [op for op in merged.operators if op.id.startswith(prefix)]
        back = tuple(
            replace(
                op,
                id=op.id.removeprefix(prefix),
                inputs=tuple(name.removeprefix(prefix) for name in op.inputs),
                reads=tuple(name.removeprefix(prefix) for name in op.reads),
            )
            for op in mine
        )
        assert back == graph.operators
        assert all(name.startswith(prefix) for op in mine for name in (*op.inputs, *op.reads))
    assert merged.outputs == tuple(f"{g.name}.{name}" for g in (one, other) for name in g.outputs)
    assert len(merged.inputs) == len(one.inputs) + len(other.inputs)


@given(graph=pair_graphs())
def test_the_hash_is_a_function_of_the_value(graph: OpGraph) -> None:
    """Two graphs built apart from equal parts have one hash."""
    twin = OpGraph(graph.name, tuple(graph.operators), tuple(graph.inputs), tuple(graph.outputs))
    assert twin.digest == graph.digest
