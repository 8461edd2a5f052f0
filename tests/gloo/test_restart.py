"""Proves that a job goes on when its ranks are started again, whatever the first attempt left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from processes import Ranks, free_port, run_ranks, start_ranks
from training import Workplace

from interlace.errors import RunError
from interlace.ranks.attempt import meet

LIMIT_S = 200
TORCHRUN = [
    "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "interlace",
    "train", "run.toml",
]  # fmt: skip
SETTINGS = {
    "strands": "1",
    "train.steps": "24",
    "checkpoint.every": "2",
    "checkpoint.resume": "latest",
    "checkpoint.background": "false",
    "output.record_every": "0",
    "plan.profile_repeats": "1",
    "watchdog.dead_after_s": "30",  # a busy machine is not a dead one
}


def test_torchrun_starts_killed_ranks_again_and_the_first_retry_succeeds(tmp_path: Path) -> None:
    """SIGKILL of a rank in mid-run, on torchrun's own store, with one restart: exit 0, each step's
    loss is there once, and the run went on from a checkpoint."""
    place = Workplace(tmp_path)
    words = [f"--{name}={value}" for name, value in SETTINGS.items()]
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr:
        torchrun = psutil.Popen(
            [sys.executable, *TORCHRUN, *words],
            cwd=tmp_path, env=place.environment, stderr=stderr, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "out/checkpoints/step-00000004").exists():
            assert torchrun.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.01)
        family = torchrun.children(recursive=True)
        (victim,) = [each for each in family if each.environ().get("RANK") == "1"]
        victim.kill()
        assert torchrun.wait(timeout=LIMIT_S) == 0, errors.read_text()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += torchrun.children(recursive=True)
        for process in [torchrun, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    steps = [event["step"] for event in place.events("out", "step")]
    (resumed,) = [e for e in place.events("out", "checkpoint") if e["action"] == "resumed"]
    assert sorted(set(steps)) == list(range(1, 25))
    assert resumed["step"] >= 4
    assert place.events("out", "end")[0]["reason"] == "finished"


def meeting(stays: bool = False, within_s: float = 30.0, absent: int | None = None) -> Any:
    """A child: meet, and tell under which keys; with `stays` go on until killed. The rank `absent`
    does not come."""
    if int(os.environ["RANK"]) == absent:
        return None
    try:
        store, rank, world_size = meet(within_s)
    except RunError as error:
        return {"error": str(error)}
    earlier = store.check([f"told/{rank}"])
    store.set(f"told/{rank}", "in this attempt")
    store.wait([f"told/{each}" for each in range(world_size)])
    print("met", flush=True)
    while stays:
        time.sleep(1)
    store.add("leaves", 1)
    while rank == 0 and store.add("leaves", 0) < world_size:  # it may host the store
        time.sleep(0.01)
    return {"earlier": earlier, "world": world_size}


def killed(ranks: Ranks, world_size: int) -> None:
    """All ranks have met, and are killed."""
    for rank in range(world_size):
        ranks.wait_for(rank, "met")
    for rank in range(world_size):
        ranks.signal(rank, signal.SIGKILL)
    ranks.wait()


def test_keys_of_a_dead_attempt_are_not_read() -> None:
    """One store for all attempts, as torchrun's; the variable that counts restarts lies."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
        "MASTER_PORT": str(store.port),
    }  # fmt: skip
    with start_ranks("test_restart:meeting", 3, args=[True], env=shared) as first:
        killed(first, 3)
    # Two attempts that got no further than the meeting: without rank 1, and without rank 0.
    with start_ranks("test_restart:meeting", 3, env=shared) as second:
        second.signal(1, signal.SIGKILL)
        second.signal(2, signal.SIGKILL)
    results = run_ranks("test_restart:meeting", 3, env=shared)
    assert [each.value for each in results] == [{"earlier": False, "world": 3}] * 3


def test_ranks_leave_the_store_of_an_attempt_that_is_about_to_end() -> None:
    """Rank 0 hosts the store at a fixed port: the new rank 1 meets the old rank 0, which is killed,
    while the new rank 0 finds the port taken."""
    port = {"MASTER_PORT": str(free_port())}
    with start_ranks("test_restart:meeting", 2, args=[True], env=port) as old:
        old.wait_for(0, "met")
        old.wait_for(1, "met")
        with start_ranks("test_restart:meeting", 2, env=port) as new:
            time.sleep(1.0)  # the longer, the more of the new ranks have tried in vain
            assert new.running() == [0, 1]
            old.signal(0, signal.SIGKILL)
            results = new.wait()
    assert [each.value for each in results] == [{"earlier": False, "world": 2}] * 2


@pytest.mark.alone
@pytest.mark.parametrize("hosted_by", ["torchrun", "rank 0"])
def test_a_rank_that_does_not_come_is_named(hosted_by: str) -> None:
    """In time, and the others that came end too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    environment = torchrun if hosted_by == "torchrun" else {}
    zero, one, two = run_ranks("test_restart:meeting", 3, args=[False, 5.0, 1], env=environment)
    assert one.value is None
    for result in (zero, two):
        assert "rank 1 has not joined the run within 5 s" in result.value["error"]
