"""Bounds and simulated gains are those that paper gives for small steps, and "do not" is said."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_traces import TraceMaker, Work, blocking, recorded_step

from interlace.__main__ import main
from interlace.errors import InputError
from interlace.explain.advice import advise
from interlace.explain.explain_text import as_text
from interlace.explain.explanation import Explanation, explain
from interlace.explain.exposure import Exposure
from interlace.explain.gain import BOTH, DECOMPOSITION, TWO_STRANDS, gains
from interlace.explain.kineto_trace import rank_trace
from interlace.explain.step_choice import StepChoice
from interlace.explain.waiting import Ranks
from interlace.ir import store

MS = 1_000_000
FORWARD: list[Work] = [("AllGather", 10), ("gemm", 20)]
BACKWARD: list[Work] = [("AllGather", 10), ("gemm", 40), ("ReduceScatter", 10)]
LARGEST_DIFFERENCE_MS = 0.2
"""Three optimizers' kernels of 0.01 ms each, and rounding."""


def explained(maker: TraceMaker, folder: Path, **options: int) -> Explanation:
    return explain([maker.write(folder / f"rank{maker.rank}.json")], **options)


def milliseconds(found: Explanation) -> dict[str, tuple[float, float]]:
    """By way: (at most, simulated)."""
    assert found.gains is not None
    return {
        gain.way: (gain.at_most_ns / MS, (gain.simulated_ns or 0) / MS) for gain in found.gains.ways
    }


def test_a_step_that_can_be_reckoned_by_hand(tmp_path: Path) -> None:
    """Four micro-batches of 90 ms, 30 of them exposed.

    Two strands: the gather of the backward is exposed (10), then the gather of the forward runs
    under its matmul and its scatter under the matmul of the forward, 70 instead of 90 ms, three
    times. Decomposition on two ranks hides each gather under half of its matmul, 20 ms of a
    micro-batch. With both nothing is exposed in pairs (60 instead of 90), and at the ends the
    scatter alone is.
    """
    found = explained(blocking(4, FORWARD, BACKWARD), tmp_path)
    assert found.gains is not None
    assert found.gains.traced_micro_batches == found.gains.micro_batches == 4
    assert found.gains.step_ns == pytest.approx(360 * MS, abs=0.1 * MS)
    assert found.gains.exposed_ns == pytest.approx(120 * MS, abs=0.1 * MS)
    assert found.gains.replayed_over_measured == pytest.approx(1, abs=1e-3)
    for way, expected in {
        TWO_STRANDS: (90, 60),
        DECOMPOSITION: (80, 80),
        BOTH: (120, 110),
    }.items():
        assert milliseconds(found)[way] == pytest.approx(expected, abs=LARGEST_DIFFERENCE_MS)
    keys = [setting.key for setting in found.advice.settings]
    assert keys[:2] == ['overlap.decompose = "auto"', 'strands = "2"']
    assert len(keys) == 3
    assert "takes 250 ms instead of 360 ms, 1.44 times as fast" in found.advice.sentence


def test_another_number_of_micro_batches(tmp_path: Path) -> None:
    """One traced micro-batch is taken as one of four, or of as many as asked for; with one alone
    no strand has a partner."""
    one = blocking(1, FORWARD, BACKWARD)
    assert milliseconds(explained(one, tmp_path))[TWO_STRANDS] == pytest.approx(
        (90, 60), abs=LARGEST_DIFFERENCE_MS
    )
    twelve = explained(one, tmp_path, micro_batches=12)
    assert milliseconds(twelve)[TWO_STRANDS] == pytest.approx((330, 220), abs=LARGEST_DIFFERENCE_MS)
    keys = [setting.key for setting in twelve.advice.settings]
    assert "train.micro_batches = 12" in keys
    alone = explained(one, tmp_path, micro_batches=1)
    assert milliseconds(alone)[TWO_STRANDS] == (0, 0)
    assert milliseconds(alone)[DECOMPOSITION] == pytest.approx((20, 20), abs=0.1)
    with pytest.raises(InputError, match="-1 micro-batches"):
        explained(one, tmp_path, micro_batches=-1)


