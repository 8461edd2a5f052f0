"""What a command says before its first result."""

import io
import re
import time

import pytest

from interlace import start_progress
from interlace.start_progress import at, shown, told


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_line_for_each_stretch_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for a start that is over before; the stage, its seconds and those of the start."""
    out = io.StringIO()
    with shown(2, out):
        at("reading")
    assert out.getvalue() == ""
    monkeypatch.setattr(start_progress, "QUIET_S", 0.02)
    with shown(2, out):
        at("reading")
        at("tracing")
        deadline = time.monotonic() + 20
        while "\n" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    first = out.getvalue().splitlines()[0]
    assert re.fullmatch(r"tracing: \d+ s, \d+ s since the start", first)
    written = out.getvalue()
    at("nobody listens any more")
    time.sleep(0.05)
    assert out.getvalue() == written


def test_a_call_in_a_users_program_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lines on a terminal too; not a word of its own where stages are shown already."""
    out, inner = Terminal(), Terminal()
    with told("compile_step", out):
        at("tracing")
    assert out.getvalue() == ""
    monkeypatch.setattr(start_progress, "QUIET_S", 0.02)
    with told("compile_step", out):
        at("tracing")
        with told("another", inner):
            at("planning")
            deadline = time.monotonic() + 20
            while "\n" not in out.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
    first = out.getvalue().splitlines()[0]
    assert re.fullmatch(r"compile_step: planning: \d+ s, \d+ s since the start", first)
    assert inner.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    out = Terminal()
    with shown(2, out):
        at("reading")
        at("tracing")
        at("reading")  # a stage may come again, and the bar does not go back
    assert "0:00:00" in out.getvalue()
    assert "\x1b[?25l" not in out.getvalue()  # a hidden cursor
    assert out.getvalue().endswith("\x1b[2K")
