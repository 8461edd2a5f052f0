"""Says what a command works on before its first result: on a terminal a bar, elsewhere a line now
and then, so that a start of a minute is not silent.

    with shown(STAGES):             # a command
        at("tracing the model")

    with told("compile_step"):      # a call in a program of the user's, whose terminal it is
        at("tracing the module")
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TextIO

QUIET_S = 10.0
"""Seconds without a word after which a file or a pipe gets a line. A choice: starts of small models
take less, and stay as short as they were."""
REDRAWN_PER_S = 2
"""How often a bar is drawn again; each time takes 2 ms of a core on which operators are timed."""

_at: ContextVar[Callable[[str], None] | None] = ContextVar("at", default=None)
"""What is told of a new stage; nobody outside `shown` and `told`."""


def at(stage: str) -> None:
    """Say that a stage begins, as in `measuring operators`. Free where nothing is `shown`."""
    if say := _at.get():
        say(stage)


@contextmanager
def shown(stages: int, out: TextIO | None = None) -> Iterator[None]:
    """Show the stages that begin inside, about `stages` of them, on `out` (standard error)."""
    out = out or sys.stderr
    with _bar(stages, out) if out.isatty() else _lines(out) as say, _heard_by(say):
        yield


@contextmanager
def told(who: str, out: TextIO | None = None) -> Iterator[None]:
    """Show the stages that begin inside in lines that `who` begins, on a terminal too, which is the
    caller's and may hold a bar of theirs. Nothing more where stages are shown already."""
    if _at.get() is not None:
        yield
        return
    with _lines(out or sys.stderr, f"{who}: ") as say, _heard_by(say):
        yield


@contextmanager
def _heard_by(say: Callable[[str], None]) -> Iterator[None]:
    token = _at.set(say)
    try:
        yield
    finally:
        _at.reset(token)


@contextmanager
def _bar(stages: int, out: TextIO) -> Iterator[Callable[[str], None]]:
    """Below what is printed meanwhile, and gone at the end."""
    from rich.console import Console  # noqa: PLC0415  takes 50 ms
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    class Lasting(Console):
        """Leaves the cursor alone: a rank may be ended before it could bring it back."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Lasting(file=out)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=REDRAWN_PER_S
    ) as bar:
        task = bar.add_task("starting", total=stages)
        begun: list[str] = []

        def say(stage: str) -> None:
            if stage not in begun:
                begun.append(stage)
            bar.update(task, description=stage, completed=min(len(begun) - 1, stages))

        yield say


@dataclass
class _Stage:
    """What is worked on now; another thread reads it."""

    name: str = "starting"
    since: float = field(default_factory=time.monotonic)


@contextmanager
def _lines(out: TextIO, who: str = "") -> Iterator[Callable[[str], None]]:
    """A line for each `QUIET_S` of the same start; `who` begins it."""
    begun, ended, now = time.monotonic(), threading.Event(), _Stage()

    def say(stage: str) -> None:
        now.name, now.since = stage, time.monotonic()

    def tell() -> None:
        while not ended.wait(QUIET_S):
            at_s = time.monotonic()
            print(
                f"{who}{now.name}: {at_s - now.since:.0f} s, {at_s - begun:.0f} s since the start",
                file=out, flush=True,
            )  # fmt: skip

    thread = threading.Thread(target=tell, name="start-up", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
