"""Schedules judged by torch.distributed.pipelining: its validator, its simulation of messages, its
count of live activations, and its own orders where it has the same schedule. No process group is
needed."""

import csv
import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

from interlace.schedules.finder import find, names
from interlace.schedules.torch_csv import from_csv, to_csv
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import simulate_pipeline

PIPELINES = [name for name in names() if name != "two_strand"]


def order_of(name: str, ranks: int, count: int) -> dict[int, list[Any]]:
    """One of ours, as torch's actions, by way of the CSV text."""
    rows = csv.reader(io.StringIO(to_csv(find(name).of_ranks(ranks, count))))
    return {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", PIPELINES)
def test_torch_takes_every_schedule(name: str) -> None:
    """Its validator finds each pass in a valid order and the stages where ours are; its own sends
    and receives, added to our order, meet; what it writes reads back."""
    for ranks, count in ((1, 3), (2, 2), (2, 7), (3, 6), (4, 4), (4, 12), (8, 17)):
        order = order_of(name, ranks, count)
        stages = ranks * find(name).chunks
        rank_of = theirs._validate_schedule(order, ranks, stages, count)
        whole = {rank: list(actions) for rank, actions in order.items()}
        lowered = theirs._add_send_recv(whole, rank_of.__getitem__, stages)
        text = "\n".join(",".join(map(str, lowered[rank])) for rank in range(ranks))
        found = from_csv(text)
        assert to_csv(found).splitlines() == text.splitlines()
        # Its simulation knows no action of several passes: these run one after the other there.
        single = {rank: _single(actions) for rank, actions in order.items()}
        lowered = theirs._add_send_recv(single, rank_of.__getitem__, stages)
        theirs._simulate_comms_compute(lowered, rank_of.__getitem__, stages)


LIVENESS = getattr(theirs, "analyze_pipeline_activation_liveness", None)
"""Slots for what forwards keep for their backwards; public in torch from 2.14 on."""


@pytest.mark.parametrize("name", PIPELINES)
def test_as_many_forwards_are_kept_as_torch_counts(name: str) -> None:
    """A forward's values live from its action to that of its backward, or of the gradient of its
    weights, both included; an action of several passes is one position. The most of a rank at a
    time are those of the simulator: by that definition, and by torch's own function where it has
    it."""
    for ranks, count in ((1, 3), (2, 2), (2, 7), (3, 6), (4, 4), (4, 12), (8, 17)):
        order, chunks = order_of(name, ranks, count), ranks * find(name).chunks
        costs = PipelineCosts(chunks=[ChunkCosts(forward_ns=1, input_ns=1, weight_ns=1)] * chunks)
        kept = simulate_pipeline(find(name).of_ranks(ranks, count), costs).peak_chunks
        assert kept == tuple(_most_live(order[rank]) for rank in range(ranks)), (ranks, count)
        if LIVENESS is not None:
            assert kept == tuple(_slots(order, rank, chunks, count) for rank in range(ranks))


def _most_live(actions: list[Any]) -> int:
    """The most lives that share a position."""
    begins: dict[tuple[int, int], int] = {}
    lives = []
    for position, action in enumerate(actions):
        for each in _single([action]):
            key = each.stage_index, each.microbatch_index
            if each.computation_type == theirs.FORWARD:
                begins[key] = position
            elif each.computation_type != theirs.BACKWARD_INPUT:
                lives.append((begins[key], position))
    return max(sum(a <= at <= b for a, b in lives) for at in range(len(actions)))


def _slots(order: dict[int, list[Any]], rank: int, chunks: int, count: int) -> int:
    """What torch says of a rank."""
    own = {each.stage_index for action in order[rank] for each in _single([action])}
    schedule = theirs.PipelineScheduleMulti(
        [_stage(index, chunks, len(order), rank) for index in sorted(own)], count
    )
    schedule.pipeline_order = dict(order)
    assert LIVENESS is not None
    found = LIVENESS(
        schedule, pp_rank=rank, stage_indices=tuple(sorted(own)), granularity="stage_microbatch"
    )
    return found.num_slots


def _single(actions: list[Any]) -> list[Any]:
    return [each for action in actions for each in (action.sub_actions or (action,))]


@pytest.mark.parametrize(
    ("name", "torch_name", "chunks"),
    [
        ("eager_one_f_one_b", "Interleaved1F1B", 1),
        ("interleaved", "Interleaved1F1B", 2),
        ("interleaved", "Interleaved1F1B", 3),
        ("zb_v", "ZBVZeroBubble", 2),
        ("dual_pipe_v", "DualPipeV", 2),
    ],
)
def test_orders_are_those_of_torch(name: str, torch_name: str, chunks: int) -> None:
    """Cell by cell, for all ranks and micro-batches that its rule is for. Others it refuses, or
    runs in groups of another size; a micro-batch less than a rule needs is left out of ours."""
    logging.getLogger(theirs.__name__).setLevel(logging.ERROR)
    for ranks in range(1, 9):
        for count in range(1, 21):
            folded = torch_name in ("ZBVZeroBubble", "DualPipeV")
            if (folded and count < 2 * ranks) or (not folded and count % ranks):
                continue
            if chunks == 1 and count < ranks:
                continue
            theirs_order = _order_of_torch(torch_name, ranks, count, chunks)
            ours = find(name).of_ranks(ranks, count, chunks)
            cells = list(csv.reader(io.StringIO(to_csv(ours))))
            assert cells == theirs_order, (ranks, count)


def _order_of_torch(name: str, ranks: int, count: int, chunks: int) -> list[list[str]]:
    total = ranks * chunks
    folded = name in ("ZBVZeroBubble", "DualPipeV")
    own = [0, total - 1] if folded else range(0, total, ranks)
    stages = [_stage(index, total, ranks) for index in own]
    schedule = theirs.get_schedule_class(name)(stages, count, loss_fn=None)
    order = schedule.pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in range(ranks)]


def _stage(index: int, total: int, ranks: int, rank: int = 0) -> Any:
    """What torch's schedules ask of a stage before they run."""
    return SimpleNamespace(
        stage_index=index, num_stages=total, group_size=ranks, group_rank=rank, group=None,
        is_first=index == 0, is_last=index == total - 1, has_backward=False, device="cpu",
        submod=None, stage_index_to_group_rank={},
    )  # fmt: skip
