"""Proves that a plan file says exactly what will run, and that a wrong one is refused by place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ir_graph import CHAIN

from interlace.errors import InputError
from interlace.ir.graph import OpGraph
from interlace.ir.plan import PhasePlan, Plan, check, from_text, read, to_text
from phases import both, plan_by, planned_graphs
from strategies import op_graphs, orders_of

TIMES = st.integers(0, 2**50)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, dict[str, OpGraph]]:
    """A plan in random orders and its graphs."""
    forward, backward = (draw(op_graphs(name=name)) for name in ("forward", "backward"))
    head = draw(st.integers(0, len(forward.operators)))
    strands = {"forward": forward, "backward": backward}

    def planned(graph: OpGraph) -> PhasePlan:
        order = draw(orders_of(graph))
        barriers = tuple(op for op in order if draw(st.booleans()))
        return PhasePlan(order, draw(TIMES), draw(TIMES), barriers)

    return plan_by(strands, planned, head), strands


def example() -> tuple[Plan, dict[str, OpGraph]]:
    strands = {"forward": CHAIN, "backward": replace(CHAIN, name="backward")}
    plan = plan_by(strands, lambda graph: PhasePlan(graph.order, 30, 10))
    return replace(plan, search="list"), strands


@given(case=plans())
def test_a_plan_reads_back(case: tuple[Plan, dict[str, OpGraph]]) -> None:
    """Text and back, for any graph and order; its orders are valid."""
    plan, strands = case
    again = from_text(to_text(plan, strands))
    assert again == plan
    assert again.digest == plan.digest
    again.validate(strands, "plan")


def test_a_plan_has_a_column_per_lane() -> None:
    """People read it: collectives stand in the column of their link."""
    plan, strands = example()
    lines = to_text(plan, strands).splitlines()
    assert lines[0] == "interlace plan 3"
    assert lines[3:8] == [
        "phase forward  operators 3  predicted_ns 30  exposed_ns 10",
        f"  {'compute':<44} | tp",
        f"  {'a':<44} |",
        f"  {'':<44} | b",
        f"  {'c':<44} |",
    ]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("b", "a", "c"), "somewhere, operator 1: 'b' comes before its input 'a'"),
        (("a", "b", "a", "c"), "somewhere, operator 3: 'a' comes twice"),
        (("a", "b", "d"), "somewhere, operator 3: 'd' is not in the graph"),
        (("a", "b"), "somewhere: operator 'c' of the graph is missing"),
        ((), "somewhere: operator 'a' of the graph is missing"),
    ],
)
def test_an_order_that_cannot_run_is_refused(order: tuple[str, ...], message: str) -> None:
    """The message names the place and the operator."""
    with pytest.raises(InputError, match=message):
        check(order, CHAIN, "somewhere")
    check(CHAIN.order, CHAIN, "somewhere")


@given(data=st.data(), case=plans())
def test_every_broken_order_is_noticed(
    data: st.DataObject, case: tuple[Plan, dict[str, OpGraph]]
) -> None:
    """Any operator dropped, doubled, or moved before something that it needs."""
    plan, strands = case
    name = both(plan.phases)
    graph = planned_graphs(strands, plan.head)[name]
    order = plan.phases[name].order
    place = data.draw(st.integers(0, len(order) - 1))
    broken = [
        (*order[:place], *order[place + 1 :]),
        (*order[: place + 1], *order[place:]),
    ]
    inputs = graph.by_id[order[place]].inputs
    if inputs:
        before = order.index(inputs[0])
        rest = [name for name in order if name != order[place]]
        broken.append((*rest[:before], order[place], *rest[before:]))
    for wrong in broken:
        with pytest.raises(InputError):
            check(wrong, graph, "plan")


def example_text() -> str:
    plan, strands = example()
    return to_text(plan, strands)


def edited(old: str, new: str, *, times: int = 1) -> str:
    text = example_text()
    assert old in text
    return text.replace(old, new, times)


LAST = "phase backward  operators 3  predicted_ns 30  exposed_ns 10"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.txt: line 1 is not 'interlace plan 3'"),
        ("interlace plan 2\n", "line 1 is not"),
        ("interlace plan 3\n", "line 2 must give search, graph, costs, schedule and head"),
        (edited("search list  ", ""), "line 2 must give"),
        (edited("operators 3", "operators 4"), "'forward' announces 4 operators and lists 3"),
        (edited("operators 3", "operators three"), "line 4"),
        (
            edited("phase forward", "phase sideways"),
            "line 4: phase 'sideways': 'sideways' is not the name of a strand",
        ),
        (edited(LAST, LAST.replace("backward", "forward")), "phase 'forward' comes twice"),
        (edited("\nphase forward", "\n  a\nphase forward"), "line 4 comes before any phase"),
        (edited("  a ", "  a b "), "line 6 must name one operator"),
        (edited("| b", "| b | c"), "line 7 must name one operator"),
        (edited("head 0", "head some"), "line 2 must give"),
        (edited("  a ", "  -- barrier --\n  a "), "line 6: a barrier before any operator"),
    ],
)
def test_a_malformed_plan_is_refused(text: str, message: str) -> None:
    """The file and the line or phase are named."""
    with pytest.raises(InputError) as caught:
        from_text(text, "p.txt")
    assert message in caught.value.message
    assert caught.value.message.startswith("p.txt: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, a folder, not text."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        with pytest.raises(InputError, match="cannot read plan"):
            read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": 4}, "plan.txt: head 4 is not between 0 and the 3 operators"),
        ({"head": 2}, "plan.txt, phase 'forward+next': operator 'next.b' of the graph is missing"),
        ({"phases": {}}, "plan.txt: head 1, and no phase runs the head of a forward"),
    ],
)
def test_a_plan_for_other_phases_is_refused(change: dict[str, Any], message: str) -> None:
    """`head` and the orders must fit each other and the graphs."""
    _, strands = example()
    plan = plan_by(strands, lambda graph: PhasePlan(graph.order, 30, 10), 1)
    with pytest.raises(InputError) as caught:
        replace(plan, **change).validate(strands, where="plan.txt")
    assert message in caught.value.message


def test_a_barrier_stands_behind_an_operator_of_its_phase() -> None:
    """The phase and the name are given."""
    plan, strands = example()
    name = both(plan.phases)
    pair = replace(plan.phases[name], barriers=("forward.a", "forward.z"))
    wrong = replace(plan, phases=plan.phases | {name: pair})
    with pytest.raises(
        InputError, match=r"phase 'forward\+backward': a barrier follows 'forward.z'"
    ):
        wrong.validate(strands, where="plan")


def test_the_digest_is_about_orders_only() -> None:
    """Ranks with the same orders run the same thing, whatever they predicted."""
    plan, _ = example()
    name = both(plan.phases)
    slower = {name: replace(phase, predicted_ns=99) for name, phase in plan.phases.items()}
    assert replace(plan, cost_digest="other", phases=slower).digest == plan.digest
    for change in ({"order": ("x", "y")}, {"barriers": ("forward.a",)}):
        turned = plan.phases | {name: replace(plan.phases[name], **change)}
        assert replace(plan, phases=turned).digest != plan.digest
    assert replace(plan, head=1).digest != plan.digest
    backwards = dict(reversed(plan.phases.items()))
    assert replace(plan, phases=backwards).digest == plan.digest


def test_a_plan_by_a_search_of_an_old_name_is_the_same_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It reads with a note, and its digest is what it was."""
    plan, strands = example()
    plan = replace(plan, search="merge")
    text = to_text(plan, strands).replace("search merge", "search exact")
    again = from_text(text, "plan.txt")
    assert again == plan
    assert again.digest == plan.digest
    assert caplog.messages == ['note: plan.txt: search = "exact" is now called "merge"']
