"""Proves that only the ends of a step can run decomposed, with the bits of one strand on the same
graphs, and how a run chooses between that and decomposing everywhere.

Wide are four ranks, attention that is cut with its projection, and choices that follow from two
others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from decompose_world import Model, asked, build_llama, imagined_llama
from processes import run_ranks

from interlace.decompose.choose import Request, SiteTimes, SliceTimes, Way
from interlace.decompose.rewrite.apply import Decompose
from interlace.decompose.sites import Site
from interlace.errors import InputError
from interlace.graphs.trace import StrandGraph
from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import Kind, OpGraph
from interlace.ir.plan import Plan
from interlace.runtime.candidates import Candidates, choose_passes, trace_candidates
from interlace.schedules.finder import find
from interlace.search.problem import MemoryLimits
from wide import WIDE

NO_LIMITS = MemoryLimits()
ENDS = [["backward", 3], ["forward", 1]]


def long_sends(strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
    """Times at which a projection hides too little, so that its attention is cut with it."""
    slices = {way: SliceTimes(compute_ns=1000, send_ns=3000) for way in ways}
    return SiteTimes(plain_ns=13_000, slices=slices)


def child(rank_count: int, times: str) -> dict[str, Any]:
    """A rank: steps of 3 micro-batches on plain, decomposed and mixed graphs, in a process group
    that was made without naming a backend."""
    from decompose_world import batches, furthest
    from test_decompose_pass import random_plan

    from interlace.measure.start_up import profile_strands
    from interlace.runtime.recorder import Recorder, clock_for

    model = build_llama(torch.float64, rank_count)
    decompose = asked("ring")
    if times == "long sends":
        decompose = Decompose(request=Request(variant="auto", pieces=1), times=long_sends)
    found = trace_candidates(model.strands, decompose, "ends", schedule=find("two_strand"))
    plain, ends = found.plain, found.ends
    assert plain is not None
    assert ends is not None
    constants = model.constants(ends)
    table = profile_strands(ends, batches()[0], "cpu", constants, repeats=1, machine="here")
    untouched = all(not value.any() for (role, _), value in constants.items() if role == "gradient")
    one = model.step(ends)
    different: dict[str, list[str]] = {}
    for seed in range(3):
        two = model.step(ends, random_plan(ends, seed))
        different[str(seed)] = [key for key in one if not torch.equal(one[key], two[key])]
    sends = []
    for plan in (ends.sequential, random_plan(ends, 1)):
        recorder = Recorder(ends.op_graphs, clock_for("cpu"))
        ends.executor(plan, constants).step(batches(), recorder)
        spans = recorder.timeline("step", 0).spans
        sent = {(s.strand, s.micro_batch) for s in spans if s.kind == Kind.SEND}
        sends.append(sorted(sent))
    alone = ends.executor(ends.sequential, model.constants(ends)).step(batches()[:1])
    return {
        "error": furthest(one, model.step(plain)),
        "different": different,
        "sends": sends,
        "alone": float(alone[0] - one["loss 0"]),
        "untouched": untouched,
        "unmeasured": [
            op.id
            for strands in (plain, found.all, ends)
            for op in strands.pair.operators
            if op.key not in table.operators
        ],
        "listing": ends.listing.lines() if ends.listing else [],
        "digests": [strands.digest for strands in (plain, found.all, ends)],
    }


@pytest.mark.parametrize(
    ("ranks", "times"),
    [
        (2, "even"),
        pytest.param(2, "long sends", marks=WIDE),
        pytest.param(4, "even", marks=WIDE),
    ],
)
def test_the_ends_of_a_step_run_decomposed(ranks: int, times: str) -> None:
    """Sends are in the first forward and the last backward only, in one strand and in two, whose
    bits are equal in any order; every operator of all graphs gets measured; one micro-batch is
    both ends."""
    found = [
        result.value
        for result in run_ranks(
            "test_decompose_passes:child", ranks, args=[ranks, times], timeout_s=200
        )
    ]
    for rank in found:
        assert rank["error"] <= 1e-12
        assert rank["different"] == {"0": [], "1": [], "2": []}
        assert rank["sends"] == [ENDS, ENDS]
        assert rank["alone"] == 0
        assert rank["untouched"]
        assert rank["unmeasured"] == []
        assert "in the first forward and the last backward of a step" in rank["listing"][0]
        split = any("attention_scatter" in line for line in rank["listing"])
        assert split is (times == "long sends")
        assert len(set(rank["digests"])) == 3
        assert rank["digests"] == found[0]["digests"]


model = pytest.fixture(imagined_llama, scope="module")


@pytest.fixture(scope="module")
def auto(model: Model) -> Candidates:
    """Candidates of `decompose = "auto"`, where every site gains alone."""
    return trace_candidates(
        model.strands, asked("auto", 0), "auto", schedule=find("two_strand"), plain=True
    )


def costs_of(graph: OpGraph, *, matmul_ns: float, transfer_ns: int) -> CostTable:
    """A matmul takes `matmul_ns` for each 1,000 FLOPs and 500 ns, which slices pay again."""

    def time(op: Any) -> int:
        if op.is_collective:
            return transfer_ns * max(op.bytes_in, op.bytes_out) // 1000
        return 500 + round(matmul_ns * op.flops / 1000) if op.kind is Kind.MATMUL else 1

    operators = {op.key: cost_of(op, time(op)) for op in graph.operators}
    return CostTable(operators=operators, source="by hand")


def test_strands_that_hide_all_communication_keep_whole_collectives(auto: Candidates) -> None:
    """Short transfers hide under the other strand, and slices would cost their start again."""
    assert auto.ends is not None
    costs = costs_of(auto.whole.pair, matmul_ns=30, transfer_ns=200)
    assert choose_passes(auto, costs, NO_LIMITS) is auto.ends


def test_slices_everywhere_where_that_is_faster(auto: Candidates) -> None:
    """With transfers that take nothing in slices, and whole ones longer than all compute."""
    assert auto.ends is not None
    costs = costs_of(auto.whole.pair, matmul_ns=30, transfer_ns=20_000)
    operators = {
        key: replace(cost, solo_ns=1) if cost.kind is Kind.SEND else cost
        for key, cost in costs.operators.items()
    }
    costs = replace(costs, operators=operators)
    assert choose_passes(auto, costs, NO_LIMITS) is auto.all


@pytest.mark.parametrize(
    ("decompose", "passes", "strands", "chosen"),
    [
        (asked("auto", 0), "auto", 2, "ends"),
        (asked("auto", 0), "auto", 1, "all"),
        pytest.param(asked("auto", 0), "all", 2, "all", marks=WIDE),
        (asked("ring"), "auto", 2, "all"),
        (asked("ring"), "ends", 1, "ends"),
        pytest.param(None, "auto", 2, "all", marks=WIDE),
        (None, "ends", 2, "all"),
    ],
)
def test_what_can_be_chosen(
    model: Model, decompose: Decompose | None, passes: Any, strands: int, chosen: str
) -> None:
    """A named variant runs everywhere unless told otherwise, as does one strand."""
    found = trace_candidates(
        model.strands, decompose, passes, schedule=find(("one_strand", "two_strand")[strands - 1])
    )
    assert found.whole is getattr(found, chosen)


def test_a_plan_runs_on_the_graphs_that_it_was_made_for(auto: Candidates) -> None:
    """By digest; a plan for other graphs meets the decomposed ones, and is refused there."""
    assert auto.ends is not None
    plan = auto.ends.sequential
    assert auto.made_for(plan) is auto.ends
    assert auto.made_for(replace(plan, graph_digest="other")) is auto.all
    assert isinstance(plan, Plan)


def test_ends_that_do_not_fit_are_refused(model: Model) -> None:
    """A forward that keeps other values for its backward cannot be followed by the other one."""

    def trace(decompose: Decompose | None) -> Any:
        strands = model.strands(decompose)
        return strands if decompose else replace(strands, saved=strands.saved[:-1])

    with pytest.raises(InputError, match="other values are kept") as error:
        trace_candidates(trace, asked("ring"), "ends", schedule=find("two_strand"))
    assert "all" in error.value.hint
    found = trace_candidates(trace, asked("auto", 0), "auto", schedule=find("two_strand"))
    assert found.ends is None
    assert found.all.listing is not None
    said = found.all.listing.summary()
    assert (
        " in all passes, as other values are kept for the backward in decomposed graphs; " in said
    )
    assert found.all.listing.as_dict()["misfit"]
