"""The errors a user can meet, and the exit code each one means.

    InterlaceError                 base: a message and a hint
    +-- InputError      exit 2     the request is wrong: file, flag, value, combination
    +-- RunError        exit 1     the request was fine, the run failed
        +-- PeerError   exit 1     another rank died, stalled or disagrees; `ranks` names it

Assertions are for programming errors; everything a user can cause raises one of these.
"""

import difflib
from collections.abc import Iterable


class InterlaceError(Exception):
    """An error with what is wrong (`message`) and what to set (`hint`)."""

    exit_code = 1

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


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the closest of `known`, or all of them when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known names: " + ", ".join(known)
