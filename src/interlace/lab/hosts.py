"""Run a command on every rank of a lab: torchrun on hosts that are network namespaces.

interlace lab run --hosts 2 --ranks-per-host 1 --rate 1gbit -- interlace train demo
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from interlace.errors import InputError
from interlace.lab.namespaces import Lab, available, clean, set_rate_of, shape

__all__ = [
    "Lab",
    "available",
    "clean",
    "inside_lab",
    "run_in_lab",
    "set_own_rate",
    "set_rate_of",
]

_MASTER_PORT = 29400  # free for certain: nothing else runs in a new namespace
_GRACE_S = 5.0
"""Seconds that hosts have to end by themselves after one has failed; a choice."""
_POLL_S = 0.05
"""Seconds between two looks at the hosts; a choice."""
_BAD_INPUT = 2
"""Exit code of a command that was given something wrong (`errors.InputError`)."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a lab, and which its hosts are to get as well."""


def inside_lab() -> bool:
    """Whether this process runs on a host of a lab."""
    return bool(os.environ.get("INTERLACE_LAB_DEVICE"))


def set_own_rate(rate: str) -> None:
    """Change the rate at which the host that this process runs on sends; empty removes the limit.

    Every host's ranks must do so for a link to be equally fast both ways. Updates
    INTERLACE_LAB_RATE of this process, from which reports take the link's name.
    """
    if not inside_lab():
        raise InputError(
            "this process does not run in a lab, so it has no link whose rate could be set",
            hint="start it by `interlace lab run`",
        )
    shape(os.environ["INTERLACE_LAB_DEVICE"], rate)
    os.environ["INTERLACE_LAB_RATE"] = rate


def run_in_lab(command: Sequence[str], *, hosts: int, ranks_per_host: int, rate: str) -> int:
    """Run `command` as `hosts` x `ranks_per_host` ranks of torchrun, on links of `rate`.

    The first word `interlace` or `python` means this interpreter's. Rank 0's standard output and
    everybody's standard error go through. Returns 0; 2 if a rank exited with 2; 128 + number
    after a signal to this process; else 1. Nothing is left running in any case. Call it in the
    main thread. Raises InputError where no lab can be made.
    """
    program = _program(command)
    if ranks_per_host < 1:
        raise InputError(
            f"{ranks_per_host} ranks per host leave nothing to run",
            hint="set ranks per host to 1 or more",
        )
    clean()
    with _recorded_signals() as received, Lab(hosts, rate) as lab:
        os.mkfifo(lab.folder / "stderr")
        cores = _cores(hosts, ranks_per_host)
        with _Stderr(lab.folder / "stderr") as stderr:
            agents = [
                _start_torchrun(lab, host, ranks_per_host, cores[host], program)
                for host in range(hosts)
            ]
            _watch(lab, agents, hosts * ranks_per_host, received, stderr)
        return _exit_code(lab, agents, received)


def _program(command: Sequence[str]) -> list[str]:
    first, *rest = command or [""]
    if first == "interlace":
        return [sys.executable, "-m", "interlace", *rest]
    if first == "python":
        return [sys.executable, *rest]
    if not shutil.which(first):
        raise InputError(
            f"the program {first!r} to run in the lab does not exist",
            hint="give a program on PATH, as in `interlace train demo` or `python script.py`",
        )
    return [first, *rest]


def _cores(hosts: int, ranks_per_host: int) -> list[list[int]]:
    """The core of every rank of every host; shared in turn when there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = hosts * ranks_per_host
    if ranks > len(cores):
        print(
            f"note: {ranks} ranks share {len(cores)} cores, so they fill each other's idle time "
            "and step times say little",
            file=sys.stderr,
        )
    own = [cores[rank % len(cores)] for rank in range(ranks)]
    return [own[host * ranks_per_host :][:ranks_per_host] for host in range(hosts)]


def _start_torchrun(
    lab: Lab, host: int, ranks: int, cores: Sequence[int], program: Sequence[str]
) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={lab.hosts}"]
    torchrun += [f"--node-rank={host}", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    torchrun += [f"--master-addr={lab.address(0)}", f"--master-port={_MASTER_PORT}"]
    torchrun += [f"--log-dir={lab.folder / f'elastic-{host}'}", "--no-python"]
    pin = [sys.executable, "-m", "interlace.lab.pin", ",".join(map(str, cores)), str(lab.folder)]
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with open(_agent_log(lab, host), "wb") as log:
        agent = lab.exec(host, [*torchrun, *pin, *program], env, stderr=log.fileno())
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(agent.pid, set(cores))
    return agent


def _agent_log(lab: Lab, host: int) -> Path:
    return lab.folder / f"torchrun-{host}.log"


def _watch(
    lab: Lab,
    agents: Sequence[subprocess.Popen[bytes]],
    ranks: int,
    received: Sequence[int],
    stderr: "_Stderr",
) -> None:
    """Relay until all hosts have ended or must be killed.

    After a failure the other ranks have 5 s to end by themselves (and to say why), then SIGTERM
    and 5 s more. A signal to this process is passed on, and then they have 5 s.
    """
    told_at = failed_at = float("inf")
    while running := [agent for agent in agents if agent.poll() is None]:
        stderr.relay(_POLL_S)
        now = time.monotonic()
        codes = _codes(lab)
        failed = any(codes.values()) or any(agent.returncode for agent in agents)
        if failed and len(codes) == ranks:
            break  # a torchrun that waits for that of a failed host would do so for 5 minutes
        if failed and failed_at == float("inf"):
            failed_at = now
        if told_at == float("inf"):
            if received or now > failed_at + _GRACE_S:
                for agent in running:
                    agent.send_signal(received[0] if received else signal.SIGTERM)
                told_at = now
        elif now > told_at + _GRACE_S:
            break
    stderr.relay(0)


def _codes(lab: Lab) -> dict[int, int]:
    """Exit codes of the ranks that have ended so far, the first one first."""
    files = sorted(lab.folder.glob("exit-*"), key=lambda path: path.stat().st_mtime_ns)
    return {int(path.name.removeprefix("exit-")): int(path.read_text()) for path in files}


def _exit_code(lab: Lab, agents: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    if received:
        return 128 + received[0]
    failed = {rank: code for rank, code in _codes(lab).items() if code}
    if failed:
        rank, code = next(iter(failed.items()))
        ending = f"exited with code {code}" if code > 0 else f"was ended by signal {-code}"
        print(f"lab: rank {rank} {ending}", file=sys.stderr)
        return _BAD_INPUT if _BAD_INPUT in failed.values() else 1
    hosts = [host for host, agent in enumerate(agents) if agent.returncode != 0]
    for host in hosts:  # torchrun itself failed: its log is the only account of why
        print(f"lab: torchrun on host {host} failed", file=sys.stderr)
        sys.stderr.write(_agent_log(lab, host).read_text(errors="replace"))
    return 1 if hosts else 0


class _Stderr:
    """The pipe that all ranks write their standard error to; relayed to ours."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "_Stderr":
        # Open for writing as well: without a writer, every poll would report the end of the file.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)

    def relay(self, wait_s: float) -> None:
        """Pass on all there is, waiting for the first byte at most `wait_s`."""
        while select.select([self._pipe], [], [], wait_s)[0]:
            sys.stderr.write(os.read(self._pipe, 1 << 16).decode(errors="replace"))
            sys.stderr.flush()
            wait_s = 0


@contextlib.contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Signals that would end this process are noted in the list, so that no step is cut short.

    Those ignored before (nohup) stay ignored.
    """
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
