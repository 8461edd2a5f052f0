"""Hosts made of Linux network namespaces, joined by a switch, each behind a shaped link.

    ilab-<id>-h0 [il<id>h0]----[il<id>s0] ilab-<id>-sw [il<id>s1]----[il<id>h1] ilab-<id>-h1
     10.77.0.1     tbf               a bridge joins the s ports             tbf     10.77.0.2

Both ends of every link are made inside the lab's own namespaces, so the machine's own network
is never touched, and every lab can use the same addresses. `/run/interlace-labs/<id>/` says who
owns a lab; a lab whose owner has died is removed by `clean`.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from interlace.config import parse_rate
from interlace.errors import InputError, InterlaceError, RunError

STATE = Path("/run/interlace-labs")
"""Where labs note who owns them, a folder each."""
MOST_HOSTS = 250
"""Hosts of a lab: the last byte of their addresses numbers them."""
_WITHOUT_ROOT = "without root, --link.rate RATE of `interlace train` emulates the link"
"""Hint where labs cannot be made."""
_OWNER = "owner.json"
"""File in a lab's folder that names the process that made it."""
_KILL_LIMIT_S = 10.0
"""Seconds after which killing the processes of a lab is given up; a choice."""


class Lab:
    """Network namespaces that behave as `hosts` machines; removed, with all in them, on exit.

    `rate` shapes what each host sends, as in `250mbit`; empty leaves the links as fast as the
    machine. Raises InputError on entry where no lab can be made.
    """

    def __init__(self, hosts: int, rate: str) -> None:
        self.hosts = hosts
        self.rate = rate
        self.id = secrets.token_hex(3)
        self.folder = STATE / self.id
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        _check(self.hosts, self.rate)
        try:
            _claim(self.folder)
            self._build()
        except BaseException:
            _remove(self.id)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # it may not have entered its namespace yet, where _remove looks
        _remove(self.id)
        for process in self._processes:
            process.wait()

    def _build(self) -> None:
        switch = f"ilab-{self.id}-sw"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        for device in ("lo", "br0"):
            _run("ip", "-n", switch, "link", "set", device, "up")
        for host in range(self.hosts):
            space, device = self.namespace(host), self.device(host)
            port = f"il{self.id}s{host}"
            _run("ip", "netns", "add", space)
            link = ["link", "add", device, "netns", space]
            _run("ip", "-n", switch, *link, "type", "veth", "peer", "name", port)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", device)
            for each in ("lo", device):
                _run("ip", "-n", space, "link", "set", each, "up")
        self.set_rate(self.rate)

    def namespace(self, host: int) -> str:
        """Name under which `ip netns` knows a host."""
        return f"ilab-{self.id}-h{host}"

    def device(self, host: int) -> str:
        """The host's network device, inside its namespace."""
        return f"il{self.id}h{host}"

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """What a process on this host needs to use the link, and to know that it is in a lab."""
        device = self.device(host)
        return {
            "GLOO_SOCKET_IFNAME": device,
            "NCCL_SOCKET_IFNAME": device,
            # c10d warns at every connection that it finds no host name for 10.77.0.x.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "INTERLACE_LAB_DEVICE": device,
            "INTERLACE_LAB_RATE": self.rate,
        }

    def exec(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host, in a session of its own. `env` adds to this process's."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *argv],
            env={**os.environ, **self.environment(host), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def set_rate(self, rate: str) -> None:
        """Change the rate of every host's link, also while data flows; empty removes shaping."""
        set_rate_of(self.id, rate)
        self.rate = rate


def set_rate_of(lab_id: str, rate: str) -> None:
    """`Lab.set_rate` for a lab known by its id. InputError if there is none of this id."""
    spaces = [name for name in _namespaces(lab_id) if not name.endswith("-sw")]
    if not spaces:
        raise InputError(
            f"there is no lab {lab_id!r}", hint="`ip netns list` shows labs as ilab-<id>-h0"
        )
    for space in spaces:
        shape(f"il{lab_id}h{space.rpartition('-h')[2]}", rate, namespace=space)


def shape(device: str, rate: str, *, namespace: str = "") -> None:
    """Limit what `device` sends to `rate`; empty removes the limit."""
    tc = ["tc", *(["-n", namespace] if namespace else []), "qdisc"]
    if rate:
        # The bucket must hold a 64 KiB segment, or the kernel cuts every segment into frames:
        # with 32 KiB a transfer costs its sender 5 to 10 times the CPU time, above 70 KiB no more
        # than with 256 KiB. After a pause this much passes unshaped, at most 1 ms from 700mbit on.
        rate_bits = parse_rate(rate, "rate")
        burst_bytes = max(80 * 1024, rate_bits // 8000)
        limit = ["rate", f"{rate_bits}bit", "burst", str(burst_bytes), "latency", "50ms"]
        _run(*tc, "replace", "dev", device, "root", "tbf", *limit)
    elif "tbf" in _run(*tc, "show", "dev", device):
        _run(*tc, "del", "dev", device, "root")


def available() -> str:
    """Empty if a lab can be made here, else why not. Makes and removes a lab of one host."""
    try:
        with Lab(1, "1gbit"):
            return ""
    except InterlaceError as error:
        return error.message


def clean() -> int:
    """Remove labs whose owner has died, with all processes in them; returns how many.

    Needs the permissions that making them needed (InputError). Never touches a live lab.
    """
    _check(1, "")
    if not STATE.is_dir():
        return 0
    with open(STATE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two cleaners would kill and count the same labs
        dead = [folder.name for folder in STATE.iterdir() if folder.is_dir() and _is_dead(folder)]
        for lab_id in dead:
            _remove(lab_id)
    return len(dead)


def _check(hosts: int, rate: str) -> None:
    """InputError unless this request can work on this machine, as far as can be seen."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise InputError(
            f"a lab of {hosts} hosts cannot be made", hint=f"set hosts to 1..{MOST_HOSTS}"
        )
    if rate:
        parse_rate(rate, "rate")
    if platform.system() != "Linux":
        raise InputError(f"a lab needs Linux, and this is {platform.system()}", hint=_WITHOUT_ROOT)
    if os.geteuid() != 0:
        raise InputError("a lab needs root", hint=_WITHOUT_ROOT)
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise InputError(
                f"a lab needs the program `{program}`",
                hint=f"install iproute2 (apt install iproute2), or: {_WITHOUT_ROOT}",
            )


def _run(*command: str) -> str:
    """Output of an ip or tc command; InputError with what it said if it fails."""
    # In its own session, so that Ctrl-C in a terminal does not end a removal half way.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise InputError(f"no lab can be made: `{' '.join(command)}`: {said}", hint=_WITHOUT_ROOT)
    return done.stdout


def _claim(folder: Path) -> None:
    """Write who owns the lab. In one step, so that no reader finds a folder without an owner."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        owner = {"pid": os.getpid(), "start_ticks": _start_ticks(os.getpid())}
        (part / _OWNER).write_text(json.dumps(owner))
        part.rename(folder)
    except OSError as error:
        raise InputError(f"no lab can be made: {error}", hint=_WITHOUT_ROOT) from None


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it does not exist (or is a zombie).

    Together with the pid it names one process, though pids are used again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_dead(folder: Path) -> bool:
    try:
        owner = json.loads((folder / _OWNER).read_text())
    except FileNotFoundError:
        # Removed by its owner between our look at the folder and this one, or half made.
        return folder.is_dir() and not folder.name.startswith(".")
    return _start_ticks(owner["pid"]) != owner["start_ticks"]


def _namespaces(lab_id: str) -> list[str]:
    return re.findall(rf"^ilab-{lab_id}-(?:h\d+|sw)\b", _run("ip", "netns", "list"), re.MULTILINE)


def _remove(lab_id: str) -> None:
    """End every process in the lab and delete its links, namespaces and folder."""
    spaces = _namespaces(lab_id)
    _kill_all(spaces)
    for space in spaces:
        with contextlib.suppress(InputError):  # another cleaner, or a link that was never made
            if not space.endswith("-sw"):
                # A socket that is still closing keeps a deleted namespace, and the link, alive.
                _run("ip", "-n", space, "link", "del", f"il{lab_id}h{space.rpartition('-h')[2]}")
    for space in spaces:
        with contextlib.suppress(InputError):
            _run("ip", "netns", "del", space)
    left = _namespaces(lab_id)
    if left:
        raise RunError(f"these namespaces could not be deleted: {', '.join(left)}")
    gone = STATE / f".{lab_id}.gone"
    with contextlib.suppress(FileNotFoundError):  # the lab was refused before it had a folder
        (STATE / lab_id).rename(gone)
        shutil.rmtree(gone)


def _kill_all(spaces: Sequence[str]) -> None:
    deadline = time.monotonic() + _KILL_LIMIT_S
    while pids := list(_pids(spaces)):
        for pid in pids:
            for number in (signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if time.monotonic() > deadline:
            raise RunError(f"processes {pids} of a lab do not end, not even by SIGKILL")
        time.sleep(0.02)


def _pids(spaces: Sequence[str]) -> Iterator[int]:
    for space in spaces:
        yield from map(int, _run("ip", "netns", "pids", space).split())
