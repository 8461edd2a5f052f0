"""Schedules of pipelines: each verified for 1 to 8 ranks and 1 to 20 micro-batches, with the times,
bubbles and memory of their formulas (papers 1.6 and 2.5, and the papers that the files name)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import InputError
from interlace.ir.actions import (
    Action,
    Share,
    backward,
    forward,
    input_gradient,
    together,
    weight_gradient,
)
from interlace.ir.stage_messages import Item, Receive, Send, chain
from interlace.schedules.eager_folded import depth_for, period_ns
from interlace.schedules.finder import find, names
from interlace.schedules.grid import as_grid
from interlace.schedules.schedule_text import read_schedule, write_schedule
from interlace.schedules.sends_receives import (
    check_messages,
    with_early_receives,
    with_messages,
    without_messages,
)
from interlace.schedules.torch_csv import from_csv, to_csv
from interlace.schedules.verify import ScheduleError, check_ranks
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import PipelineStep, simulate_pipeline

PIPELINES = [name for name in names() if name != "two_strand"]
"""Those that run on several ranks."""
FOLDED = ("folded", "eager_folded", "dual_pipe_v", "zb_v", "stp")


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("name", PIPELINES)
def test_every_schedule_runs_for_any_number_of_micro_batches(name: str, ranks: int) -> None:
    """Each pass once, nothing before what it needs, and messages that all meet."""
    schedule = find(name)
    for count in range(1, 21):
        actions = schedule.of_ranks(ranks, count)
        total = ranks * schedule.chunks
        seen = sorted((s.strand.chunk or 0, s.micro_batch, s.strand.direction, s.strand.share)
                      for each in actions for a in each for s in a.slots)  # fmt: skip
        assert len(set(seen)) == len(seen)
        forwards = [(c, m) for c, m, way, _ in seen if way == "forward"]
        assert forwards == [(c, m) for c in range(total) for m in range(1, count + 1)]
        for shares in ([Share.WHOLE, Share.INPUT], [Share.WHOLE, Share.WEIGHT]):
            backwards = [
                (c, m) for c, m, way, share in seen if way == "backward" and share in shares
            ]
            assert backwards == forwards
        lists = with_messages(actions, chain(total))
        check_messages(lists, edges=chain(total), name=name)
        assert without_messages(lists) == actions
        crossings = sum(a != b for a, b in _hops(name, ranks, total))
        assert sum(isinstance(i, Send) for each in lists for i in each) == 2 * count * crossings


def _hops(name: str, ranks: int, chunks: int) -> list[tuple[int, int]]:
    """(rank, rank) of neighbouring chunks, by the placement that the file of the schedule
    states."""
    folded = name in FOLDED
    rank = [min(c, chunks - 1 - c) if folded else c % ranks for c in range(chunks)]
    return list(pairwise(rank))


@pytest.mark.parametrize("name", ["gpipe", "one_strand", "interleaved"])
def test_more_chunks_on_a_rank(name: str) -> None:
    """Where their number is free: three and four."""
    for chunks in (3, 4):
        for ranks, count in ((1, 3), (2, 5), (3, 6), (4, 9)):
            lists = with_messages(find(name).of_ranks(ranks, count, chunks), chain(ranks * chunks))
            check_messages(lists, edges=chain(ranks * chunks), name=name)


def costs(
    chunks: int, f: int, i: int, w: int, *, transfer: int = 0, pair: int = 0
) -> PipelineCosts:
    """Equal chunks; `pair` is the time of a forward and a backward side by side."""
    one = ChunkCosts(forward_ns=f, input_ns=i, weight_ns=w, saved_bytes=10, kept_bytes=4)
    numbers = range(chunks)
    pairs = {f"forward_{a}+backward_{b}": pair for a in numbers for b in numbers} if pair else {}
    return PipelineCosts(
        chunks=[one] * chunks, pairs_ns=pairs, messages_ns=dict.fromkeys(chain(chunks), transfer)
    )


def step(
    name: str, ranks: int, count: int, costs_of: tuple[int, int, int], **more: int
) -> PipelineStep:
    schedule = find(name)
    total = ranks * schedule.chunks
    return simulate_pipeline(schedule.of_ranks(ranks, count), costs(total, *costs_of, **more))


def idle_ns(found: PipelineStep) -> int:
    """The longest time that a rank waits between its first pass and its last one."""
    waits = []
    for timeline in found.timelines:
        spans = [span for span in timeline.spans if span.kind == "action"]
        length = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
        waits.append(length - sum(span.duration_ns for span in spans))
    return max(waits)


RANKS = st.sampled_from([1, 2, 3, 4, 6, 8])
TIMES = st.tuples(*(st.integers(1, 50),) * 3)


@given(ranks=RANKS, more=st.integers(0, 12), times=TIMES)
def test_bubbles_without_cut_backwards(ranks: int, more: int, times: tuple[int, int, int]) -> None:
    """GPipe and 1F1B: (p-1)(F+B) of a stage; interleaved: of a chunk; folded: of a stage again, as
    its pairs take the sum here."""
    one = (ranks - 1) * sum(times)
    count = ranks + more
    for name in ("gpipe", "one_f_one_b", "eager_one_f_one_b"):
        assert step(name, ranks, count, times).step_ns == count * sum(times) + one
    count = ranks * (1 + more)
    assert step("interleaved", ranks, count, times).step_ns == 2 * count * sum(times) + one
    count = 2 * ranks + more
    assert step("folded", ranks, count, times).step_ns == 2 * (count * sum(times) + one)


@given(ranks=RANKS, count=st.integers(1, 12), times=TIMES, between=st.integers(0, 9))
def test_a_rank_is_busy_between_its_actions(
    ranks: int, count: int, times: tuple[int, int, int], between: int
) -> None:
    """And messages leave before: one micro-batch waits for it once, where it turns."""

    def length_ns(ranks: int, count: int) -> int:
        actions = find("one_f_one_b").of_ranks(ranks, count)
        phases = {action.phase for own in actions for action in own}
        busy = replace(costs(ranks, *times), between_ns=dict.fromkeys(phases, between))
        return simulate_pipeline(actions, busy).step_ns

    assert length_ns(1, count) == count * sum(times) + (2 * count - 1) * between
    assert length_ns(ranks, 1) == ranks * sum(times) + between


@given(ranks=RANKS, more=st.integers(0, 12), times=TIMES, data=st.data())
def test_folded_takes_the_time_of_the_papers(
    ranks: int, more: int, times: tuple[int, int, int], data: st.DataObject
) -> None:
    """T_W = 2p(F+B) + 2(m-1)FB, for max(F, B) <= FB <= F + B; memory 2p + 1 chunks on every
    rank."""
    f, i, w = times
    pair = data.draw(st.integers(max(f, i + w), f + i + w))
    count = 2 * ranks + more
    found = step("folded", ranks, count, times, pair=pair)
    assert found.step_ns == 2 * ranks * (f + i + w) + 2 * (count - 1) * pair
    assert set(found.peak_chunks) == {2 * ranks + 1}
    assert set(found.peak_bytes) == {10 * (2 * ranks + 1)}


@given(ranks=st.integers(1, 8), more=st.integers(0, 12), data=st.data())
def test_bubbles_with_cut_backwards(ranks: int, more: int, data: st.DataObject) -> None:
    """ZB-H1: (p-1)(F+I-W) where W fits into the gap. ZB-H2, ZB-V: none where F = I = W. DualPipeV:
    (p-1)(FB+B-3W), here (p-1)(F+2I-W), where F = I. STP: (p-1)(F+I-W) where all are equal."""
    f, i, w = data.draw(st.integers(10, 50)), data.draw(st.integers(10, 50)), 0
    w = data.draw(st.integers(1, min(f, i)))
    count = 3 * ranks + more
    zb_h1 = step("zb_h1", ranks, count, (f, i, w))
    assert zb_h1.step_ns == count * (f + i + w) + (ranks - 1) * (f + i - w)
    assert max(zb_h1.peak_chunks) == ranks
    zb_h2 = step("zb_h2", ranks, count, (f, f, f))
    assert zb_h2.step_ns == (3 * count + ranks - 1) * f
    assert idle_ns(zb_h2) == 0
    assert set(zb_h2.peak_chunks) == {2 * ranks - 1}
    dual = step("dual_pipe_v", ranks, count, (f, f, w))
    assert dual.step_ns == 2 * count * (2 * f + w) + (ranks - 1) * (3 * f - w)
    assert max(dual.peak_chunks) == 2 * ranks + 1
    zb_v, stp = (step(name, ranks, count, (f, f, f)) for name in ("zb_v", "stp"))
    assert idle_ns(zb_v) == 0
    assert max(zb_v.peak_chunks) == 2 * ranks
    assert stp.step_ns == 6 * count * f + (ranks - 1) * f
    assert stp.peak_chunks[0] == 3 * ranks + 1
    assert max(stp.peak_chunks) <= max(3 * ranks + 1, 4 * ranks - 1)


@given(ranks=st.integers(2, 8), f=st.integers(5, 50), b=st.integers(5, 50), data=st.data())
def test_transfers_of_1f1b_and_eager_1f1b(ranks: int, f: int, b: int, data: st.DataObject) -> None:
    """Papers 2.5, over n micro-batches (2n - 1 for eager), after which these schedules repeat
    themselves: 1F1B P = F + B + 2c(n-1)/n; eager max(F + B, (n(F+B) + 2(n-1)c)/(2n-1)), which is
    F + B while c <= (F + B)/2. Memory n - i and 2(n - i) - 1 micro-batches on rank i."""
    c = data.draw(st.integers(0, f + b))
    n = ranks

    def lengths(name: str, period: int) -> tuple[PipelineStep, int]:
        short, long = (step(name, n, 8 * n + more, (f, b, 0), transfer=c) for more in (0, period))
        return long, long.step_ns - short.step_ns

    plain, grown = lengths("one_f_one_b", n)
    assert grown == n * (f + b) + 2 * c * (n - 1)
    eager, grown = lengths("eager_one_f_one_b", 2 * n - 1)
    assert grown == max((2 * n - 1) * (f + b), n * (f + b) + 2 * (n - 1) * c)
    assert plain.peak_chunks == tuple(n - i for i in range(n))
    assert eager.peak_chunks == tuple(2 * (n - i) - 1 for i in range(n))


@settings(max_examples=40)
@given(ranks=st.integers(2, 6), pair=st.integers(10, 60), data=st.data())
def test_eager_folded_hides_transfers(ranks: int, pair: int, data: st.DataObject) -> None:
    """Its period is that of its file's formula, for any depth: nothing is exposed at the greatest
    while a hop takes no longer than a pair. A hop is two messages."""
    message, depth = data.draw(st.integers(0, pair)), data.draw(st.integers(ranks, 2 * ranks - 1))
    count = 60  # the least common multiple of all loops' micro-batches
    some, more = (
        simulate_pipeline(
            find("eager_folded").of_ranks(ranks, number, options={"depth": depth}),
            costs(2 * ranks, pair // 2, pair - pair // 2, 0, transfer=message, pair=pair),
        ).step_ns
        # Loops of nearly equal length settle late: of 6 ranks at 24 micro-batches, not at 48.
        for number in (16 * ranks, 16 * ranks + count)
    )
    assert (more - some) / count == pytest.approx(period_ns(ranks, depth, pair, 2 * message), 0.01)
    if 2 * message <= pair:
        assert period_ns(ranks, 2 * ranks - 1, pair, 2 * message) == 2 * pair
    chosen = depth_for(ranks, pair, 2 * message)
    assert chosen == ranks or message > 0
    assert period_ns(ranks, chosen, pair, 2 * message) <= 1.02 * period_ns(
        ranks, 2 * ranks - 1, pair, 2 * message
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_text_reads_back(name: str) -> None:
    """Ours, and the CSV of torch, with and without messages."""
    schedule = find(name)
    for ranks, count in ((1, 2), (3, 7)):
        actions = schedule.of_ranks(ranks, count)
        lists = with_messages(actions, chain(ranks * schedule.chunks))
        assert read_schedule(write_schedule(lists)) == lists
        if ranks * schedule.chunks > 1:  # a single chunk has no number here, and has one there
            assert from_csv(to_csv(lists)) == lists
            assert from_csv(to_csv(actions)) == actions


@cache
def cut_in_two() -> tuple[tuple[Action, ...], ...]:
    """Two ranks, two micro-batches, the last rank's backward cut."""
    return (
        (together(forward(1, 0)), together(forward(2, 0)), together(backward(1, 0)),
         together(backward(2, 0))),
        (together(forward(1, 1)), together(input_gradient(1, 1)), together(forward(2, 1)),
         together(weight_gradient(1, 1)), together(input_gradient(2, 1)),
         together(weight_gradient(2, 1))),
    )  # fmt: skip


