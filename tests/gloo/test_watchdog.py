"""Proves that no rank hangs: whatever happens to one, the others say which and end in seconds.

Real processes, real signals. The group timeout is 600 s, so that nothing but the watchdog can
end a blocked rank in time.

Wide is the other half of the pairs of fault, rank and operation; each two of them are in one of
these halves.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import RankResult, Ranks, child_environment, gloo_group, start_ranks

from interlace.config import WatchdogConfig
from interlace.errors import InputError
from interlace.ranks.watchdog import PEER_EXIT_CODE, STORE_EXIT_CODE, Watchdog
from wide import WIDE

pytestmark = pytest.mark.alone
SURVIVORS_END_WITHIN_S = 5.0
LARGE = 4_000_000  # float32 values: 16 MB


def train(operation: str, steps: int, misbehaviour: str) -> None:
    """A child: `steps` collectives under a watchdog; rank 1 may misbehave half-way."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sent, received = torch.ones(LARGE), torch.empty(LARGE)
    with gloo_group(600) as store, default_watchdog(store, rank, world_size):
        for step in range(steps):
            if operation == "all-reduce":
                dist.all_reduce(sent[:1000])
            else:
                sending = dist.isend(sent, (rank + 1) % world_size)
                receiving = dist.irecv(received, (rank - 1) % world_size)
                assert sending is not None
                assert receiving is not None
                sending.wait()
                receiving.wait()
            if step == 2:
                print("under way", flush=True)
                if rank == 1:
                    misbehave(misbehaviour)
            time.sleep(0.005)


def default_watchdog(store, rank: int, world_size: int) -> Watchdog:
    def on_exit(message: str) -> None:
        print(f"on_exit: {message}", flush=True)

    default = WatchdogConfig()
    return Watchdog(
        store,
        rank,
        world_size,
        heartbeat_s=default.heartbeat_s,
        dead_after_s=default.dead_after_s,
        on_exit=on_exit,
    )


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("the learning rate is not a number")
    if how == "exit":
        os._exit(0)
    if how == "hold the interpreter lock":
        ctypes.PyDLL(None).sleep(60)


def survivors(ranks: Ranks, culprit: int, fault_at: float) -> list[RankResult]:
    """All others, once they have ended: in time, with an error that names the culprit."""
    results = ranks.wait([r for r in range(3) if r != culprit])
    for result in results:
        after_s = result.ended_at - fault_at
        print(f"rank {result.rank}: exit {result.returncode} after {after_s:.2f} s")
        print(result.stderr)
        assert result.returncode in {1, PEER_EXIT_CODE, STORE_EXIT_CODE}
        assert after_s < SURVIVORS_END_WITHIN_S
        assert f"rank {culprit} (" in result.stderr
        assert f"pid {ranks.pid(culprit)})" in result.stderr
    return results


@pytest.mark.parametrize(
    ("fault", "culprit", "operation"),
    [
        (signal.SIGKILL, 0, "all-reduce"),
        (signal.SIGKILL, 1, "send"),
        (signal.SIGSTOP, 0, "send"),
        (signal.SIGSTOP, 1, "all-reduce"),
        pytest.param(signal.SIGKILL, 0, "send", marks=WIDE),
        pytest.param(signal.SIGKILL, 1, "all-reduce", marks=WIDE),
        pytest.param(signal.SIGSTOP, 0, "all-reduce", marks=WIDE),
        pytest.param(signal.SIGSTOP, 1, "send", marks=WIDE),
    ],
)
def test_a_rank_killed_or_paused_ends_all_others(fault: int, culprit: int, operation: str) -> None:
    """Rank 0 hosts the store: its death and its pause must be named as well."""
    with start_ranks("test_watchdog:train", 3, args=[operation, 10**9, ""]) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "under way")
        survivors(ranks, culprit, ranks.signal(culprit, fault))
        assert ranks.wait([culprit])[0].returncode == -signal.SIGKILL  # also when only paused


