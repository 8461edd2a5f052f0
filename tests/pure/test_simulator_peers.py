"""Recorded figures of other simulators stand beside ours, on the same rows."""

import pytest

from interlace.bench.simulator_peers import PeerScore, peer_rows, peer_scores, peer_steps
from interlace.bench.simulator_rows import measured_rows
from interlace.bench.simulator_scores import score_source


def _scores() -> dict[tuple[str, str], PeerScore]:
    found = [each for rows in measured_rows().values() for each in peer_scores(rows)]
    return {(each.source, each.peer.split()[0]): each for each in found}


def test_peers_are_joined_to_their_rows() -> None:
    """SimuMax publishes its own times of its rows: the first of 4 micro-batches is 828.76 ms."""
    (row,) = [
        step
        for step in measured_rows()["SimuMax, B200-SXM"].steps
        if (step.job.layers, step.job.pipeline, step.job.micro_batches) == (12, 2, 4)
    ]
    said = peer_steps()["simumax"][row.table, row.row]
    assert said.seconds == pytest.approx(0.82876, abs=1e-5)
    assert row.seconds == pytest.approx(0.843)
    assert said.memory_gib == pytest.approx(66.44)
    assert row.memory_gib == pytest.approx(66.55)


def test_peers_come_out_as_documented() -> None:
    """By source and peer: rows, the peer's mean error, and ours on the same rows."""
    scores = _scores()
    vtrain = scores["vTrain, A100-SXM", "Calculon"]
    assert vtrain.theirs.rows == vtrain.ours.rows == 109
    assert vtrain.theirs.error == pytest.approx(0.196, abs=0.001)
    bloom = scores["BigScience BLOOM, A100-80G-SXM", "SimuMax"]
    assert (bloom.theirs.rows, bloom.ours.rows) == (92, 92)
    assert bloom.theirs.rank_correlation == pytest.approx(0.39, abs=0.01)
    b200 = scores["SimuMax, B200-SXM", "SimuMax"]
    assert b200.theirs.error < b200.ours.error
    rows = {(row.case, row.metric): row for row in peer_rows([vtrain])}
    row = rows["vTrain, A100-SXM: Calculon caa4b11", "mean_error"]
    assert row.ratio == pytest.approx(vtrain.theirs.error / vtrain.ours.error)


def test_ours_on_all_rows_is_the_score_of_the_source() -> None:
    """Two ways to the same number."""
    rows = measured_rows()["Sailor, GH200-96G"]
    whole = score_source(rows)
    (peer,) = peer_scores(rows)
    assert whole is not None
    assert peer.ours.error == pytest.approx(whole.before)
    assert peer.ours.memory_error == pytest.approx(whole.memory_error)
