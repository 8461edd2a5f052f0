"""What `interlace plan` says about a plan: figures by hand, bound, tables, JSON, picture."""

import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from interlace.ir.costs import CostTable, PairCost, cost_of
from interlace.ir.graph import COMPUTE_LANE, GraphInput, Kind, Operator, OpGraph
from interlace.ir.plan import PhasePlan, Plan
from interlace.report.plan_figures import Comparison, compare_searches, plan_figures
from interlace.report.plan_picture import WIDTH_IN, plan_png, window_ns
from interlace.report.plan_tables import plan_json, plan_summary
from interlace.report.theme import LIGHT
from interlace.schedules.finder import sequential
from interlace.search.problem import MemoryLimits
from interlace.search.step_bounds import step_bound_ns
from interlace.sim.simulated_step import simulate_step
from phases import both, plan_by
from strategies import op_graphs, orders_of

MS = 1_000_000
KINDS = {"norm": Kind.ELEMENTWISE, "add": Kind.ELEMENTWISE, "gather": Kind.ALL_GATHER,
         "scatter": Kind.REDUCE_SCATTER, "mm": Kind.MATMUL, "dw": Kind.ACCUMULATE}  # fmt: skip
LENGTHS_MS = {"norm": 1, "add": 1, "gather": 6, "scatter": 6, "mm": 6, "dw": 6}
HELD = {"weights": 1000, "buffers": 0}


def strand(name: str, layers: int = 1) -> OpGraph:
    """The example of docs/concepts/planning.md, repeated: norm, gather, mm, scatter, add, (dW)."""
    operators: list[Operator] = []
    before = ""
    steps = ["norm", "gather", "mm", "scatter", "add"] + (["dw"] if name == "backward" else [])
    for layer in range(layers):
        source = before
        for step in steps:
            own = f"{step}_{layer}"
            inputs = (f"mm_{layer}",) if step == "dw" else ((source,) if source else ())
            lane = "tp" if step in ("gather", "scatter") else COMPUTE_LANE
            operators.append(
                Operator(own, KINDS[step], f"aten.{step}", lane, inputs, (), step, 50, 100, 10)
            )
            source = own
        before = f"add_{layer}"
    return OpGraph(name, tuple(operators), (GraphInput("w", "parameter", 8),), (before,))


def table(*graphs: OpGraph) -> CostTable:
    operators = {
        op.key: cost_of(op, LENGTHS_MS[op.key] * MS) for graph in graphs for op in graph.operators
    }
    return CostTable(operators=operators, source="by hand")


def by_hand(layers: int = 1) -> tuple[dict[str, OpGraph], CostTable]:
    graphs = {name: strand(name, layers) for name in ("forward", "backward")}
    return graphs, table(*graphs.values())


def compared(layers: int = 1, **changes: object) -> Comparison:
    graphs, costs = by_hand(layers)
    options = {
        "chosen": "list",
        "micro_batches": 3,
        "limits": MemoryLimits(),
        "constant_bytes": HELD,
        "stage": lambda _: nullcontext(),
        "every": True,
    }
    return compare_searches(graphs, costs, **(options | changes))


def test_figures_of_the_documented_example() -> None:
    """27 ms, 5 ms exposed, 79 % hidden: the numbers of docs/concepts/planning.md."""
    graphs, costs = by_hand()
    order = (
        "backward.norm backward.gather forward.norm forward.gather backward.mm backward.scatter "
        "forward.mm forward.scatter backward.dw backward.add forward.add"
    )
    order = tuple(f"{name}_0" for name in order.split())
    phases = {
        "forward": PhasePlan(graphs["forward"].order, 0, 0),
        "forward+backward": PhasePlan(order, 0, 0),
        "backward": PhasePlan(graphs["backward"].order, 0, 0),
    }
    plan = Plan("hand", "g", "c", "two_strand", phases)
    figures = plan_figures(plan, graphs, costs=costs, micro_batches=3)
    pair = figures.phases["forward+backward"]
    assert (pair.predicted_ns, pair.exposed_ns, pair.communication_ns) == (27 * MS, 5 * MS, 24 * MS)
    assert 25.9 * MS < pair.bound_ns <= pair.predicted_ns
    assert pair.hidden_fraction == pytest.approx(19 / 24)
    assert pair.over_bound == pair.predicted_ns / pair.bound_ns - 1
    assert figures.step.communication_ns == 72 * MS
    assert 73 * MS <= figures.step.predicted_ns <= (20 + 2 * 27 + 26) * MS


