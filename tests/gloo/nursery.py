"""Forks ranks from processes that have imported torch: importing it takes most of a short test.

Two such processes serve a pytest session, each with a hash seed of its own, as ranks of a real job
have: ranks with an even number come from one of them, the others from the other. What they import
is torch and this package, which keeps no state of a process. They compute nothing: with its first
operator torch chooses kernels, by variables that a rank's environment may set. On Linux only.

    pytest  --socket-->  server  --fork-->  rank
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.flop_counter",
    "functorch.compile",
    "torch._dynamo.backends.common",
    "torch._inductor.sizevars",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    # a first trace loads these
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.onnxrt",
    "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla",
    "torch._dynamo.backends.tvm",
    "torch._dynamo.repro.after_dynamo",
    "torch._export.passes._node_metadata_hook",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
    "pytest",
    "hypothesis",
    "interlace.api",
    "interlace.cli.app",
    "interlace.measure.start_up",
    "interlace.pipelining",
    "interlace.reshard",
    "interlace.train.worker",
)
_START_S = 60.0


class Server:
    """The client's end of one server; started when it is first asked for a rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._replies = b""
        self._ended: dict[int, int] = {}
        self._newest: int | None = None

    def fork(
        self, target: str, folder: Path, environment: Mapping[str, str], output: str
    ) -> "Forked":
        """A new process that runs `processes.child_main` on `target`, with stdout and stderr in
        `folder`/`output`.stdout and .stderr, and a process group of its own."""
        self.start(environment)
        request = {
            "target": target,
            "folder": str(folder),
            "environment": dict(environment),
            "output": str(folder / output),
            "cwd": os.getcwd(),
        }
        self._newest = None
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + _START_S
        while self._newest is None:
            self._read(deadline - time.monotonic())
        return Forked(self, self._newest)

    def code(self, pid: int) -> int | None:
        """How a rank ended, as of `Popen.poll`."""
        self._read(0)
        return self._ended.get(pid)

    def start(self, environment: Mapping[str, str]) -> None:
        """Begin to load what ranks need, unless that was done. Does not wait for it."""
        if self._process is not None and self._process.poll() is None:
            return
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-c", "import nursery; nursery.serve()"]
        self._process = subprocess.Popen(
            command,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # else numpy makes threads
            stdin=theirs,
            start_new_session=True,
        )
        theirs.close()
        self._replies = b""
        self._ended.clear()
        atexit.register(self._stop)

    def _stop(self) -> None:
        assert self._process is not None
        self._socket.close()
        self._process.wait(timeout=_START_S)

    def _read(self, timeout_s: float) -> None:
        """Take in what the server has said; RuntimeError if it is gone."""
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            if timeout_s > 0:
                raise RuntimeError(f"no rank was forked within {_START_S} s")
            return
        said = self._socket.recv(65536)
        if not said:
            raise RuntimeError("the process that forks ranks has ended")
        *lines, self._replies = (self._replies + said).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            if "code" in reply:
                self._ended[reply["pid"]] = reply["code"]
            else:
                self._newest = reply["pid"]
                self._ended.pop(reply["pid"], None)  # of an earlier process of that number


class Forked:
    """A forked rank, with what tests use of `subprocess.Popen`."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal, once it has ended."""
        if self.returncode is None:
            self.returncode = self._server.code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same, waiting for it."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code


def serve() -> None:
    """The main function of a server: forks until its client is gone, then ends what is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    client = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # another version of torch: the rank imports it
            __import__(name)
    # Ranks do not collect what they share: at the end of each, that took up to 2 s.
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    alive: set[int] = set()
    waiting = b""
    while True:
        ready, _, _ = select.select([client, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report(client, alive)
        if client not in ready:
            continue
        said = client.recv(65536)
        if not said:
            break
        *lines, waiting = (waiting + said).split(b"\n")
        for line in lines:
            pid = _fork(json.loads(line), client, (woken, wake))
            alive.add(pid)
            client.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _report(client: socket.socket, alive: set[int]) -> None:
    """Tell the client which ranks have ended."""
    for pid in list(alive):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            alive.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            client.sendall(json.dumps({"pid": pid, "code": code}).encode() + b"\n")


def _fork(request: dict[str, Any], client: socket.socket, pipe: tuple[int, int]) -> int:
    """The number of the new process; in that process it does not return."""
    streams = ("stdout", "stderr")  # made here: the client may read them as soon as it has the pid
    files = [os.open(f"{request['output']}.{name}", os.O_WRONLY | os.O_CREAT) for name in streams]
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so itself
            os.setpgid(pid, pid)
        return pid
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    client.close()
    for descriptor in pipe:
        os.close(descriptor)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path += [
        each for each in os.environ["PYTHONPATH"].split(os.pathsep) if each not in sys.path
    ]
    import processes

    processes.child_main(request["target"], request["folder"])
    raise AssertionError("child_main ends the process")


SERVERS = (Server(), Server())
