"""What bounds exchanges that wait in streams, with exchanges and a device that are only pretended.

On NCCL it is tested by `tests/gpu/test_pipelines_cuda.py`."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.runtime import stream_watch
from interlace.runtime.stream_watch import StreamWatch

LONG_S = 60.0


class Pretended:
    """An exchange of which the device says when it is over."""

    def __init__(self, *, over: bool) -> None:
        self.over = over

    def is_completed(self) -> bool:
        return self.over


class Device:
    """A stream that is done when every exchange is over, or was given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given_up: list[str] = []
        self.free = threading.Event()
        stream = SimpleNamespace(synchronize=lambda: self.free.wait(LONG_S))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        monkeypatch.setattr(stream_watch, "_LOOK_S", 0.01)
        monkeypatch.setattr(stream_watch, "_ASK_S", 0.05)

    def group(self, name: str) -> Any:
        """A process group on it."""

        def abort() -> None:
            self.given_up.append(name)
            self.free.set()

        return SimpleNamespace(abort=abort)

    def watch(self, wait_s: float, *, others_left: bool = False) -> StreamWatch:
        """Of two groups."""
        groups = [self.group("pipeline"), self.group("replicas")]
        return StreamWatch(wait_s, torch.device("cuda"), groups, lambda: others_left)


def test_the_oldest_exchange_that_is_not_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    watched = device.watch(0.2)
    with watched.watching():
        for name, over in {"first": True, "second": False, "third": False}.items():
            watched.note(Pretended(over=over), name)
    assert watched.late == ("second", "nothing came within 0.2 s")
    assert device.given_up == ["pipeline", "replicas"]


def test_another_rank_that_has_left_ends_it_long_before(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Device(monkeypatch).watch(LONG_S, others_left=True)
    with watched.watching():
        watched.note(Pretended(over=False), "receive")
    assert watched.late == ("receive", "another rank has left the step")


def test_steps_that_move_on_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes longer than the bound in all, of which no wait does; then one with nothing to
    wait for, and one that raises, whose exchanges are forgotten."""
    device = Device(monkeypatch)
    watched = device.watch(0.3)
    exchanges = [Pretended(over=False) for _ in range(6)]

    def moves() -> None:
        for each in exchanges:
            threading.Event().wait(0.1)
            each.over = True
        device.free.set()

    mover = threading.Thread(target=moves)
    with watched.watching():
        for each in exchanges:
            watched.note(each, "receive")
        mover.start()
    mover.join()
    with watched.watching():
        pass
    watched.note(Pretended(over=False), "receive")
    with pytest.raises(ValueError, match="the user's own"), watched.watching():
        raise ValueError("the user's own")
    with watched.watching():
        threading.Event().wait(0.5)
    assert watched.late is None
    assert not device.given_up
