"""Local ranks: they start as torchrun would start them, and none outlives the run.

Proves, with real processes, the exit code and the message for each way a rank can end, that
signals reach all ranks, and that a rank which ignores signals or is paused is killed in seconds.
"""

import os
import signal
import sys
import time

import pytest

from interlace.errors import RunError
from interlace.ranks.launch import _failure, assign_cores, launch

pytestmark = pytest.mark.alone

FOREVER = "sleep 600"
PAUSE = f"signal {int(signal.SIGSTOP)}"
KILL = f"signal {int(signal.SIGKILL)}"


def test_ranks_get_the_resolved_run_file_and_a_core_each(start_job):
    """Every rank sees the world size and the overrides, and rank 0 shares no core with rank 1."""
    job = start_job("demo", "--train.steps", "7")
    facts = job.facts()
    assert job.end() == (0, "")
    assert [(world, steps) for _, world, steps, *_ in facts] == [("2", "7")] * 2
    if sys.platform == "linux" and len(os.sched_getaffinity(0)) >= len(facts):
        cores = [each[3] for each in facts]
        assert len(set(cores)) == len(cores)
    assert not list(job.folder.glob("interlace-*")), "the resolved run file was left behind"


@pytest.mark.parametrize(
    ("orders", "exit_code", "message"),
    [
        ({"FAKE_RANK_1": "exit 1"}, 1, "error: rank 1 exited with code 1\n"),
        ({"FAKE_RANK_0": "exit 2"}, 2, "error: rank 0 exited with code 2\n"),
        ({"FAKE_RANK_1": KILL}, 1, "error: rank 1 was ended by SIGKILL\n"),
        ({"FAKE_RANK_0": "raise"}, 1, "error: rank 0: RuntimeError: broken on purpose\n"),
    ],
)
def test_a_failed_rank_is_named_and_ends_the_others(start_job, orders, exit_code, message):
    """The last lines name the first rank that failed; a healthy peer is ended; no torch log."""
    other = "FAKE_RANK_1" if "FAKE_RANK_0" in orders else "FAKE_RANK_0"
    job = start_job("demo", **{other: FOREVER}, **orders)
    code, errors = job.end()
    assert code == exit_code
    assert message in errors
    assert errors.splitlines()[-2].startswith("error: rank ")
    assert "closing signal" not in errors
    assert "Traceback" not in errors
    assert job.left_over() == []


def test_verbose_shows_tracebacks_of_ranks(start_job):
    """-v is handed to the ranks, and shows where theirs and the launcher's error came from."""
    job = start_job("demo", "-v", FAKE_RANK_0="raise")
    code, errors = job.end()
    assert code == 1
    assert 'raise RuntimeError("broken on purpose")' in errors
    assert "in launch" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_paused_rank_is_named_and_killed(start_job):
    """Rank 1 is stopped by SIGSTOP; when rank 0 gives up, the message names rank 1."""
    job = start_job("demo", FAKE_RANK_1=PAUSE, FAKE_RANK_0="sleep 1; exit 1")
    code, errors = job.end()
    assert code == 1
    assert "error: rank 1 was paused (SIGSTOP), and rank 0 exited with code 1\n" in errors
    assert job.left_over() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_paused_from_the_start_is_noticed(start_job):
    """No rank has joined or ends, so that only the launcher can see it."""
    soon = ("--watchdog.heartbeat_s", "0.1", "--watchdog.dead_after_s", "0.3")
    job = start_job("demo", *soon, FAKE_RANK_0=FOREVER, FAKE_RANK_1=PAUSE)
    code, errors = job.end()
    assert code == 1
    assert "error: rank 1 was paused (SIGSTOP) for 0." in errors
    assert job.left_over() == []


def test_a_rank_that_exits_with_0_before_it_joins_is_named():
    """The other one has reached the store, and would wait for it."""
    program = (
        "import os\n"
        "if os.environ['RANK'] == '0':\n"
        "    from interlace.ranks.attempt import meet\n"
        "    meet(600)\n"
    )
    with pytest.raises(RunError, match="rank 1 exited with code 0 before it joined the run"):
        launch([sys.executable, "-c", program], ranks=2)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
