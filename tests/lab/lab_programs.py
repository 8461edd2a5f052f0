"""Programs that the tests run in labs, and what is left of labs afterwards."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable

from interlace.lab import namespaces

LIMIT_S = 60.0
"""Longest wait for anything."""

# A rank: all-reduces its rank plus one, writes what it sees, then follows its orders.
RANK = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.full((1000,), float(rank + 1))
dist.all_reduce(total)
facts = {
    "total": total[0].item(),
    "cores": sorted(os.sched_getaffinity(0)),
    "pid": os.getpid(),
    "device": os.environ["GLOO_SOCKET_IFNAME"],
    "rate": os.environ["INTERLACE_LAB_RATE"],
    "argument": sys.argv[2],
}
path = pathlib.Path(sys.argv[1], f"{rank}.facts")
path.with_suffix(".part").write_text(json.dumps(facts))
path.with_suffix(".part").rename(path)
print(f"output of rank {rank}", flush=True)
sys.stderr.write(f"complaint of rank {rank}\\n")
dist.barrier()
dist.destroy_process_group()
verb, _, number = os.environ.get(f"ORDER_{rank}", "exit 0").partition(" ")
if verb == "signal":
    os.kill(os.getpid(), int(number))
if verb == "sleep":
    time.sleep(int(number))
sys.exit(int(number))
"""

# `run_in_lab` in a process of its own, so that it can be signalled.
OWNER = """
import sys
from interlace.lab.hosts import run_in_lab
sys.exit(run_in_lab(["python", *sys.argv[1:]], hosts=2, ranks_per_host=1, rate="1gbit"))
"""


def left() -> set[str]:
    """What exists of labs, and of our devices outside them, but for labs of other live processes.

    Somebody else on this machine may use labs while the tests run.
    """
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    names = set(re.findall(r"\bilab-\w+-\w+", spaces.stdout))
    names |= set(re.findall(r"\bil[0-9a-f]{6}[hs]\d+", links.stdout))
    folders = {path.name: path for path in namespaces.STATE.glob("[!.]*") if path.is_dir()}
    for lab_id, path in folders.items():
        with contextlib.suppress(FileNotFoundError):
            owner = json.loads((path / "owner.json").read_text())
            if owner["pid"] != os.getpid() and alive(owner["pid"]):
                names = {name for name in names if lab_id not in name}
            else:
                names.add(lab_id)
    return names


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return namespaces._start_ticks(pid) != 0


CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
except OSError as error:
    sys.exit(f"{type(error).__name__}")
"""


SEND = """
import socket, sys, time
if sys.argv[1] == "receive":
    server = socket.create_server(("", 7001)); server.settimeout(50)
    print("up", flush=True)
    peer, _ = server.accept(); received = 0
    while data := peer.recv(1 << 20): received += len(data)
    peer.sendall(b"k"); print(received)
else:
    peer = socket.create_connection((sys.argv[2], 7001), timeout=50)
    started = time.monotonic(); peer.sendall(bytes(2_000_000)); peer.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b"k"; print(time.monotonic() - started)
"""
