"""Runs `interlace train` and `interlace plan` as a user does, on a tiny model and made-up text."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_command
import psutil
from processes import BESIDE_OTHERS, PATIENCE, child_environment

LIMIT_S = 110 * PATIENCE
RUN = """
[model]
layers = 2
width = 64
heads = 4
kv_heads = 4
ffn_width = 96
[parallel]
tensor = 2
[data]
path = "text"
sequence_length = 32
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[train]
steps = 4
micro_batches = 4
micro_batch_size = 2
evaluate_every = 0
evaluate_batches = 2
[plan]
profile_repeats = 2
[output]
directory = "out"
record_every = 3
"""
PATIENT = """
[watchdog]
dead_after_s = 30
"""
"""Beside other tests a rank may wait long for a core."""


class Workplace:
    """A folder with a text, a run file and a cache of its own; commands run inside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        draw = random.Random(1)
        words = ["interlace", "hides", "communication", "behind", "compute", "two", "strands"]
        lines = [" ".join(draw.choices(words, k=8)) + ".\n" for _ in range(1500)]
        (folder / "text").write_text("".join(lines))
        (folder / "run.toml").write_text(RUN + (PATIENT if BESIDE_OTHERS else ""))

    @property
    def environment(self) -> dict[str, str]:
        """Outside any job."""
        job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {k: v for k, v in child_environment(1).items() if k not in job}
        return env | {"XDG_CACHE_HOME": str(self.folder / "cache")}

    def start(self, *words: str, **environment: str) -> "Command":
        """Start `interlace WORDS`."""
        return Command(self.folder, words, self.environment | environment)

    def interlace(self, *words: str, code: int = 0, afresh: bool = False) -> str:
        """Run `interlace WORDS` to its end, which must be `code`; what it said on stderr. With
        `afresh` its processes load everything themselves, as those of users do."""
        if sys.platform == "linux" and not afresh:
            environment = self.environment
            ended, said = forked_command.interlace(words, self.folder, environment, LIMIT_S)
        else:
            with self.start(*words).running() as command:
                ended, said = command.end()
        assert ended == code, said
        return said

    def train(self, *words: str, out: str, code: int = 0, afresh: bool = False) -> str:
        """Run `interlace train run.toml` into the folder `out`."""
        words = ("train", "run.toml", "--output.directory", out, *words)
        return self.interlace(*words, code=code, afresh=afresh)

    def events(self, out: str, name: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind."""
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def losses(self, out: str) -> list[float]:
        """Training losses; JSON keeps every bit of a float."""
        return [event["loss"] for event in self.events(out, "step")]


class Command:
    """A running `interlace`, and all processes that it ever had."""

    def __init__(
        self,
        folder: Path,
        words: tuple[str, ...],
        environment: dict[str, str],
        *,
        module: str = "interlace",
    ) -> None:
        self.errors = folder / f"stderr-{time.monotonic_ns()}"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self.family: set[psutil.Process] = {psutil.Process(self.process.pid)}

    @contextlib.contextmanager
    def running(self) -> Iterator["Command"]:
        """Leaves nothing behind, whatever happens inside."""
        try:
            yield self
        finally:
            self.look()
            for process in self.left():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    process.kill()
            self.process.wait(timeout=10)

    def look(self) -> None:
        """Note which processes there are now."""
        for process in list(self.family):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.family.update(process.children(recursive=True))

    def wait_for(self, text: str) -> None:
        """Wait until `text` was said on stderr, and note which processes there are."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.said():
            assert self.process.poll() is None, f"ended without saying {text!r}:\n{self.said()}"
            assert time.monotonic() < deadline, f"never said {text!r}:\n{self.said()}"
            time.sleep(0.02)
        self.look()

    def said(self) -> str:
        """Standard error so far."""
        return self.errors.read_text(errors="replace")

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("RANK") == str(number):
                    return process
        raise AssertionError(f"rank {number} does not run:\n{self.said()}")

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once the command has ended by itself."""
        try:
            code = self.process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {LIMIT_S} s:\n{self.said()}") from None
        return code, self.said()

    def left(self) -> list[psutil.Process]:
        """Processes of this command that still run."""
        return [process for process in self.family if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> float:
    """Signal a process; returns time.monotonic() at that moment."""
    os.kill(process.pid, number)
    return time.monotonic()