def test_what_cannot_be_decomposed(tmp_path: Path) -> None:
    """Gathers of sharded weights, groups of unknown size, collectives without a matmul beside
    them."""
    weights = blocking(2, FORWARD, BACKWARD, group="fsdp")
    unknown = blocking(2, FORWARD, BACKWARD, group_size=0, group="odd")
    others = blocking(2, [("AllReduce", 10), ("gemm", 20)], [("gemm", 40), ("AllReduce", 10)])
    for maker in (weights, unknown, others):
        assert milliseconds(explained(maker, tmp_path))[DECOMPOSITION] == (0, 0)


@pytest.mark.parametrize(
    ("forward", "backward", "why"),
    [
        ([("gemm", 20)], [("gemm", 40)], "there is no communication"),
        ([("AllReduce", 0.1), ("gemm", 20)], [("gemm", 40)], "less than 2.0 % is not worth"),
        ([("AllReduce", 50)], [("AllReduce", 50), ("gemm", 0.5)], "is not worth a change"),
    ],
)
def test_do_not(forward: list[Work], backward: list[Work], why: str, tmp_path: Path) -> None:
    """Nothing to hide, too little of it, or nothing to hide it under."""
    found = explained(blocking(4, forward, backward), tmp_path)
    assert not found.advice.worth
    assert found.advice.settings == ()
    assert found.advice.sentence.startswith("Do not")
    assert why in found.advice.sentence


def test_waiting_is_told_from_transfer(tmp_path: Path) -> None:
    """Rank 1 computes 1.5 times as long; rank 0 waits for it in the collective after."""
    fast = blocking(4, [("gemm", 20), ("AllReduce", 14)], [("gemm", 40), ("AllReduce", 24)])
    slow = blocking(
        4, [("gemm", 20), ("AllReduce", 4)], [("gemm", 40), ("AllReduce", 4)], rank=1, slow=1.5
    )
    files = [maker.write(tmp_path / f"rank{maker.rank}.json") for maker in (slow, fast)]
    found = explain(files)
    waiting = [row.waiting_ns for row in found.ranks.rows]
    assert waiting == [4 * 30 * MS, 0]
    assert [row.straggler for row in found.ranks.rows] == [False, True]
    assert found.rank == 1
    assert found.ranks.matched == 8
    assert found.ranks.waiting_share == pytest.approx(120 / (152 + 32))
    assert any("Rank 1 computes" in note for note in found.advice.notes)
    assert any("65.2 % of the communication is waiting" in note for note in found.advice.notes)
    assert "1 straggler" in as_text(found)
    assert found.advice.worth  # rank 1 sets the pace, and 8 ms of each 98 ms are its own


def test_ranks_that_wait_for_each_other_in_turn(tmp_path: Path) -> None:
    """The forward is slow on one rank and the backward on the other."""
    first = blocking(4, [("gemm", 20), ("AllReduce", 24)], [("gemm", 40), ("AllReduce", 4)])
    second = blocking(
        4, [("gemm", 40), ("AllReduce", 4)], [("gemm", 20), ("AllReduce", 24)], rank=1
    )
    found = explain([each.write(tmp_path / f"rank{each.rank}.json") for each in (first, second)])
    assert [row.waiting_ns for row in found.ranks.rows] == [4 * 20 * MS, 4 * 20 * MS]
    assert not any(row.straggler for row in found.ranks.rows)
    assert not found.advice.worth
    assert "71.4 % of the communication of rank 0" in found.advice.sentence
    assert "Deal the work out evenly first" in found.advice.sentence


@given(
    st.lists(
        st.tuples(st.sampled_from(["gemm", "gemm", "AllGather", "ReduceScatter", "AllReduce"]),
                  st.integers(1, 30)),
        min_size=1, max_size=7,
    ),
    st.lists(
        st.tuples(st.sampled_from(["gemm", "gemm", "AllGather", "ReduceScatter", "AllReduce"]),
                  st.integers(1, 30)),
        min_size=1, max_size=7,
    ),
    st.integers(1, 4), st.sampled_from([2, 4, 16]),
)  # fmt: skip
@settings(max_examples=60)
def test_no_simulation_beats_its_bound(
    tmp_path_factory: pytest.TempPathFactory,
    forward: list[Work],
    backward: list[Work],
    micro_batches: int,
    ranks: int,
) -> None:
    """On any step without overlap: gains lie between nothing and the bound, the bound keeps
    compute and every byte, both is no worse than either, and replaying gives the trace."""
    work = [*forward, ("gemm", 5)], [("gemm", 5), *backward]
    maker = blocking(micro_batches, *work, group_size=ranks)
    path = maker.write(tmp_path_factory.mktemp("g") / "trace.json")
    found = gains(rank_trace(path, StepChoice()))
    assert found.replayed_over_measured == pytest.approx(1, abs=0.01)
    compute = (
        sum(ms for works in work for name, ms in works if name == "gemm") * found.micro_batches
    )
    for gain in found.ways:
        assert gain.simulated_ns is not None
        assert 0 <= gain.simulated_ns <= gain.at_most_ns <= found.exposed_ns
        assert found.step_ns - gain.at_most_ns >= compute * MS
    for way in (TWO_STRANDS, DECOMPOSITION):
        assert (found.of(BOTH).simulated_ns or 0) >= (found.of(way).simulated_ns or 0) - MS // 100


