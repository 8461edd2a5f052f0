"""Proves of every schedule that it runs each pass once and in order, of wrong ones that they are
named, and of `folded` that its time and memory are those of papers 1.6."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sim import graph

from interlace.errors import InputError
from interlace.ir.actions import Action, backward, forward, strand, strands_of, together
from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import GraphInput, Kind, Operator, OpGraph
from interlace.ir.phases import cut
from interlace.ir.plan import PhasePlan, Plan
from interlace.schedules.finder import chunk_count, find, names, sequential, validate
from interlace.search.memory import step_peak_bytes
from interlace.search.planner import make_plan
from interlace.sim.simulated_step import simulate_step
from strategies import op_graphs

ONE_CHUNK = ("forward", "backward")
TWO_CHUNKS = ("forward_0", "forward_1", "backward_0", "backward_1")


def graphs_of(name: str) -> tuple[str, ...]:
    return TWO_CHUNKS if find(name).chunks == 2 else ONE_CHUNK


WHOLE = [name for name in names() if not find(name).cuts_backwards]
"""Those that one rank can run; the others cut backwards in two."""


@pytest.mark.parametrize("name", WHOLE)
@given(count=st.integers(2, 12))
def test_every_pass_runs_once_and_gradients_are_added_in_order(name: str, count: int) -> None:
    """Of those of the package, for any number of micro-batches, on one rank."""
    graphs = graphs_of(name)
    actions = find(name).actions(count, graphs)
    passes = [(slot.strand.label, slot.micro_batch) for a in actions for slot in a.slots]
    assert sorted(passes) == sorted((label, i + 1) for label in graphs for i in range(count))
    for label in graphs:
        numbers = [number for own, number in passes if own == label]
        assert numbers == sorted(numbers)


def test_actions_of_two_strands_with_all_that_a_step_may_have() -> None:
    """Heads run one action ahead, the ends by graphs of their own, exchanges at both ends."""
    graphs = (*ONE_CHUNK, "first", "final", "gather", "reduce")
    actions = find("two_strand").actions(3, graphs, head=True)
    assert [str(action) for action in actions] == [
        "gather 1 | first 1 | next 2",
        "rest 2 | next 3 | backward 1",
        "rest 3 | backward 2",
        "final 3 | reduce 3",
    ]
    assert [str(action) for action in find("folded").actions(2, TWO_CHUNKS)] == [
        "forward_0 1",
        "forward_1 1",
        "forward_0 2 | backward_1 1",
        "forward_1 2 | backward_0 1",
        "backward_1 2",
        "backward_0 2",
    ]


def test_a_schedule_that_cuts_backwards_is_not_run_on_one_rank() -> None:
    """Not before graphs are cut so."""
    with pytest.raises(InputError, match=r"'zb_h1' runs 'input', and the backward graphs .* whole"):
        find("zb_h1").actions(4, ONE_CHUNK)


def all_forwards_first(
    ranks: int, micro_batches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """A schedule of this test's own: what GPipe does on one rank."""
    numbers = range(1, micro_batches + 1)
    return ((*(together(forward(i)) for i in numbers), *(together(backward(i)) for i in numbers)),)


def test_a_function_is_found_by_its_name() -> None:
    """A schedule from outside the package has a name that a plan file can carry."""
    given_function = find(all_forwards_first)
    assert given_function.name == "test_schedules:all_forwards_first"
    assert find(given_function.name) == given_function
    assert not given_function.interleaves
    assert find("two_strand").interleaves
    assert find("folded").interleaves


@given(data=st.data())
def test_values_of_waiting_micro_batches_are_counted(data: st.DataObject) -> None:
    """With all forwards first, the last of m holds what m forwards save; one after the other only
    what one saves."""
    count, saved = data.draw(st.integers(2, 8)), data.draw(st.integers(0, 1000))
    graphs = {
        "forward": OpGraph("forward", (_operator("f", out=saved),), (), ("f",)),
        "backward": OpGraph(
            "backward", (_operator("b", reads=("f",)),), (GraphInput("f", "saved", saved),), ()
        ),
    }
    schedule = find(all_forwards_first)
    phases = {name: PhasePlan(graphs[name].order, 0, 0) for name in graphs}
    plan = Plan("any", "g", "c", schedule.name, phases)
    assert step_peak_bytes(plan, graphs, schedule, micro_batches=count) == count * saved
    assert step_peak_bytes(sequential(graphs), graphs, micro_batches=count) == saved