@pytest.mark.parametrize("rank_1", [FOREVER, PAUSE], ids=["busy", "paused"])
def test_a_signal_ends_every_rank(start_job, number, exit_code, rank_1):
    """Ctrl-C and SIGTERM to the command end all ranks, a paused one too."""
    job = start_job("demo", FAKE_RANK_0=FOREVER, FAKE_RANK_1=rank_1)
    assert len(job.pids()) == 2
    job.process.send_signal(number)
    code, errors = job.end()
    assert code == exit_code
    assert f"error: stopped by {number.name}; all ranks have ended\n" in errors
    assert job.left_over() == []
    assert not list(job.folder.glob("interlace-*"))


def test_a_second_ctrl_c_is_not_an_error(start_job):
    """Impatient users press it twice; the exit code and the message stay the same."""
    job = start_job("demo", FAKE_IGNORES_SIGNALS="1", FAKE_RANK_0=FOREVER, FAKE_RANK_1=FOREVER)
    assert len(job.pids()) == 2
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.process.send_signal(signal.SIGINT)
    code, errors = job.end()
    assert (code, errors) == (130, "error: stopped by SIGINT; all ranks have ended\n")
    assert job.left_over() == []


def test_ranks_that_ignore_signals_are_killed_within_seconds(start_job):
    """A rank blocked in a collective cannot answer SIGTERM; torch alone would wait 30 s."""
    job = start_job("demo", FAKE_IGNORES_SIGNALS="1", FAKE_RANK_0=FOREVER, FAKE_RANK_1="exit 1")
    pids = job.pids()
    start = time.monotonic()
    code, errors = job.end()
    assert len(pids) == 2
    assert code == 1
    assert "error: rank 1 exited with code 1\n" in errors
    assert job.left_over() == []
    assert time.monotonic() - start < 25


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signal")
def test_ranks_end_when_the_launcher_is_killed(start_job):
    """kill -9 of `interlace train` leaves no rank behind."""
    job = start_job("demo", FAKE_RANK_0=FOREVER, FAKE_RANK_1=FOREVER)
    assert len(job.pids()) == 2
    job.process.kill()
    job.process.wait(timeout=10)
    assert job.left_over() == []


def test_ranks_meet_at_the_launchers_store():
    """torch.distributed's env:// works: two gloo ranks reduce, and disagree loudly if they fail."""
    program = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(value)\n"
        "dist.destroy_process_group()\n"
        "raise SystemExit(0 if value.item() == 3 else 7)\n"
    )
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    launch([sys.executable, "-c", program], ranks=2)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def test_a_command_that_cannot_be_run_is_an_error():
    """Failing to start a process at all is reported, not swallowed."""
    with pytest.raises(OSError, match="no-such-program"):
        launch(["/no-such-program"], ranks=1)


def test_of_ranks_found_ended_together_the_signalled_one_is_named():
    """Peers of a killed rank exit with a code at once; the killed one is at fault."""
    assert _failure({0: 1, 1: -9, 2: None}, []).message == "rank 1 was ended by SIGKILL"
    assert _failure({0: None, 1: 3, 2: 0}, []).message == "rank 1 exited with code 3"
    assert _failure({0: -63}, []).message == "rank 0 was ended by signal 63"


def test_cores_are_disjoint_or_not_assigned():
    """Each rank gets its own cores, in order; with too few cores nobody is pinned."""
    assert assign_cores([2, 3, 5, 7], ranks=2, cores_per_rank=2) == {0: [2, 3], 1: [5, 7]}
    assert assign_cores([0, 1, 2], ranks=2, cores_per_rank=1) == {0: [0], 1: [1]}
    assert assign_cores([0, 1], ranks=3, cores_per_rank=1) == {}
