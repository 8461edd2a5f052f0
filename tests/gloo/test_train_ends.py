"""Proves that a training run ends, cleanly and on all ranks, whatever is done to it.

Wide are a killed rank 1 and a paused rank 0, beside a killed rank 0 and a paused rank 1.
"""

import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from training import Command, Workplace, send

from wide import WIDE

pytestmark = pytest.mark.alone

BOUND_S = 5
ENDLESS = (
    "--train.steps", "100000", "--output.record_every", "0", "--model.layers", "1",
    "--plan.cluster", "h100", "--plan.search", "list",
)  # fmt: skip
"""Nothing is measured before the first step: how a run ends does not depend on its plan."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("ends"))


@pytest.fixture
def job(place: Workplace, request: pytest.FixtureRequest) -> Iterator[Command]:
    """An endless training run of two ranks, in the middle of its steps."""
    out = f"out-{request.node.name}"
    command = place.start("train", "run.toml", *ENDLESS, "--output.directory", out)
    with command.running():
        command.wait_for("step     3/")
        yield command


def assert_ended(job: Command, since: float, code: int) -> str:
    """All processes are gone within the bound; what the command said."""
    ended, said = job.end()
    seconds = time.monotonic() - since
    assert ended == code, said
    assert seconds < BOUND_S, said
    assert job.left() == []
    return said


def test_ctrl_c_ends_all_ranks(job: Command, place: Workplace) -> None:
    """As a terminal does it: SIGINT to the launcher; exit 130, and the metrics say why."""
    since = send(psutil.Process(job.process.pid), signal.SIGINT)
    said = assert_ended(job, since, 130)
    assert "stopped by SIGINT after step" in said
    (end,) = place.events("out-test_ctrl_c_ends_all_ranks", "end")
    assert "SIGINT" in end["reason"]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        pytest.param(0, signal.SIGKILL, id="0-killed"),
        pytest.param(1, signal.SIGSTOP, id="1-paused"),
        pytest.param(0, signal.SIGSTOP, marks=WIDE, id="0-paused"),
        pytest.param(1, signal.SIGKILL, marks=WIDE, id="1-killed"),
    ],
)
def test_a_lost_rank_ends_the_job_and_is_named(
    job: Command, rank: int, number: signal.Signals
) -> None:
    """A rank killed or paused in mid-step: exit 1 within 5 seconds, and no process is left."""
    since = send(job.rank(rank), number)
    said = assert_ended(job, since, 1)
    first_error = said[said.index("error: ") :].splitlines()[0]
    assert f"rank {rank}" in first_error
    assert "Traceback" not in said