def _operator(
    name: str, *, out: int = 0, reads: tuple[str, ...] = (), inputs: str = ""
) -> Operator:
    return Operator(
        id=name, kind=Kind.MATMUL, target="t", lane="compute", inputs=tuple(inputs.split()),
        reads=reads, key=name, bytes_in=0, bytes_out=out, flops=1,
    )  # fmt: skip


WRONG = {
    "runs nothing": [Action(())],
    "before the forward of micro-batch 1": [together(backward(1)), together(forward(1))],
    "a second time": [together(forward(1)), together(forward(1))],
    "beside the forward of micro-batch 1": [together(forward(1), backward(1))],
    "for two micro-batches": [together(forward(1), forward(2))],
    "there is no micro-batch 3 of 2": [together(forward(3))],
    "is not one of 1 chunks": [together(forward(1, 0))],
    "a share of a pass": [Action((forward(1).__class__(strand("next"), 1),))],
    "never runs the backward of micro-batch 2": [
        together(forward(1)), together(forward(2)), together(backward(1)),
    ],
    "before the backward of micro-batch 1": [
        together(forward(1)), together(forward(2)), together(backward(2)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("message", "actions"), WRONG.items())
def test_a_schedule_that_cannot_run_is_refused(message: str, actions: Sequence[Action]) -> None:
    """The schedule, the action and the pass are named, before anything runs."""

    def wrong(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
        return (tuple(actions),)

    with pytest.raises(InputError) as caught:
        find(wrong).actions(2, ONE_CHUNK)
    assert message in caught.value.message
    assert "wrong" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("two_strands", "unknown schedule 'two_strands'"),
        ("searched", "it is a list, made for one model"),
        ("nowhere:at_all", "cannot be imported"),
        ("test_schedules:nothing", "cannot be imported"),
        ("test_schedules:WRONG", "is a dict, not a function"),
    ],
)
def test_a_schedule_that_is_not_there(asked: str, message: str) -> None:
    """By name, and what stands behind a name of one's own."""
    with pytest.raises(InputError, match=message):
        find(asked)


def test_what_is_no_schedule_is_refused() -> None:
    """A function that gives something else, and too few micro-batches or chunks."""
    with pytest.raises(InputError, match=r"not a tuple with one tuple of actions"):
        find(lambda ranks, micro_batches, chunks: [1]).actions(2, ONE_CHUNK)
    with pytest.raises(InputError, match="two strands need at least two micro-batches"):
        find("two_strand").actions(1, ONE_CHUNK)
    with pytest.raises(InputError, match="folded runs two chunks on each rank, not 1"):
        find("folded").actions(2, ONE_CHUNK)
    with pytest.raises(InputError, match="'sideways' is not the name of a strand"):
        strands_of("forward+sideways")


@given(one=op_graphs(operators=(2, 7)), data=st.data())
def test_a_cut_loses_nothing(one: OpGraph, data: st.DataObject) -> None:
    """Both parts together have each operator once, and the second is given what it reads of the
    first."""
    at = data.draw(st.integers(0, len(one.operators)))
    front, back = cut(one, at)
    assert (*front.order, *back.order) == one.order
    given_back = {value.id for value in back.inputs}
    for op in back.operators:
        before = set(one.by_id[op.id].inputs) - set(op.inputs)
        assert before <= set(op.reads) & given_back & set(front.outputs)
    assert set(one.outputs) <= set(back.order) | set(front.outputs)


def halves(layers: int, *, saved: int) -> dict[str, OpGraph]:
    """Chunks of a model of equal layers, each a matmul and a transfer either way; every layer of a
    forward saves `saved` bytes that its backward frees."""
    found = {}
    for chunk in (0, 1):
        numbers = range(chunk * layers, (chunk + 1) * layers)
        kept = [GraphInput(f"s{i}", "saved", saved) for i in range(layers * chunk)]
        own = [_operator(f"s{i}", out=saved) for i in numbers]
        passing = tuple(value.id for value in kept)
        found[f"forward_{chunk}"] = OpGraph(
            f"forward_{chunk}", tuple(own), tuple(kept), (*passing, *(op.id for op in own))
        )
        back = [_operator(f"b{i}", reads=(f"s{i}",)) for i in reversed(numbers)]
        alive = range((chunk + 1) * layers)
        found[f"backward_{chunk}"] = OpGraph(
            f"backward_{chunk}",
            tuple(back),
            tuple(GraphInput(f"s{i}", "saved", saved) for i in alive),
            tuple(f"s{i}" for i in alive if i not in numbers),
        )
    return found


@given(layers=st.integers(1, 4), count=st.integers(2, 9), saved=st.integers(1, 1000))
def test_folded_takes_the_memory_of_three_halves(layers: int, count: int, saved: int) -> None:
    """papers 1.6: chunk activations alive at a time are 2 p + 1 = 3 for p = 1, where one strand
    holds 2. Run layer by layer, forward beside backward, the excess is one layer."""
    graphs = halves(layers, saved=saved)
    half = layers * saved
    one = step_peak_bytes(sequential(graphs), graphs, micro_batches=count)
    assert one == 2 * half
    schedule = find("folded")
    phases = {}
    for name in schedule.phases(graphs):
        labels = [each.label for each in strands_of(name)]
        full = [[f"{label}.{n}" if len(labels) > 1 else n for n in graphs[label].order]
                for label in labels]  # fmt: skip
        phases[name] = PhasePlan(tuple(n for order in full for n in order), 0, 0)
    plan = Plan("chunk by chunk", "g", "c", "folded", phases)
    validate(plan, graphs, "plan")
    assert step_peak_bytes(plan, graphs, micro_batches=count) == 3 * half
    woven = {}
    for name, phase in phases.items():
        middle = len(phase.order) // 2
        turns = zip(phase.order[:middle], phase.order[middle:], strict=False)
        woven[name] = phase if "+" not in name else PhasePlan(
            tuple(each for turn in turns for each in turn), 0, 0
        )  # fmt: skip
    layer_wise = Plan("layer by layer", "g", "c", "folded", woven)
    assert step_peak_bytes(layer_wise, graphs, micro_batches=count) == 2 * half + saved


@given(
    count=st.integers(2, 10), forward_ns=st.integers(1, 99), transfer_ns=st.integers(0, 99),
    backward_ns=st.integers(1, 99),
)  # fmt: skip
def test_folded_takes_the_time_of_the_papers(
    count: int, forward_ns: int, transfer_ns: int, backward_ns: int
) -> None:
    """T = 2 (F + B) + 2 (m - 1) FB, with the times of a chunk's passes alone and side by side as
    the plan predicts them."""
    graphs, operators = {}, {}
    for label in TWO_CHUNKS:
        ns = forward_ns if strand(label).direction == "forward" else backward_ns
        names_of = [f"{label[0]}{label[-1]}{part}" for part in ("a", "t", "z")]
        a, t, z = names_of
        made = graph((a, "compute", ""), (t, "tp", a), (z, "compute", t))
        graphs[label] = OpGraph(label, made.operators, (), ())
        times = {a: ns, t: transfer_ns, z: ns}
        operators |= {op.key: cost_of(op, times[op.id]) for op in made.operators}
    costs = CostTable(operators=operators, source="by hand")
    assert chunk_count(graphs) == 2
    plan = make_plan(graphs, costs, "merge", schedule=find("folded"))
    time_of = {name: phase.predicted_ns for name, phase in plan.phases.items()}
    one_way = {name: {time_of[f"{name}_{chunk}"] for chunk in (0, 1)} for name in ONE_CHUNK}
    both = {ns for name, ns in time_of.items() if "+" in name}
    assert one_way == {
        "forward": {2 * forward_ns + transfer_ns}, "backward": {2 * backward_ns + transfer_ns}
    }  # fmt: skip
    (f,), (b,), (fb,) = one_way["forward"], one_way["backward"], both
    assert max(f, b) <= fb <= f + b
    assert simulate_step(plan, graphs, costs, count).length_ns == 2 * (f + b) + 2 * (count - 1) * fb


def test_chunks_are_counted_from_the_names_of_graphs() -> None:
    """What is exchanged once a step is no chunk."""
    assert chunk_count([*ONE_CHUNK, "gather", "reduce", "first"]) == 1
    assert chunk_count([*TWO_CHUNKS, "gather"]) == 2
    labels = [strand(name).order for name in ("forward_0", "forward_1", "backward_1", "backward_0")]
    assert all(one < other for one, other in pairwise(labels))
