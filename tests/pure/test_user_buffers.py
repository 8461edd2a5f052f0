"""What is different where tensor ranks overlap as TransformerEngine's and Megatron's do."""

import pytest

from interlace.bench.simulator_jobs import layout_of_job
from interlace.hardware.cluster import load_cluster
from interlace.hardware.expert_job import ExpertJob
from interlace.hardware.step_job import StepJob
from interlace.ir.actions import Direction, Share
from interlace.ir.graph import Kind
from interlace.strategy.job_links import EXPERT, TENSOR, JobLinks
from interlace.strategy.layer_operators import LayerOperators
from interlace.strategy.timed_graph import TimedGraph

DENSE = {
    "layers": 2, "hidden": 8192, "heads": 64, "ffn": 28672, "vocab": 32000, "sequence": 4096,
    "micro_batch": 1, "micro_batches": 4, "tensor": 8, "data": 8, "gated": True, "sharding": 1,
}  # fmt: skip


def _operators(job: StepJob, *, user_buffers: bool) -> LayerOperators:
    links = JobLinks(load_cluster("h100"), layout_of_job(job, decompose=True))
    return LayerOperators(
        job, links, float("inf"), gathers_again=user_buffers, user_buffers=user_buffers
    )


def _pass(operators: LayerOperators, direction: Direction) -> TimedGraph:
    return operators.pass_graph(direction, Share.WHOLE, 1, head=False)


@pytest.mark.parametrize("user_buffers", [False, True])
def test_slices_fill_up_their_waves(user_buffers: bool) -> None:
    """512 rows leave more multiprocessors idle than 4,096, but on several streams."""
    operators = _operators(StepJob(**DENSE), user_buffers=user_buffers)
    cut = operators.tensor.cuts["up"]
    slices = cut.slices * cut.compute_s
    whole = operators.seconds["up"]
    assert slices == pytest.approx(whole) if user_buffers else slices > 1.05 * whole


def test_sums_of_a_backward_stay_whole() -> None:
    """They run beside the matmuls for gradients of weights, and what was gathered is gathered
    again beside those for gradients of inputs."""
    ours, theirs = (
        _pass(_operators(StepJob(**DENSE), user_buffers=each), Direction.BACKWARD)
        for each in (False, True)
    )

    def kinds(graph: TimedGraph) -> list[Kind]:
        return [o.kind for o in graph.operators if o.lane == TENSOR]

    assert set(kinds(ours)) == {Kind.SEND}
    assert kinds(theirs).count(Kind.REDUCE_SCATTER) == 2
    assert kinds(theirs).count(Kind.ALL_GATHER) == 2
    assert kinds(theirs).count(Kind.SEND) == 2 * 7  # of the two gathers in front of matmuls
    joined = [
        [o.id for o in graph.operators if o.id.endswith("joined")] for graph in (ours, theirs)
    ]
    assert joined[0]
    assert not joined[1]


def test_rows_are_sent_once() -> None:
    """A part of each row by each of four tensor ranks, gathered where its expert is: nothing is
    gathered in front of the router."""
    experts = {"count": 8, "chosen": 2, "ffn": 16384, "ranks": 8}
    ours, theirs = (
        _operators(
            StepJob(**DENSE | {"tensor": 4, "experts": ExpertJob(**experts, sent_once=once)}),
            user_buffers=True,
        )
        for once in (False, True)
    )
    assert ours.experts is not None
    assert theirs.experts is not None
    size = ours.experts.rows_bytes
    assert theirs.experts.rows_bytes == size
    part = theirs.links.seconds(EXPERT, Kind.ALL_TO_ALL, size / 4)
    gathered = theirs.links.seconds(TENSOR, Kind.ALL_GATHER, size)
    assert theirs.experts.rows_s == pytest.approx(part + gathered)
    assert theirs.experts.rows_s < 0.5 * ours.experts.rows_s
    graphs = [_pass(each, Direction.FORWARD) for each in (ours, theirs)]
    names = [{o.id for o in graph.operators if "ffn" in o.id} for graph in graphs]
    assert names[0] - names[1] == {"gather ffn 0", "sum ffn 0"}