def test_the_grid_of_a_schedule() -> None:
    """A column for each unit of time; what is wrong stands in brackets."""
    assert as_grid(cut_in_two()) == (
        "rank 0  F0.1 F0.2 .    B0.1 .    .    B0.2\nrank 1  .    F1.1 I1.1 F1.2 W1.1 I1.2 W1.2\n"
    )
    front, back = cut_in_two()
    wrong = (front[0], front[2], front[1], front[3]), (back[0], back[2], back[1], *back[3:])
    with pytest.raises(ScheduleError, match="would never end: rank 0 cannot run") as caught:
        check_ranks(wrong, micro_batches=2, chunks=2, name="wrong")
    assert "rank 1 cannot run the forward of micro-batch 2" in caught.value.message
    assert as_grid(wrong, marked=caught.value.places) == (
        "rank 0  F0.1   [B0.1] F0.2   B0.2\nrank 1  F1.1   [F1.2] I1.1   W1.1   I1.2   W1.2\n"
    )


def _changed(rank: int, index: int, *actions: Action) -> tuple[tuple[Action, ...], ...]:
    lists = [list(each) for each in cut_in_two()]
    lists[rank][index : index + 1] = actions
    return tuple(tuple(each) for each in lists)


WRONG = {
    "runs chunk 1, which rank 0 has": _changed(
        0, 0, together(forward(1, 1)), together(forward(1, 0))
    ),
    "before the gradients of weights in the backward of micro-batch 1": (
        cut_in_two()[0], (*cut_in_two()[1][:3], *cut_in_two()[1][4:], cut_in_two()[1][3]),
    ),
    "that it also runs in another way": _changed(1, 1, together(backward(1, 1))),
    "never runs the gradients of weights in the backward of micro-batch 2": _changed(1, 5),
    "is not one of 2 chunks": _changed(0, 0, together(forward(1, 2))),
}  # fmt: skip


