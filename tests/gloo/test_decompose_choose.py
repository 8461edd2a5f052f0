"""Proves how a way is chosen for each site, and that runs and plans say what they decomposed.

Wide is a run of `interlace train` whose ends alone are decomposed: `test_decompose_passes.py` has
such steps, and another run here is decomposed everywhere.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
from decompose_world import Model, asked, imagined_llama, live_bytes
from training import Workplace

from interlace.config import (
    DataConfig,
    HardwareConfig,
    LinkConfig,
    ModelConfig,
    OverlapConfig,
    ParallelConfig,
    Recompute,
    RunConfig,
)
from interlace.decompose.choose import Choice, Request, SiteTimes, SliceTimes, Way, choose, ways_of
from interlace.decompose.sites import Site, SiteKind
from interlace.errors import InputError
from interlace.graphs.trace import StrandGraph
from interlace.ir.graph import Kind
from interlace.sim.decomposed import by_expert_ns, decomposed_ns
from interlace.train.fake_trace import trace_fake
from wide import WIDE

SCALAR_BYTES = 8
NO_GRAPH = cast(StrandGraph, None)


def site(kind: SiteKind = "gather_matmul", ranks: int = 4, rows: int = 64) -> Site:
    return Site(
        strand="forward", kind=kind, collective="c", matmuls=("mm",), group="0", ranks=ranks,
        rows=rows, bytes=1000, flops=1000,
    )  # fmt: skip


def chosen(of: Site, request: Request, compute_ns: int, send_ns: int, plain_ns: int) -> Choice:
    """The choice where one slice takes these times, divided by its pieces."""

    def times(strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
        slices = {
            way: SliceTimes(compute_ns=compute_ns // way[1], send_ns=send_ns // way[1])
            for way in ways
        }
        return SiteTimes(plain_ns=plain_ns, slices=slices)

    return choose(NO_GRAPH, of, request, times)


def test_auto_takes_the_shortest_way_by_the_formula() -> None:
    """Sends that take longer than compute: more pieces shorten the one slice without a send."""
    found = chosen(site(), Request(variant="auto"), 1000, 1600, plain_ns=8800)
    assert (found.variant, found.pieces) == ("ring", 4)
    assert found.chosen_ns == decomposed_ns(250, 400, ranks=4, pieces=4)
    assert found.chosen_ns < decomposed_ns(1000, 1600, ranks=4) < found.plain_ns


def test_auto_leaves_the_collective_whole_where_slices_do_not_gain() -> None:
    """It says by how little; a variant that was asked for is used all the same."""
    found = chosen(site(), Request(variant="auto"), 1000, 1000, plain_ns=4050)
    assert not found.variant
    assert found.reason == "the best way (ring, 1) would gain 1%"
    fixed = chosen(site(), Request(variant="direct", pieces=2), 1000, 1000, plain_ns=4050)
    assert (fixed.variant, fixed.pieces, fixed.reason) == ("direct", 2, "")
    other = chosen(site(rows=6), Request(variant="slicing", pieces=4), 1000, 1000, plain_ns=4050)
    assert (other.pieces, other.reason) == (3, "4 pieces do not fit 6 rows")


def test_blocks_of_an_all_reduce_hide_its_gathers() -> None:
    """With one block the whole gather is exposed, with m a part of it; 5 does not divide 64."""
    of = site("matmul_reduce", ranks=2)
    one = chosen(of, Request(variant="auto", pieces=1), 1000, 400, plain_ns=2800)
    four = chosen(of, Request(variant="auto", pieces=5), 1000, 400, plain_ns=2800)
    assert (one.chosen_ns, four.pieces, four.chosen_ns) == (2400, 4, 2100)


def test_ways_fit_the_site() -> None:
    """Between two ranks a ring has one direction; a slice has one row at least."""
    assert ways_of(site(ranks=2, rows=2), Request(variant="auto")) == [("ring", 1), ("ring", 2)]
    assert {v for v, _ in ways_of(site(), Request(variant="auto"))} == {"ring", "bidirectional"}
    assert ways_of(site(rows=3), Request(variant="ring", pieces=8)) == [("ring", 3)]
    assert ways_of(site(rows=6), Request(variant="slicing")) == [("slicing", 3)]


def test_experts_are_cut_into_groups_of_experts() -> None:
    """Of a number that a rank has; by the times of a pipeline of exchanges and groups."""
    of = replace(site(), kind="expert_exchange", experts=3, back="back")
    assert ways_of(of, Request(variant="auto")) == [("by_expert", 2), ("by_expert", 3)]
    assert ways_of(of, Request(variant="ring", pieces=2)) == [("by_expert", 2)]
    found = chosen(of, Request(variant="auto"), 1200, 600, plain_ns=2400)
    assert (found.variant, found.pieces) == ("by_expert", 3)
    assert found.chosen_ns == by_expert_ns(400, 200, groups=3) == 200 + 3 * 400 + 200
    fixed = chosen(of, Request(variant="ring", pieces=5), 1200, 600, plain_ns=2400)
    assert (fixed.pieces, fixed.reason) == (3, "5 pieces do not fit 3 experts of a rank")


def test_attention_is_cut_too_where_the_projection_alone_hides_too_little() -> None:
    """Attention ten times the projection hides sends of three times its time."""
    of = site("matmul_scatter")
    attention = replace(of, kind="attention_scatter", flops=10_000)

    def times(strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
        slices = {way: SliceTimes(compute_ns=1000, send_ns=3000) for way in ways}
        return SiteTimes(plain_ns=13_000, slices=slices)

    found = choose(NO_GRAPH, of, Request(variant="auto", pieces=1), times, attention)
    assert found.site.kind == "attention_scatter"
    assert found.chosen_ns == 4000


def test_a_negative_number_of_pieces_is_refused() -> None:
    """With the setting's name and what to set."""
    with pytest.raises(InputError, match=r"overlap.pieces = -1 is negative") as error:
        Request(variant="ring", pieces=-1)
    assert "0" in error.value.hint


