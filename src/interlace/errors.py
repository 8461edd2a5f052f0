"""The errors a user can meet, and the exit code each one means.

    InterlaceError                 base: a message and a hint
    +-- InputError      exit 2     the request is wrong: file, flag, value, combination
    +-- RunError        exit 1     the request was fine, the run failed
        +-- PeerError   exit 1     another rank died, stalled or disagrees; `ranks` names it

Assertions are for programming errors; everything a user can cause raises one of these.
"""

import difflib
import os
import sys
import traceback
from collections.abc import Iterable


class InterlaceError(Exception):
    """An error with what is wrong (`message`) and what to set (`hint`)."""

    exit_code = 1
    told = False
    """Whether the user has been told already, by `complain`."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class InputError(InterlaceError):
    """The request itself is wrong; nothing was started."""

    exit_code = 2


class RunError(InterlaceError):
    """The request was fine and the run failed."""


class PeerError(RunError):
    """Another rank died, stalled or disagrees. `ranks` are the ranks at fault."""

    def __init__(self, message: str, *, ranks: Iterable[int], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


def complain(message: str, hint: str = "", *, verbose: bool = False) -> None:
    """Print `error:` and `hint:` lines, naming this rank; with `verbose` the traceback first.

    One write, so that the messages of several ranks do not mix.
    """
    rank = os.environ.get("RANK", "")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    text = f"error: {message}\n" if alone else f"error: rank {rank}: {message}\n"
    if hint:
        text += f"hint: {hint}\n"
    if verbose:
        text = traceback.format_exc() + text
    sys.stderr.write(text)
    sys.stderr.flush()


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the closest of `known`, or all of them when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known names: " + ", ".join(known)