@pytest.mark.parametrize(("message", "ranks"), WRONG.items())
def test_a_pipeline_that_cannot_run_is_refused(
    message: str, ranks: Sequence[Sequence[Action]]
) -> None:
    """The pass and the places are named."""
    with pytest.raises(ScheduleError) as caught:
        check_ranks(ranks, micro_batches=2, chunks=2, name="wrong")
    assert message in caught.value.message


@given(ranks=st.integers(1, 4), count=st.integers(1, 8), data=st.data())
def test_any_chunk_may_read_any_earlier_one(ranks: int, count: int, data: st.DataObject) -> None:
    """Skips over chunks, in all schedules, beside the chain and without it."""
    name = data.draw(st.sampled_from(PIPELINES))
    schedule = find(name)
    total = ranks * schedule.chunks
    every = [(a, b) for b in range(total) for a in range(b)]
    edges = data.draw(st.sets(st.sampled_from(every))) if every else set()
    actions = schedule.of_ranks(ranks, count, edges=edges)
    check_messages(with_messages(actions, edges), edges=edges, name=name)
    costs = PipelineCosts(
        chunks=[ChunkCosts(forward_ns=2, input_ns=3, weight_ns=1)] * total,
        messages_ns=dict.fromkeys(edges, 5),
        edges=tuple(edges),
    )
    found = simulate_pipeline(actions, costs)
    assert found.step_ns >= max(6 * count * schedule.chunks, 0)
    assert 0 <= found.bubble_fraction < 1