def test_one_strand_by_hand() -> None:
    """Every transfer is exposed; the step bound is the link's work between its ends; values
    live from their operator to their last reader."""
    graphs, costs = by_hand()
    figures = plan_figures(sequential(graphs), graphs, costs=costs, micro_batches=2)
    assert figures.step.predicted_ns == 2 * 46 * MS
    assert figures.step.exposed_ns == figures.step.communication_ns == 48 * MS
    assert figures.step.hidden_fraction == 0.0
    assert figures.step.bound_ns == (1 + 48 + 1) * MS
    # mm and scatter of a forward, the latter holding its input; dW reads mm after add is kept.
    assert figures.step.peak_bytes == 300
    assert set(figures.phases) == {"forward", "backward"}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_step_beats_its_bound(data: st.DataObject) -> None:
    """Whatever the graphs, orders, head and contention: no step beats the bound."""
    names = ("forward", "backward", *data.draw(st.sampled_from([(), ("first", "final")])))
    graphs = {name: data.draw(op_graphs(operators=(1, 6), name=name)) for name in names}
    head = data.draw(st.integers(0, len(graphs["forward"].operators)))
    plan = plan_by(graphs, lambda graph: PhasePlan(data.draw(orders_of(graph)), 0, 0), head)
    times = st.integers(0, 1000)
    operators = {
        op.key: cost_of(op, data.draw(times)) for g in graphs.values() for op in g.operators
    }
    slow = PairCost(Kind.MATMUL, Kind.ALL_GATHER, "tp", 1.5, 1.2, 0.5)
    costs = CostTable(
        operators=operators,
        source="random",
        issue_ns=data.draw(st.integers(0, 20)),
        pairs=data.draw(st.sampled_from([(), (slow,)])),
        links=data.draw(st.sampled_from([{}, {"dp": "cable", "tp": "cable"}])),
    )
    for each in (plan, sequential(graphs)):
        count = data.draw(st.integers(2 if each.schedule == "two_strand" else 1, 4))
        step = simulate_step(each, graphs, costs, count)
        # The simulator rounds ends to whole nanoseconds.
        assert step_bound_ns(graphs, costs=costs, micro_batches=count) <= step.length_ns + 1


def test_searches_are_compared_with_one_strand() -> None:
    """Every search has a row; gains and extra memory are those of its step over one strand's."""
    comparison = compared(layers=2)
    one = comparison.one_strand.step
    assert set(comparison.searches) == {"merge", "list", "segment_pairs"}
    for name, figures in comparison.searches.items():
        assert figures.step.bound_ns == one.bound_ns <= figures.step.predicted_ns
        assert comparison.speed_up(name) == one.predicted_ns / figures.step.predicted_ns
        extra = figures.step.peak_bytes - one.peak_bytes
        assert comparison.extra_memory(name) == pytest.approx(extra / one.peak_bytes)
        of_all = comparison.extra_of_all_memory(name)
        assert of_all == pytest.approx(extra / (one.peak_bytes + 1000))
    assert comparison.speed_up("merge") > 1.2
    alone = compared(layers=2, every=False)
    assert set(alone.searches) == {"list"}
    assert alone.best.step == comparison.best.step


def test_tables_hold_the_figures() -> None:
    """One row per search and per phase, the chosen one marked, memory by part."""
    comparison = compared(layers=2, chosen="merge")
    text = plan_summary(comparison)
    step = comparison.best.step
    (row,) = re.findall(r"^merge \* .*x$", text, re.MULTILINE)
    assert row.split()[2] == f"{step.predicted_ns / MS:.0f}" or row.split()[2] == (
        f"{step.predicted_ns / MS:.1f}"
    )
    assert f"{100 * step.hidden_fraction:.1f} %" in row
    assert f"{comparison.speed_up('merge'):.2f}x" in row
    for name in ("one strand", "list", "segment_pairs", *comparison.best.plan.phases):
        assert re.search(rf"^{re.escape(name)}  ", text, re.MULTILINE), name
    assert "1000 B (weights 1000 B)" in text.replace(",", "")


