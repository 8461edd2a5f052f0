"""Proves that the phases of a step, run in turn, issue every operator of every micro-batch once,
after what it needs, however much of the forward strand runs ahead; and what a head costs."""

from hypothesis import given
from hypothesis import strategies as st
from test_sim import graph

from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import GraphInput, Kind, Operator, OpGraph
from interlace.ir.plan import PhasePlan, Plan, check, without_heads
from interlace.schedules.finder import sequential, validate
from interlace.search.memory import peak_bytes
from interlace.search.planner import SEARCHES, plan_phase
from interlace.search.problem import Problem
from interlace.sim.lanes import simulate
from interlace.sim.simulated_step import simulate_step
from phases import both, phase_graphs, plan_by
from strategies import op_graphs, orders_of


def table(graphs: dict[str, OpGraph], ns: int = 10) -> CostTable:
    operators = {op.key: cost_of(op, ns) for g in graphs.values() for op in g.operators}
    return CostTable(operators=operators, source="by hand")


@st.composite
def steps(draw: st.DrawFn) -> tuple[Plan, dict[str, OpGraph], int]:
    """A random valid plan with a random head, its strands, and a number of micro-batches. The ends
    of the step may have graphs of their own."""
    ends = ("first", "final") if draw(st.booleans()) else ()
    strands = {name: draw(op_graphs(name=name)) for name in ("forward", "backward", *ends)}
    head = draw(st.integers(0, len(strands["forward"].operators)))
    plan = plan_by(strands, lambda graph: PhasePlan(draw(orders_of(graph)), 0, 0), head)
    return plan, strands, draw(st.integers(2, 5))


@given(case=steps())
def test_a_step_runs_every_operator_of_every_micro_batch_once(
    case: tuple[Plan, dict[str, OpGraph], int],
) -> None:
    """In the simulated step no operator starts before its inputs of the same micro-batch end, and
    the backward of a micro-batch starts after its forward."""
    plan, strands, count = case
    timeline = simulate_step(plan, strands, table(strands), count)
    ends = {}
    passes = _passes(strands, count)
    for span in (span for span in timeline.spans if span.kind != "wait"):
        own = passes[span.strand, span.micro_batch].by_id
        if span.lane == own[span.name].lane:
            assert (span.strand, span.micro_batch, span.name) not in ends
            ends[span.strand, span.micro_batch, span.name] = span.end_ns
            for source in own[span.name].inputs:
                begin = span.issue_ns if span.lane != "compute" else span.start_ns
                assert ends[span.strand, span.micro_batch, source] <= begin
    assert set(ends) == {(*key, op.id) for key, g in passes.items() for op in g.operators}


def _passes(strands: dict[str, OpGraph], count: int) -> dict[tuple[str, int], OpGraph]:
    """The graph of each pass of a step."""
    numbers = range(1, count + 1)
    found = {(name, i): strands[name] for name in ("forward", "backward") for i in numbers}
    found["forward", 1] = strands.get("first", strands["forward"])
    found["backward", count] = strands.get("final", strands["backward"])
    return found


@given(case=steps())
def test_phases_cover_both_graphs(case: tuple[Plan, dict[str, OpGraph], int]) -> None:
    """Head and rest are disjoint, together the forward graph; the last phase of two strands runs
    as the others do, without the head."""
    plan, strands, _ = case
    graphs = phase_graphs(strands, plan.head)
    validate(plan, strands, where="plan")
    name = both(graphs)
    names = [name.partition(".") for name in graphs[name].order]
    assert sorted(name for part, _, name in names if part != "backward") == sorted(
        strands["forward"].order
    )
    last = without_heads(name)
    assert sorted(plan.needed(last).order) == sorted(graphs[last].order)


@given(case=steps())
def test_one_strand_takes_the_sum_of_its_micro_batches(
    case: tuple[Plan, dict[str, OpGraph], int],
) -> None:
    """With one strand nothing of two micro-batches overlaps but transfers that nobody waits for."""
    _, strands, count = case
    plan = sequential(strands)
    costs = table(strands)
    passes = _passes(strands, count).values()
    alone = sum(simulate(g, g.order, costs.of(g)).length_ns for g in passes)
    assert simulate_step(plan, strands, costs, count).length_ns <= alone


def test_values_of_a_head_are_counted_in_both_phases() -> None:
    """a -> gather -> b -> c, 200 bytes each, cut behind the gather: the head leaves the gathered
    value, and a, which the transfer may still read; a rest that starts has both."""
    forward = graph(
        ("a", "compute", ""), ("g", "tp", "a"), ("b", "compute", "g"), ("c", "compute", "b")
    )
    backward = OpGraph("backward", (), (GraphInput("c", "saved", 0),), ())
    graphs = phase_graphs({"forward": forward, "backward": backward}, 2)
    assert graphs["forward+next"].outputs == ("next.a", "next.g")
    last = graphs["rest+backward"]
    carried = [i for i in last.inputs if i.role == "saved" and i.bytes]
    assert [(i.id, i.bytes) for i in carried] == [("forward.a", 200), ("forward.g", 200)]
    assert peak_bytes(last, last.order) == 600
    assert last.by_id["forward.b"].inputs == ()


def test_a_head_waits_for_the_weights_that_are_gathered_before_the_step() -> None:
    """The first layer's weight is gathered once; the forward of the next micro-batch, whose head
    runs ahead in the first phase, reads it too. Every search gives a valid plan."""

    def op(name: str, lane: str, *inputs: str, **memory: tuple[str, ...]) -> Operator:
        kind = Kind.MATMUL if lane == "compute" else Kind.ALL_GATHER
        return Operator(
            id=name, kind=kind, target="t", lane=lane, inputs=inputs, key=f"{name} {lane}",
            bytes_in=8, bytes_out=8, flops=8, reads=memory.get("reads", ()),
            writes=memory.get("writes", ()),
        )  # fmt: skip

    given = (GraphInput("w", "parameter", 8),)
    layers = [op("mm", "compute", reads=("w",)), op("ag", "tp", "mm")]
    for layer in range(3):
        above = layers[-1].id
        layers += [op(f"mm{layer}", "compute", above), op(f"ag{layer}", "tp", f"mm{layer}")]
    strands = {
        "gather": OpGraph(
            "gather", (op("g", "dp"), op("copy", "compute", "g", writes=("w",))), given, ()
        ),
        "forward": OpGraph("forward", tuple(layers), given, ()),
        "backward": OpGraph("backward", tuple(layers), given, ()),
    }
    graph = phase_graphs(strands, 2)["gather+forward+next"]
    solo_ns = table(strands, 1000).of(graph)
    for search in SEARCHES:
        check(plan_phase(Problem(graph, solo_ns), search).order, graph, search)