def test_what_is_asked_wrongly() -> None:
    """Numbers, options, edges and texts."""
    for name, arguments, message in (
        ("gpipe", {"ranks": 0}, "ranks = 0"),
        ("one_f_one_b", {"chunks": 2}, "one_f_one_b runs one chunk on each rank, not 2"),
        ("interleaved", {"chunks": 1}, "at least two chunks on each rank, not 1"),
        ("two_strand", {}, "two_strand runs one stage, not 2"),
        ("folded", {"options": {"depth": 3}}, "'folded' has no option 'depth'"),
        ("eager_folded", {"options": {"depth": 4}}, "2 ranks cannot run 4 steps ahead"),
        ("gpipe", {"edges": [(1, 0)]}, "chunk 0 of 2 cannot read chunk 1"),
    ):
        with pytest.raises(InputError) as caught:
            find(name).of_ranks(**({"ranks": 2, "micro_batches": 4} | arguments))  # type: ignore[arg-type]
        assert message in caught.value.message
        assert caught.value.hint
    for text, message in (
        ("rank 1: forward 1", "line 1: 'rank 1: forward 1' is not the line of rank 0"),
        ("split_at: a.1\nrank 1: forward 1", "line 2: 'rank 1: forward 1' is not the line of"),
        ("rank 0: forward_0 1\nsplit_at: a.1", "'split_at: a.1' is not the line of rank 1"),
        ("rank 0: forwards 1", "'forwards' is not the name of a strand"),
        ("rank 0: forward one", "'forward one' is neither an action nor a message"),
    ):
        with pytest.raises(InputError, match=message):
            read_schedule(text)
    with pytest.raises(InputError, match="line 2: '0X1' is no action"):
        from_csv("0F0\n0X1\n")
    with pytest.raises(InputError, match="chunk 1, which no rank runs"):
        from_csv("0F0,0SEND_F0\n")


