"""A fake trainer for the command-line tests: real processes, no torch, told what to do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

LIMIT_S = 90
"""Longest wait for anything; a rank that hangs is told to sleep longer than this."""

# Python imports sitecustomize at start-up; that puts the fake in place of interlace.train.worker.
_SITECUSTOMIZE = """
import os, pathlib, signal, sys, time, types


def main(config):
    rank = os.environ["RANK"]
    if os.environ.get("FAKE_IGNORES_SIGNALS"):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    folder = pathlib.Path(os.environ["FAKE_FOLDER"])
    cores = ",".join(map(str, os.sched_getaffinity(0))) if sys.platform == "linux" else ""
    facts = f"{os.getpid()} {os.environ['WORLD_SIZE']} {config.train.steps} {cores}"
    (folder / f"{rank}.part").write_text(facts)
    (folder / f"{rank}.part").rename(folder / f"{rank}.facts")
    while len(list(folder.glob("*.facts"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    for order in os.environ.get(f"FAKE_RANK_{rank}", "exit 0").split("; "):
        verb, _, number = order.partition(" ")
        if verb == "raise":
            raise RuntimeError("broken on purpose")
        if verb == "signal":
            os.kill(os.getpid(), int(number))
        if verb == "sleep":
            time.sleep(int(number))
        if verb == "exit":
            return int(number)


module = types.ModuleType("interlace.train.worker")
module.main = main
sys.modules[module.__name__] = module
"""


class Job:
    """`interlace train` in its own process, with fake trainers."""

    def __init__(self, folder: Path, arguments: list[str], orders: dict[str, str]) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            **orders,
            "PYTHONPATH": os.pathsep.join(paths),
            "FAKE_FOLDER": str(folder),
            "TMPDIR": str(folder),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "interlace", "train", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def facts(self) -> list[list[str]]:
        """Per rank: pid, world size, steps, cores. Waits until every rank has written them."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            files = sorted(self.folder.glob("*.facts"))
            if files and len(files) == int(files[0].read_text().split()[1]):
                break
            time.sleep(0.02)
        return [file.read_text().split() for file in sorted(self.folder.glob("*.facts"))]

    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [int(facts[0]) for facts in self.facts()]

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once the command has ended by itself."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors

    def left_over(self) -> list[int]:
        """Ranks that are still alive, given a moment to go."""
        alive = [psutil.Process(pid) for pid in self.pids() if psutil.pid_exists(pid)]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            alive = [each for each in alive if _is_alive(each)]
            if not alive:
                break
            time.sleep(0.05)
        return [each.pid for each in alive]

    def kill(self) -> None:
        """Leave nothing behind, whatever the test saw."""
        pids = [int(file.read_text().split()[0]) for file in self.folder.glob("*.facts")]
        for pid in [self.process.pid, *pids]:
            if psutil.pid_exists(pid) and _is_alive(psutil.Process(pid)):
                psutil.Process(pid).kill()
        self.process.communicate(timeout=LIMIT_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start `interlace train` with fake trainers; keyword arguments are their orders.

    FAKE_RANK_1="sleep 1; exit 1" is what rank 1 does once all ranks are there.
    """
    jobs: list[Job] = []

    def start(*arguments: str, **orders: str) -> Job:
        jobs.append(Job(tmp_path, list(arguments), orders))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
