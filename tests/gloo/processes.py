"""Starts N real processes that form a world, with a hard time limit and nothing left behind.

    results = run_ranks("test_something:child", 2, args=[16], timeout_s=30)
    assert [r.value for r in results] == [136, 136]

`child(16)` runs in every process with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set and one
torch thread; what it returns (JSON) comes back as `value`. Tests that must signal a rank while it
runs use `start_ranks`, a context manager. A rank over its limit prints the stacks of all its
threads and is killed, and the test fails with everything the ranks printed.
"""

import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nursery

Process = subprocess.Popen[bytes] | nursery.Forked
_POLL_S = 0.02
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
"""Whether other test files run at the same time, also in a rank."""
PATIENCE = 3.0 if BESIDE_OTHERS else 1.0
"""By which a limit is longer beside others, if it promises nothing and only ends what hangs."""
_GRACE_S = 3.0  # between a child's own time limit (it prints stacks) and the parent's kill


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """How one rank ended. `seconds` counts from its start, `ended_at` is time.monotonic()."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    ended_at: float
    value: Any = None


class Ranks:
    """The running processes of one world; made by `start_ranks`."""

    def __init__(self, processes: list[Process], folder: Path, deadline: float) -> None:
        self._processes = processes
        self._folder = folder
        self._deadline = deadline
        self._started_at = time.monotonic()
        self._ended_at: dict[int, float] = {}

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to one rank; returns time.monotonic() at that moment."""
        os.kill(self._processes[rank].pid, number)
        return time.monotonic()

    def output(self, rank: int, stream: str = "stdout") -> str:
        return (self._folder / f"{rank}.{stream}").read_text(errors="replace")

    def wait_for(self, rank: int, text: str) -> None:
        """Waits until `rank` has printed `text` to stdout (print with flush=True)."""
        while text not in self.output(rank):
            self._reap()
            if rank in self._ended_at or time.monotonic() > self._deadline:
                raise TimeoutError(f"rank {rank} never printed {text!r}\n{self.report()}")
            time.sleep(_POLL_S)

    def wait(self, ranks: Sequence[int] | None = None) -> list[RankResult]:
        """Waits until the given ranks (default: all) have ended, and returns how."""
        wanted = range(len(self._processes)) if ranks is None else ranks
        while not all(rank in self._ended_at for rank in wanted):
            if time.monotonic() > self._deadline + _GRACE_S:
                raise TimeoutError(f"ranks still run at the time limit\n{self.report()}")
            self._reap()
            time.sleep(_POLL_S)
        if any(self._ended_at[rank] > self._deadline for rank in wanted):
            raise TimeoutError(f"ranks were ended by the time limit\n{self.report()}")
        return [self._result(rank) for rank in wanted]

    def running(self) -> list[int]:
        self._reap()
        return [r for r in range(len(self._processes)) if r not in self._ended_at]

    def report(self) -> str:
        """What every rank printed: the text of a failed test."""
        parts = []
        for rank, process in enumerate(self._processes):
            state = process.returncode if rank in self._ended_at else "running"
            parts.append(f"--- rank {rank} (exit: {state}) stdout\n{self.output(rank)}")
            parts.append(f"--- rank {rank} stderr\n{self.output(rank, 'stderr')}")
        return "\n".join(parts)

    def kill(self) -> None:
        """Kills what is left, with its children; a stopped process dies by SIGKILL as well."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # the whole group ended already
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(timeout=10)

    def _reap(self) -> None:
        now = time.monotonic()
        for rank, process in enumerate(self._processes):
            if rank not in self._ended_at and process.poll() is not None:
                self._ended_at[rank] = now

    def _result(self, rank: int) -> RankResult:
        value = self._folder / f"{rank}.value"
        return RankResult(
            rank=rank,
            returncode=self._processes[rank].returncode,
            stdout=self.output(rank),
            stderr=self.output(rank, "stderr"),
            seconds=self._ended_at[rank] - self._started_at,
            ended_at=self._ended_at[rank],
            value=json.loads(value.read_text()) if value.exists() else None,
        )


@contextlib.contextmanager
def start_ranks(
    target: str,
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Starts `world_size` processes that call `target` ("module:function") with `args` (JSON)."""
    timeout_s *= PATIENCE
    with tempfile.TemporaryDirectory(prefix="interlace-ranks-") as name:
        folder = Path(name)
        (folder / "args").write_text(json.dumps(list(args)))  # may be longer than a command line
        shared = child_environment(world_size) | dict(env or {})
        processes: list[Process] = []
        ranks = Ranks(processes, folder, time.monotonic() + timeout_s)
        try:
            if sys.platform == "linux" and world_size > 1:
                for server in nursery.SERVERS:  # both load torch at the same time
                    server.start(shared)
            for rank in range(world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "RANK_LIMIT_S": str(timeout_s)}
                processes.append(_start(target, folder, rank, shared | own))
            yield ranks
        finally:
            ranks.kill()