def test_names_of_other_places() -> None:
    """Torch's class names and the papers' mean the same files."""
    asked = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
    assert [find(name).name for name in asked] == [
        "one_f_one_b", "interleaved", "zb_v", "dual_pipe_v",
    ]  # fmt: skip


@given(
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
    early=st.integers(0, 3),
    name=st.sampled_from(["one_f_one_b", "zb_v", "folded", "interleaved"]),
)
def test_early_receives_keep_their_order(
    ranks: int, micro_batches: int, early: int, name: str
) -> None:
    """Nothing is lost, receives and all else keep their orders, and none goes further ahead."""
    schedule = find(name)
    actions = schedule.of_ranks(ranks, micro_batches)
    edges = chain(ranks * schedule.chunks)
    for items in with_messages(actions, edges):
        found = with_early_receives(items, early)
        for keep in (True, False):
            assert [i for i in found if isinstance(i, Receive) == keep] == [
                i for i in items if isinstance(i, Receive) == keep
            ]
        for item in items:
            if isinstance(item, Receive):
                before, now = (_actions_before(each, item) for each in (items, found))
                assert max(0, before - early) <= now <= before


def _actions_before(items: Sequence[Item], item: Item) -> int:
    return sum(isinstance(each, Action) for each in items[: items.index(item)])