def test_a_search_that_needs_too_much_memory_is_named() -> None:
    """Those that fit stay; if the chosen one does not, that is an error."""
    free = compared(layers=3)
    peaks = {
        name: max(phase.peak_bytes for phase in figures.phases.values())
        for name, figures in free.searches.items()
    }
    if len(set(peaks.values())) == 1:
        pytest.fail(f"the example no longer tells searches apart: {peaks}")
    least = min(peaks, key=lambda name: peaks[name])
    bounded = compared(layers=3, chosen=least, limits=MemoryLimits(bound_bytes=peaks[least]))
    assert least in bounded.searches
    for name, why in bounded.refused.items():
        assert "more than the bound" in why
        assert f"search {name} gives no plan: {why}" in plan_summary(bounded)


def test_json_has_plan_figures_and_timelines() -> None:
    """The document can be read without this package, and agrees with the figures."""
    comparison = compared(layers=2)
    text = plan_json(comparison, costs={"source": "by hand"}, run={"strands": "2"})
    document = json.loads(text)
    best = comparison.best
    steady = both(best.plan.phases)
    assert document["version"] == 2
    assert document["plan"]["digest"] == best.plan.digest
    assert tuple(document["plan"]["phases"][steady]["order"]) == best.plan.phases[steady].order
    step = document["searches"]["list"]["step"]
    assert step["predicted_ns"] == best.step.predicted_ns
    assert step["gap_to_bound"] == pytest.approx(best.step.over_bound)
    for name in best.plan.phases:
        timeline = document["timelines"][name]
        assert timeline["length_ns"] == best.phases[name].predicted_ns
        busy = sum(row["busy_ns"] for row in timeline["collectives"])
        assert busy == best.phases[name].communication_ns
        waits = timeline["longest_waits"]
        assert sorted(waits, key=lambda wait: -wait["wait_ns"]) == waits
        assert sum(wait["wait_ns"] for wait in waits) <= best.phases[name].exposed_ns


def _colours(png: bytes) -> np.ndarray:
    """Pixels as 8-bit RGB."""
    return (matplotlib.image.imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)


def _count(pixels: np.ndarray, color: str) -> int:
    wanted = np.array([round(255 * part) for part in to_rgb(color)])
    return int((np.abs(pixels - wanted).max(axis=-1) <= 1).sum())


def test_picture_shows_strands_and_waits() -> None:
    """Both strands' hues and the dark strip of exposed waits take their place in the picture."""
    comparison = compared(layers=2)
    pixels = _colours(plan_png(comparison, subtitle="costs $5 & <b>"))
    assert pixels.shape[1] == WIDTH_IN * 200
    blue, orange = _count(pixels, "#2f6fd0"), _count(pixels, "#d9691e")
    assert min(blue, orange) > 20_000
    assert _count(pixels, LIGHT.waiting) > 2_000


def test_a_deep_model_is_drawn_in_part() -> None:
    """Two layers are drawn whole; of a hundred a round time that holds some hundred operators."""
    whole = compared().best
    lengths = [timeline.length_ns for timeline in whole.timelines.values()]
    assert window_ns(list(whole.timelines.values())) == max(lengths)
    deep = compared(layers=100)
    timelines = list(deep.best.timelines.values())
    shown = window_ns(timelines)
    assert shown < max(timeline.length_ns for timeline in timelines)
    assert str(shown).rstrip("0") in {"1", "2", "5"}
    assert plan_png(deep, subtitle="")[:4] == b"\x89PNG"


def test_a_plan_without_communication_is_drawn() -> None:
    """One rank: no link, nothing to hide, no division by zero."""
    graphs = {
        name: replace(
            graph,
            operators=tuple(
                replace(op, lane=COMPUTE_LANE, kind=Kind.MATMUL) for op in graph.operators
            ),
        )
        for name, graph in by_hand()[0].items()
    }
    comparison = compare_searches(
        graphs,
        table(*graphs.values()),
        chosen="merge",
        micro_batches=2,
        limits=MemoryLimits(),
        constant_bytes=HELD,
        stage=lambda _: nullcontext(),
    )
    assert comparison.best.step.hidden_fraction == 1.0
    assert comparison.speed_up("merge") == 1.0
    assert plan_png(comparison, subtitle="")[:4] == b"\x89PNG"
