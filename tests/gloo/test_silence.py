"""Proves what counts as life: real processes that work, sleep, are paused, or have ended."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from interlace.config import WatchdogConfig
from interlace.ranks.identity import ProcessView, Sight
from interlace.ranks.silence import Silence
from interlace.ranks.supervise import Fault, Supervisor

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
LIMITS = WatchdogConfig(heartbeat_s=0.05, dead_after_s=0.2, start_s=0.5, end_s=0.5)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def observe(view: ProcessView, silence: Silence, looks: int) -> None:
    for _ in range(looks):
        time.sleep(0.1)
        silence.count(view.look(), 0.1, heard=False)


def test_a_process_is_seen_to_sleep_pause_and_end(sleeper: subprocess.Popen[bytes]) -> None:
    view, silence = ProcessView.of_pid(sleeper.pid), Silence(0.3, 60.0)
    observe(view, silence, 5)
    assert silence.is_over(view), "it sleeps, and does nothing"
    sleeper.send_signal(signal.SIGSTOP)
    observe(view, silence, 5)
    assert silence.is_over(view)
    assert "it is paused" in silence.text()[0]
    assert view.kill()
    sleeper.wait(timeout=10)
    assert view.ended()
    assert not view.kill()


def test_a_process_that_works_is_given_more_time() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        view, silence = ProcessView.of_pid(process.pid), Silence(0.3, 1.5)
        observe(view, silence, 10)
        alive = not silence.is_over(view)
        observe(view, silence, 6)
        over = silence.is_over(view)
        process.kill()
    assert alive
    assert over
    assert "though it uses its processor" in silence.text()[0]


def test_a_little_processor_time_is_no_work() -> None:
    """A thread that waits for the interpreter lock wakes 200 times a second."""
    silence = Silence(2.5, 60.0)
    for look in range(6):
        silence.count(Sight("S", 0.01 * look), 0.5, heard=False)
    assert silence.idle_s == 3.0
    for look in range(6):
        silence.count(Sight("S", 1.0 + 0.05 * look), 0.5, heard=False)
    assert silence.idle_s < 1.0


def test_what_cannot_be_looked_at_is_not_taken_for_dead(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    view = ProcessView.of_pid(sleeper.pid)
    monkeypatch.setattr(os, "pread", full)
    assert view.look() is None
    assert not view.ended()
    assert not view.wants_to_run()
    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(os, "pidfd_open", full)
    assert ProcessView.of_pid(sleeper.pid).look() is None


def supervise(
    process: subprocess.Popen[bytes],
    codes: dict[int, int | None],
    words: set[tuple[str, int]],
    *,
    must_join: bool = False,
) -> Fault | None:
    """What the launcher finds within a second about rank 1 = `process`, and rank 0 beside it."""
    eye = Supervisor(
        {0: os.getpid(), 1: process.pid},
        lambda: codes,
        lambda word, rank: (word, rank) in words,
        LIMITS,
        must_join=must_join,
    )
    until = time.monotonic() + 0.8
    while (fault := eye.look()) is None and time.monotonic() < until:
        time.sleep(0.02)
    return fault


def test_the_launcher_finds_who_is_paused_absent_or_does_not_end(
    sleeper: subprocess.Popen[bytes],
) -> None:
    running: dict[int, int | None] = {0: None, 1: None}
    came = {("joined", 0), ("joined", 1)}
    assert supervise(sleeper, running, came) is None
    assert supervise(sleeper, running, set()) is None, "a program that joins no run"
    absent = supervise(sleeper, running, {("joined", 0)})
    assert absent is not None
    assert (absent.rank, absent.what) == (1, "has not joined the run within 0.5 s of its start")
    assert supervise(sleeper, running, set(), must_join=True) is not None
    ended = supervise(sleeper, {0: None, 1: 0}, {("joined", 0)})
    assert ended is not None
    assert (ended.rank, ended.what) == (1, "exited with code 0 before it joined the run")
    hangs = supervise(sleeper, {0: 0, 1: None}, came | {("left", 1)})
    assert hangs is not None
    assert (hangs.rank, hangs.what) == (1, "had finished, but did not end within 0.5 s")
    sleeper.send_signal(signal.SIGSTOP)
    paused = supervise(sleeper, running, came)
    assert paused is not None
    assert paused.rank == 1
    assert paused.what.startswith("was paused (SIGSTOP) for 0.")