@pytest.mark.parametrize("misbehaviour", ["raise", "exit", "hold the interpreter lock"])
def test_a_rank_that_fails_by_itself_ends_all_others(misbehaviour: str) -> None:
    with start_ranks("test_watchdog:train", 3, args=["send", 10**9, misbehaviour]) as ranks:
        ranks.wait_for(1, "under way")
        others = survivors(ranks, 1, time.monotonic())
        culprit = ranks.wait([1])[0]
    if misbehaviour == "raise":
        assert culprit.returncode == 1
        assert "ValueError: the learning rate is not a number" in culprit.stderr
        assert all("the learning rate is not a number" in other.stderr for other in others)


def test_a_short_pause_is_no_false_alarm() -> None:
    with start_ranks("test_watchdog:train", 3, args=["all-reduce", 400, ""]) as ranks:
        for culprit in (1, 0):
            ranks.wait_for(culprit, "under way")
            ranks.signal(culprit, signal.SIGSTOP)
            time.sleep(1.5)
            ranks.signal(culprit, signal.SIGCONT)
        results = ranks.wait()
    assert [(r.returncode, r.stderr) for r in results] == [(0, "")] * 3


def finish_apart(first_to_leave: int) -> None:
    """A child: one rank is done much earlier than the others, by more than `dead_after_s`."""
    rank = int(os.environ["RANK"])
    with gloo_group() as store, Watchdog(store, rank, 3, heartbeat_s=0.2, dead_after_s=1.0):
        time.sleep(0 if rank == first_to_leave else 2.0)


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_ranks_that_finish_apart_say_nothing(first_to_leave: int) -> None:
    with start_ranks("test_watchdog:finish_apart", 3, args=[first_to_leave]) as ranks:
        results = ranks.wait()
    assert [(r.returncode, r.stdout, r.stderr) for r in results] == [(0, "", "")] * 3


def fail_alone() -> None:
    """A child: a world of one, or one whose other rank has finished already."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (
        gloo_group() as store,
        Watchdog(store, rank, world_size, heartbeat_s=0.2, dead_after_s=1.0),
    ):
        if rank == 0:
            time.sleep(1.0)
            raise ValueError("nobody else is there")


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_rank_that_runs_fails_by_its_own_error(world_size: int) -> None:
    with start_ranks("test_watchdog:fail_alone", world_size) as ranks:
        results = ranks.wait()
    assert [r.returncode for r in results] == [1, 0][:world_size]
    assert "ValueError: nobody else is there" in results[0].stderr
    assert [r.stderr for r in results[1:]] == [""] * (world_size - 1)


def train_under_torchrun() -> None:
    Path(os.environ["PIDS"], os.environ["RANK"]).write_text(str(os.getpid()))
    train("all-reduce", 10**9, "")


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """torchrun hosts the store and is killed: its ranks end by themselves and say why."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    command += [sys.executable, "-c", "import test_watchdog as t; t.train_under_torchrun()"]
    env = child_environment(2) | {"PIDS": str(tmp_path)}
    output = tmp_path / "output"
    with output.open("wb") as log:
        launcher = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    ranks: list[psutil.Process] = []
    try:
        wait_until(lambda: output.read_text().count("under way") == 2, 60, output)
        ranks = [psutil.Process(int((tmp_path / name).read_text())) for name in ("0", "1")]
        launcher.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=SURVIVORS_END_WITHIN_S)
        assert len(gone) == 2, (alive, output.read_text())
        assert output.read_text().count("rror: the launcher") == 2
    finally:
        launcher.kill()
        launcher.wait(timeout=10)
        for rank in ranks:
            if rank.is_running():
                rank.kill()


def wait_until(condition, timeout_s: float, log: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_a_dead_limit_below_two_heartbeats_is_refused() -> None:
    with pytest.raises(InputError, match="a heartbeat of"):
        Watchdog(None, 0, 1, heartbeat_s=0.5, dead_after_s=0.5)  # type: ignore[arg-type]