def test_a_plan_chooses_by_computed_costs() -> None:
    """Narrow outputs of the head do not hide their input's transfer enough to gain; everything
    else is decomposed, and named by module."""
    config = RunConfig(
        model=ModelConfig(layers=1, width=1024, heads=8, kv_heads=8, ffn_width=4096),
        parallel=ParallelConfig(tensor=4),
        data=DataConfig(sequence_length=256),
        hardware=HardwareConfig(peak_tflops=0.1, memory_gb_per_s=20),
        link=LinkConfig(rate="400mbit"),
        overlap=OverlapConfig(decompose="auto"),
    )
    listing = trace_fake(config).whole.listing
    assert listing is not None
    plain = {choice.site.module: choice for choice in listing.choices if not choice.variant}
    assert list(plain) == ["model.head"]
    assert "would gain" in plain["model.head"].reason
    assert listing.decomposed == 8
    text = "\n".join(listing.lines())
    assert "forward gather_matmul model.blocks.*.attention.query, key, value: 4 ranks" in text
    assert "not forward reduce_scatter model.embedding: no matmul makes its input" in text


def test_training_says_what_it_decomposed_and_compares_with_plain_graphs(tmp_path: Path) -> None:
    """Two ranks: one line at the start, the whole list in the folder; both ways on decomposed
    graphs have the same bits, as have both on plain ones."""
    workplace = Workplace(tmp_path)
    modes = [
        word for mode in ("plain-1", "1", "plain-2", "2") for word in ("--compare.modes", mode)
    ]
    said = workplace.train(
        *("--overlap.decompose", "ring", "--overlap.pieces", "2", "--plan.search", "list"),
        *("--compare.steps", "2", *modes, "--train.steps", "1"),
        out="out",
    )
    assert "decomposed 18 of 18 sites (ring 18); 5 of 23 collectives are no sites" in said
    listing = json.loads((tmp_path / "out" / "decompose.json").read_text())
    assert listing["decomposed"] == 18
    assert {row["pieces"] for row in listing["sites"]} == {2}
    summary: dict[str, Any] = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert summary["losses_identical"]
    assert summary["weights_identical"]
    losses = {mode: row["losses"] for mode, row in summary["modes"].items()}
    assert losses["1"] == pytest.approx(losses["plain-1"], rel=1e-5)
    assert "speedup_vs_plain_one_strand" in summary


@WIDE
def test_training_decomposes_the_ends_of_a_step(tmp_path: Path) -> None:
    """Two ranks: two strands have the bits of one strand with the same passes, and a run whose plan
    is given takes the graphs that it was made for."""
    workplace = Workplace(tmp_path)
    ways = ("decomposed-1", "1", "2")
    modes = [word for mode in ways for word in ("--compare.modes", mode)]
    ring = ("--overlap.decompose", "ring", "--overlap.pieces", "1", "--overlap.passes", "ends")
    # Two ranks that trace and plan on a loaded machine were once silent for 2.5 s.
    patient = ("--watchdog.dead_after_s", "15")
    ends = (*ring, *patient, "--plan.search", "list", "--train.steps", "1")
    said = workplace.train(*ends, "--compare.steps", "1", *modes, out="out")
    assert "decomposed 18 of 18 sites (ring 18) in the first forward and the last backward" in said
    listing = json.loads((tmp_path / "out" / "decompose.json").read_text())
    assert listing["passes"] == "ends"
    summary: dict[str, Any] = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert summary["losses_identical"]
    assert summary["weights_identical"]
    losses = {mode: row["losses"] for mode, row in summary["modes"].items()}
    for mode in ways:
        assert losses[mode] == pytest.approx(losses["2"], rel=1e-5)
    assert "speedup_vs_decomposed_one_strand" in summary
    workplace.train(*ends, "--plan.file", str(tmp_path / "out" / "plan.txt"), out="again")
    assert workplace.losses("again") == workplace.losses("out")


model = pytest.fixture(imagined_llama, scope="module")


def test_weight_gradients_run_under_the_last_sends(model: Model) -> None:
    """Between the last matmul of a scatter and the addition of what arrives stand the gradients of
    the same matmuls' weights: head; gate and up; query, key and value."""
    graph = model.strands(asked("ring")).op_graphs["backward"]
    fillers = []
    for place, op in enumerate(graph.operators):
        is_sum = op.kind == Kind.ACCUMULATE and not op.writes
        before = graph.operators[:place]
        if is_sum:
            own = takewhile(lambda op: op.writes and op.kind == Kind.MATMUL, reversed(before))
            fillers.append(len(list(own)))
    assert fillers == [1, 2, 3]


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_memory_is_counted_right(model: Model, recompute: Recompute) -> None:
    """At every matmul that writes to a buffer, what operators have allocated and nobody dropped is
    what the planner counts, but for the tangent, and for the inputs of collectives that are over:
    here they are over at once, and the planner counts them until their results are read."""
    alive = live_bytes(model, model.strands(asked("ring", 2), recompute))
    assert len(alive) >= 40
    exact = [real == counted or real == counted + SCALAR_BYTES for counted, real in alive]
    assert sum(exact) > len(alive) / 3
    for counted, real in alive:
        assert 0.7 * counted < real <= counted + SCALAR_BYTES