def _start(target: str, folder: Path, rank: int, env: Mapping[str, str]) -> Process:
    if sys.platform == "linux":
        return nursery.SERVERS[rank % 2].fork(target, folder, env, str(rank))
    code = "import sys, processes; processes.child_main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, target, str(folder)]
    with (
        open(folder / f"{rank}.stdout", "wb") as out,
        open(folder / f"{rank}.stderr", "wb") as err,
    ):
        return subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)


def run_ranks(
    target: str,
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Runs `target` in `world_size` processes to the end; with `check`, all must exit with 0."""
    with start_ranks(target, world_size, args=args, timeout_s=timeout_s, env=env) as ranks:
        results = ranks.wait()
        if check and any(r.returncode for r in results):
            raise AssertionError(f"a rank failed (check=False allows that)\n{ranks.report()}")
        return results


@contextlib.contextmanager
def gloo_group(timeout_s: float = 30.0, *, named: bool = True) -> Iterator[Any]:
    """In a child: the default gloo process group, from the environment, or, unless `named`, the one
    that torch makes where no backend is given. Yields its store."""
    import torch.distributed as dist

    store, rank, world_size = next(dist.rendezvous("env://"))
    timeout = datetime.timedelta(seconds=timeout_s * PATIENCE)
    backend = "gloo" if named else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # Rank 0 hosts the store, and a rank with little to do could end while another still connects.
    store.set(f"built/{rank}", "")
    store.wait([f"built/{each}" for each in range(world_size)], timeout)
    # The answer to that must have come as well; what is set needs none.
    store.set(f"seen/{rank}", "")
    if rank == 0:
        store.wait([f"seen/{each}" for each in range(world_size)], timeout)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on, below the range that outgoing connections draw from."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(12000, 30000)
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 12000 and 30000")


def child_main(target: str, name: str) -> None:
    """The main function of a child: calls the target, writes what it returns."""
    folder = Path(name)
    if "AS_FOR_USERS" not in os.environ:  # of `forked_command`, which has a limit of its own
        warnings.simplefilter("error")
        # As in pyproject.toml: deprecated names that torch itself uses.
        warnings.filterwarnings("ignore", ".*torch.distributed.*", FutureWarning, "torch")
        # Its thread would not be there in a fork, where setting another limit would wait for it.
        faulthandler.dump_traceback_later(float(os.environ["RANK_LIMIT_S"]), exit=True)
    module, function = target.split(":")
    args = json.loads((folder / "args").read_text())
    value = getattr(importlib.import_module(module), function)(*args)
    if value is not None:
        (folder / f"{os.environ['RANK']}.value").write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # transport threads that outlive the interpreter abort it, once in some 100 runs


def child_environment(world_size: int) -> dict[str, str]:
    """The environment of every child, but for its rank."""
    launcher = ("TORCHELASTIC_", "GROUP_", "ROLE_")  # pytest itself may run under torchrun
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    return env | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
