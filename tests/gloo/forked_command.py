"""Runs `interlace` in a process forked from one that has torch in it (`nursery.py`), and its ranks
in processes forked from that: loading torch and what a first trace needs takes most of a short run.

All ranks have one hash seed, and their environment is not that of `/proc`: a run that a test looks
into or disturbs is started as a user does (`training.Command`). On Linux only.

    pytest  --socket-->  nursery  --fork-->  interlace train  --fork-->  rank
"""

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import nursery
import psutil

STARTED = ("-P", "-u", "-m", "interlace")
"""What `cli.ranks.become_rank` puts between Python and the words of a rank."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def interlace(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float
) -> tuple[int, str]:
    """Run `interlace WORDS` in `folder` to its end: exit code and standard error. Leaves nothing
    behind; TimeoutExpired after `limit_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="interlace-command-") as name:
        place = Path(name)
        (place / "args").write_text(json.dumps([list(words), str(folder)]))
        target = "forked_command:main"
        started = nursery.SERVERS[0].fork(
            target, place, {**environment, "AS_FOR_USERS": "1"}, "command"
        )
        try:
            code = started.wait(limit_s)
        finally:
            _end(started)
        return code, (place / "command.stderr").read_text(errors="replace")


def main(words: list[str], folder: str) -> None:
    """In the forked process: the command."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    del os.environ["AS_FOR_USERS"]
    os.chdir(folder)

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
        return ForkedRank(args, env=env)

    with mock.patch.object(SubprocessHandler, "_popen", popen):
        _run(words)


class ForkedRank(subprocess.Popen[bytes]):
    """A rank of `become_rank` that is a fork of its launcher."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        python, *rest = args
        assert (python, tuple(rest[:4])) == (sys.executable, STARTED), args
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        os.setsid()
        os.closerange(3, 4096)  # the store's connections among them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        logging.getLogger("torch.distributed.elastic").setLevel(logging.NOTSET)
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic."):
                logging.getLogger(name).setLevel(logging.NOTSET)
        environment = others[5]  # behind executable, preexec_fn, close_fds, pass_fds and cwd
        os.environ.clear()
        os.environ.update(environment)
        _run(rest[4:])


def _run(words: Sequence[str]) -> NoReturn:
    """The life of a process `interlace WORDS`."""
    from interlace.__main__ import entry

    sys.argv = ["interlace", *words]
    atexit._clear()  # of the process that this one was forked from
    code = 1
    try:
        entry()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(started: nursery.Forked) -> None:
    """Kills what still runs, ranks first: they have sessions of their own."""
    if started.poll() is not None:
        return
    command = psutil.Process(started.pid)
    for process in [*command.children(recursive=True), command]:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it has just ended
            continue
    started.wait(10)