def test_without_marks_of_autograd_there_are_bounds_alone(tmp_path: Path) -> None:
    maker = blocking(2, FORWARD, BACKWARD)
    maker.events = [event for event in maker.events if event["cat"] != "cpu_op"]
    found = explained(maker, tmp_path)
    assert found.gains is not None
    assert all(gain.simulated_ns is None for gain in found.gains.ways)
    assert found.gains.of(TWO_STRANDS).at_most_ns == pytest.approx(60 * MS, abs=0.1 * MS)
    assert "at most 33.3 % of the step" in found.advice.sentence
    assert "Not simulated: the trace does not say what is backward" in as_text(found)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON of a trace and of a run, the run as Kineto traces, and wrong requests."""
    trace = blocking(4, FORWARD, BACKWARD).write(tmp_path / "rank0.json.gz")
    assert main(["explain", str(trace)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Try it: by simulation a step of 4 micro-batches takes 250 ms")
    assert "all_gather      tp         2       8" in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["explain", str(tmp_path), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["figures"]["hidden_fraction"] == 0
    assert table["gains"]["ways"][0]["way"] == "two_strands"

    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text("[parallel]\ntensor = 2\n")
    for mode in ("1", "2"):
        store.save(recorded_step(mode), run / "timelines" / f"{mode}-rank0.json")
    assert main(["explain", str(run), "--kineto", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "recorded step, mode 1" in text
    assert "two strands" in text.split("also recorded")[1]
    assert text.rstrip().endswith(str(tmp_path / "out" / "2" / "rank-0.json.gz"))
    assert main(["explain", str(run), "--mode", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["hidden_fraction"] == 0.5
    for two_ms, answer in (([80, 99, 81], "Keep two strands: "), ([98, 99, 120], "Do not: ")):
        modes = {"1": {"step_ms": [100.0, 100.0]}, "2": {"step_ms": two_ms}}
        (run / "comparison.json").write_text(json.dumps({"modes": modes}))
        assert main(["explain", str(run)]) == 0
        assert capsys.readouterr().out.startswith(f"{answer}this run timed steps of")
    (run / "comparison.json").write_text("{}")
    assert main(["explain", str(run)]) == 2
    assert "comparison.json: KeyError('modes')" in capsys.readouterr().err
    (run / "comparison.json").unlink()

    for words, message in [
        (["explain"], "nothing to explain"),
        (["explain", str(run), "--mode", "eager"], "no recorded step of mode 'eager'"),
        (["explain", str(trace), "--mode", "2"], "traces have none"),
        (["explain", str(run), "--steps", "3"], "records one step"),
        (["explain", str(trace), "--kineto", str(tmp_path)], "--kineto writes the recorded steps"),
        (["explain", str(tmp_path / "nowhere")], "there is no file or folder"),
    ]:
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_device_that_waits_for_its_host() -> None:
    """On an H200 a small Llama kept the device busy for 9 % of a step."""
    idle = Exposure(device_ns=100, compute_ns=9, communication_ns=0, hidden_ns=0)
    advice = advise(idle, None, Ranks((), 0, ""), {})
    assert not advice.worth
    (note,) = advice.notes
    assert "nothing to do in 91.0 % of the step" in note
    assert "train.cuda_graph" in note
    busy = Exposure(device_ns=100, compute_ns=91, communication_ns=0, hidden_ns=0)
    assert advise(busy, None, Ranks((), 0, ""), {}).notes == ()
